"""Files that others load without an error, with other weights than were saved: see docs/hostile-files.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fsdp_shard.checkpoint import open_checkpoint
from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_DOWN, _NORM = "model.layers.0.mlp.down_proj", "model.layers.1.input_layernorm.weight"
_ADAPTER = "adapter_config.json"
_Q = "base_model.model.model.layers.0.self_attn.q_proj."
_STEP = "global_step1"
_RANK = f"{_STEP}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
_MODEL = f"{_STEP}/mp_rank_00_model_states.pt"


def _tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors") -> Damage:
    def apply(root: Path) -> None:
        tensors = load_file(root / file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / file, {"format": "pt"})

    return apply


def _each(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return _tensors(lambda tensors: tensors.update({name: change(tensors[name])}))


def _more(name: str) -> Damage:
    return _tensors(lambda tensors: tensors.update({name: torch.ones(36)}))


def _flip(name: str) -> Damage:
    """Flip a bit of the first element of a tensor."""

    def apply(root: Path) -> None:
        with open_checkpoint(root) as index:
            (span,) = index.spans(name, 0, 1)
            file = index.root / span.file
        data = bytearray(file.read_bytes())
        data[span.start] ^= 4
        file.write_bytes(data)

    return apply


def _rank_differs(root: Path) -> None:
    """Both ranks have a tensor whole, and the second one another."""
    for rank in range(2):
        file = root / f"model_world_size_2_rank_{rank}.pt"
        state = torch.load(file, weights_only=False)
        state["model.norm.weight"] = torch.full((36,), float(rank))
        torch.save(state, file)


def _lora(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return _tensors(change, "adapter_model.safetensors")


_LOADS: dict[str, Damage] = {
    "a weight of integers": _each(f"{_DOWN}.weight", lambda t: (t * 100).int()),
    "the bits of a norm called int32": _each(_NORM, lambda t: t.view(torch.int32)),
    "a norm of booleans": _each(_NORM, torch.Tensor.bool),
    "a norm of complex numbers": _each(_NORM, lambda t: t.to(torch.complex64)),
    "a tensor is missing": _tensors(lambda tensors: tensors.pop(_NORM)),
    "a weight transposed": _each(f"{_DOWN}.weight", torch.Tensor.t),
    "a weight flat": _each(f"{_DOWN}.weight", torch.Tensor.flatten),
    "a bias too many": _more(f"{_DOWN}.bias"),
    "a scale that nothing reads": _more(f"{_DOWN}.weight_scale_2"),
    "an adapter inside": _more(f"{_DOWN}.lora_A.weight"),
    "a layer more in the config": edits.fields("config.json", num_hidden_layers=3),
    "tied, with two values": _tensors(lambda tensors: tensors.update({"lm_head.weight": torch.ones(257, 36)})),
}
_MERGES: dict[str, Damage] = {
    "alpha NaN": edits.literal(_ADAPTER, "lora_alpha", "NaN"),
    "alpha infinite": edits.literal(_ADAPTER, "lora_alpha", "-Infinity"),
    "alpha beyond floats": edits.literal(_ADAPTER, "lora_alpha", "1e400"),
    "alpha that overflows": edits.fields(_ADAPTER, lora_alpha=1e308),
    "alpha_pattern NaN": edits.literal(_ADAPTER, "alpha_pattern", '{"q_proj": NaN}'),
    "a factor NaN": _lora(lambda tensors: tensors[f"{_Q}lora_A.weight"].fill_(math.nan)),
    "another rank": edits.fields(_ADAPTER, r=3),
    "another rank of a module": edits.fields(_ADAPTER, rank_pattern={"q_proj": 4}),
    "targets that are not there": edits.fields(_ADAPTER, target_modules=["zzz"]),
    "a norm as a target": edits.fields(_ADAPTER, target_modules=["q_proj", "input_layernorm"]),
    "layers that are not there": edits.fields(_ADAPTER, layers_to_transform=[7]),
    "a module to save that is not there": edits.fields(_ADAPTER, modules_to_save=["norm"]),
    "two names of a factor": _lora(lambda t: t.update({f"{_Q}lora_A.default.weight": torch.ones(2, 36)})),
    "two adapters": _lora(lambda t: t.update({f"{_Q}lora_A.other.weight": torch.ones(2, 36)})),
}
_STORED: dict[str, tuple[str, Damage]] = {
    "a flipped bit in a .bin": ("pytorch", _flip(f"{_DOWN}.weight")),
    "a flipped bit in a .distcp": ("dcp", _flip(f"{_DOWN}.weight")),
    "a flipped bit in a file of a rank": ("torch-ranks", _flip(f"{_DOWN}.weight")),
    "a flipped bit in a file of DeepSpeed": ("deepspeed", _flip(f"{_DOWN}.weight")),
}
_OPENED: dict[str, tuple[str, Damage]] = {
    "ranks with other values of a tensor": ("torch-ranks", _rank_differs),
    "a weight under an optimizer's keys": (
        "dcp",
        edits.metadata(lambda m: m.planner_data.update({f"model.{_NORM}": ("optimizer", "state", _NORM, "exp_avg")})),
    ),
    "a state under the model's keys": (
        "dcp",
        edits.metadata(
            lambda m: m.planner_data.update({f"optimizer.state.{_NORM}.exp_avg": ("model", "another.weight")})
        ),
    ),
    "a parameter of DeepSpeed that is a buffer": (
        "deepspeed",
        edits.unpickled(_MODEL, lambda state: state["buffer_names"].append(_NORM)),
    ),
    "a parameter of DeepSpeed that is frozen": (
        "deepspeed",
        edits.unpickled(
            _MODEL,
            lambda state: state.update(
                frozen_param_shapes={_NORM: torch.Size([36])}, frozen_param_fragments={_NORM: torch.ones(36)}
            ),
        ),
    ),
    "fragments of DeepSpeed under other names": (
        "deepspeed",
        edits.unpickled(_RANK, lambda state: state["optimizer_state_dict"].update(param_slice_mappings=[{}])),
    ),
    "heads of GGUF in another number": (
        "gguf",
        edits.replaced(
            "model.gguf",
            b"llama.attention.head_count" + (4).to_bytes(4, "little") + (4).to_bytes(4, "little"),
            b"llama.attention.head_count" + (4).to_bytes(4, "little") + (2).to_bytes(4, "little"),
        ),
    ),
}

CASES = [
    *(Case(name, damaged("model", damage), damages="weights") for name, damage in _LOADS.items()),
    *(Case(name, damaged("adapter", damage), damages="adapter") for name, damage in _MERGES.items()),
    *(Case(name, damaged(base, damage), damages="storages") for name, (base, damage) in _STORED.items()),
    *(Case(name, damaged(base, damage)) for name, (base, damage) in _OPENED.items()),
]
