"""What the commands of the documents begin with, made here: a text and a model."""

from __future__ import annotations

import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_PARAGRAPHS = 4  # of an entry


def write_dictionary(file: Path) -> Path:
    """Entries as those of the Jargon File: a term, a line for its sound, an empty one, indented paragraphs.

    As there, most are longer than the context of the model, which `doctor` warns of.
    """
    meanings = {name: textwrap.dedent(text).split("\n\n") for name, text in sorted(topics.items())}
    entries = [
        f"{name} {number}\n\n\n{textwrap.indent(_joined(paragraphs[number : number + _PARAGRAPHS]), '    ')}\n"
        for name, paragraphs in meanings.items()
        for number in range(0, len(paragraphs), _PARAGRAPHS)
    ]
    file.write_text("\n".join(entries), encoding="utf-8")
    return file


def _joined(paragraphs: list[str]) -> str:
    return "\n\n".join(paragraph.strip() for paragraph in paragraphs)


def write_model(directory: Path, text: Path) -> Path:
    """A random Llama with the layers and the context of the one in the document, and a tokenizer for `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=341,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
