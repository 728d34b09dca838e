"""The models of the checks: random Llamas in the shapes of real ones, made where needed; tiny in a rehearsal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.utils import replace_tensors
from tests.gpu.device import IS_REHEARSAL
from tests.support.tiny import byte_tokenizer

_SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "tie_word_embeddings": True},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "tie_word_embeddings": True},
}
_HEADS = {"8B": 32, "1.2B": 32, "100M": 12, "5M": 4}
_VOCABULARIES = {"100M": 32_000, "5M": 8_000}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def config_of(shape: str, layers: int | None = None, length: int = 8192) -> LlamaConfig:
    """The config of a Llama in a shape such as `8B` (`_SHAPES`), with fewer `layers` if they are given."""
    heads = _HEADS[shape]
    values = _SHAPES[shape] | {
        "num_attention_heads": heads,
        "num_key_value_heads": min(heads, 8),
        "vocab_size": _VOCABULARIES.get(shape, 128_256),
    }
    if shape == "100M":
        values |= {"num_key_value_heads": 4}
    values["head_dim"] = values["hidden_size"] // heads
    if layers is not None:
        values["num_hidden_layers"] = layers
    if IS_REHEARSAL:
        values |= _TINY | {"vocab_size": 320, "num_hidden_layers": min(values["num_hidden_layers"], 4)}
    return LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=length, **values)


def flops_per_token(config: LlamaConfig, length: int) -> float:
    """Operations of a forward and backward pass per token: 6 N + 12 L H Q T (PaLM, appendix B)."""
    params = num_params(config)
    if not config.tie_word_embeddings:
        params -= config.vocab_size * config.hidden_size
    return 6.0 * params + 12.0 * config.num_hidden_layers * config.hidden_size * length


def num_params(config: LlamaConfig) -> int:
    """The parameters of a model, tied ones once."""
    return sum(param.numel() for param in build_on_meta(config, torch.bfloat16).parameters())


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model with random weights on `device`."""
    model = build_on_meta(config, dtype)
    rebuild_buffers(model, device)
    replace_tensors(model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    fill(model, device, seed)
    return model


@torch.no_grad()
def fill(model: torch.nn.Module, device: torch.device, seed: int = 0) -> None:
    """Give the parameters of a model on `device` random values: norms are 1."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, param in model.named_parameters():
        param.fill_(1.0) if "norm" in name else param.normal_(0.0, 0.02, generator=generator)


def written(directory: Path, shape: str, layers: int | None, device: torch.device) -> Path:
    """A model directory with random bfloat16 weights and a tokenizer of bytes; made once, kept in `directory`."""
    path = directory / f"{shape}-{layers}"
    if not path.exists():
        new = path.with_name(f"{path.name}-{os.getpid()}")  # others may write the same
        model = random_model(config_of(shape, layers), torch.bfloat16, device)
        model.save_pretrained(new)
        byte_tokenizer().save_pretrained(new)
        try:
            new.rename(path)
        except OSError:  # another was first
            shutil.rmtree(new)
    return path


def loaded_by_transformers(path: Path, device_map: Any, **options: Any) -> Any:
    """The model as transformers loads it, in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map=device_map, **options).eval()
