"""Byte tokenizers with a chat template, and what the template makes of messages without transformers."""

from __future__ import annotations

import json
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.data.chat_templates import Family
from tests.data.conftest import byte_tokenizer


def chat_tokenizer(template: str | None) -> Any:
    """A byte tokenizer with the special tokens of ChatML and this template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(family: Family) -> Any:
    """A byte tokenizer with the special tokens and the template of a family."""
    tokenizer = byte_tokenizer(family.tokens[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens[:-1])})
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = family.template
    return tokenizer


def rendered(family: Family, messages: list[Any], tools: Any = None, *, prompt: bool = False) -> str:
    """What the template makes of messages, without transformers."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    names = {"bos_token": "<bos>", "eos_token": family.tokens[-1], "tools": tools}
    return environment.from_string(family.template).render(messages=messages, add_generation_prompt=prompt, **names)
