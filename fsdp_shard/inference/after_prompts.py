"""Blocks that compute on the CPU where they lie in the checkpoint's files: a prompt's pass leaves none of their pages.

A prompt passes once, and takes far longer than to map what it needs, which the page cache keeps: so to read a prompt,
or to score texts, takes the process a block of resident memory and not a model. Tokens after it pass again and again,
each in little time: what those use stays. Knows modules and pages, no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_shard.inference.pages import FilePages

_PROMPT = 8  # positions; fewer are a short turn of a chat, or drafts of an assisting model, and come again


def let_go_after_prompts(module: nn.Module, pages: Sequence[FilePages]) -> None:
    """Give `pages` up after each pass of `module` over a prompt, but for those that were written to."""

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if _num_positions(args, kwargs) >= _PROMPT:
            for these in pages:
                these.let_go()

    module.register_forward_hook(after, with_kwargs=True)


def _num_positions(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of the first input: [batch, positions, ...], token ids [batch, positions], or vectors [positions, width]."""
    inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim > 1)
    first = next(inputs, None)
    if first is None:
        return 1
    return first.shape[0 if first.ndim == 2 and first.is_floating_point() else 1]
