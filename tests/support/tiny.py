"""Small random models with the awkward sizes that real ones have: nothing divides by the number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def llama_config(*, tied: bool = True, layers: int = 2) -> LlamaConfig:
    """9 x 4 hidden, 3 heads over 1 KV head, intermediate 85, vocabulary 257: uneven for 2, 3 and 4 ranks."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=36,
        intermediate_size=85,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        vocab_size=257,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        dtype="float32",
    )


def llama(seed: int = 0, *, tied: bool = True, layers: int = 2) -> PreTrainedModel:
    """A random Llama with the weights that `seed` gives."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(llama_config(tied=tied, layers=layers))
    return model


def causal_class(config: PretrainedConfig) -> str:
    """The name of transformers' causal model for this config."""
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return str(kind.__name__)


def token_batch(step: int, rows: int = 12, length: int = 16, vocabulary: int = 257) -> torch.Tensor:
    """Random token ids [rows, length] that depend on `step` alone."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))


def save_model(directory: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Write the tiny Llama and a tokenizer whose tokens are bytes, as transformers writes them."""
    llama(seed, tied=tied).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def byte_tokenizer(*, ends: bool = False) -> PreTrainedTokenizerFast:
    """256 byte tokens and <|end|>: exactly the vocabulary of `llama_config`; with `ends`, it ends each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if ends:
        end = ("<|end|>", vocabulary["<|end|>"])
        single, pair = "$A <|end|>", "$A <|end|> $B <|end|>"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def save_adapter(directory: Path, base: Path) -> Path:
    """Write a LoRA of `base` with random weights, as peft does."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.23 for a property by its old name
        warnings.simplefilter("ignore", FutureWarning)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(directory))
    return directory
