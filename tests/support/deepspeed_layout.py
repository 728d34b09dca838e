"""Files as DeepSpeed 0.19 lays them out, by torch.save, where DeepSpeed is not installed.

test_deepspeed.py compares them with those of DeepSpeed itself. Of its classes in pickles, the enumeration of stages is
an integer here, and a `fragment_address` a dictionary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

Tensors = Mapping[str, torch.Tensor]
STEP = "global_step3"


def save_zero(
    root: Path,
    state: Tensors,
    stage: int,
    *,
    frozen: Collection[str] = (),
    ties: Mapping[str, str] | None = None,
    masters: torch.dtype = torch.float32,
    ranks: int = 2,
) -> Path:
    """Write the save of an engine that trains in bfloat16, with one group of parameters; return its directory.

    Args:
        root: The directory to which `save_checkpoint` saves.
        state: The master weights, and the values of `frozen` parameters.
        stage: That of ZeRO.
        frozen: The names of parameters that are not trained.
        ties: {alias: name} of tied parameters.
        masters: The dtype of master weights: bfloat16 with bf16_master_weights_and_grads.
        ranks: The number of ranks.
    """
    inner = root / STEP
    inner.mkdir(parents=True)
    (root / "latest").write_text(STEP)
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    kept = {name: tensor for name, tensor in half.items() if name in frozen}
    trained = {name: tensor.to(masters) for name, tensor in state.items() if name not in frozen}
    for rank in range(ranks):
        if stage == 3 or rank == 0:
            file = "mp_rank_00_model_states.pt" if stage <= 2 else f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            module = half if stage <= 2 else {name: torch.empty(0, dtype=torch.bfloat16) for name in half}
            module = {**module, **{alias: module[name] for alias, name in (ties or {}).items()}}
            fragments = {name: tensor if stage <= 2 else _parts(tensor, ranks)[rank] for name, tensor in kept.items()}
            lists_frozen = stage >= 2  # engine.py: save_frozen_param = zero_optimization_partition_gradients()
            model = {
                "module": module,
                "buffer_names": [],
                "optimizer": None,
                "param_shapes": [{name: tensor.shape for name, tensor in trained.items()}],
                "frozen_param_shapes": {name: tensor.shape for name, tensor in kept.items()} if lists_frozen else None,
                "shared_params": dict(ties or {}) if stage <= 2 else {},
                "frozen_param_fragments": fragments if lists_frozen else None,
                "global_steps": 3,
                "dp_world_size": ranks,
                "mp_world_size": 1,
                "ds_version": "0.19.8",
            }
            torch.save(model, inner / file)
        optimizer = _partition(trained, ranks, rank) if stage <= 2 else _parts_of_rank(trained, ranks, rank)
        optimizer |= {"zero_stage": stage, "dynamic_loss_scale": False, "overflow": False}
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, inner / optimizer_file(rank))
    return inner


def optimizer_file(rank: int) -> str:
    """The name of a rank's optimizer file."""
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def save_universal(inner: Path, state: Tensors) -> Path:
    """Write what ds_to_universal makes of the save in `inner`; return its directory, which `latest_universal` names."""
    root = inner.parents[1] / "universal"
    made = root / f"{inner.name}_universal"
    for name, tensor in state.items():
        (made / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor.float()}, made / "zero" / name / "fp32.pt")
    for file in inner.glob("*_model_states.pt"):
        (made / file.name).write_bytes(file.read_bytes())
    (root / "latest_universal").write_text(made.name)
    return made


def _partition(trained: Tensors, ranks: int, rank: int) -> dict[str, Any]:
    """Stages 1 and 2: a rank's part of all parameters in a row, and where in it each of them lies."""
    flat = torch.cat([tensor.flatten() for tensor in trained.values()])
    size = -(-len(flat) // (2 * ranks)) * 2
    low, at, addresses = rank * size, 0, {}
    for name, tensor in trained.items():
        start, end = max(at, low), min(at + tensor.numel(), low + size)
        if start < end:
            addresses[name] = {"numel": end - start, "start": start - low}
        at += tensor.numel()
    part = flat[low : low + size].clone()
    return {
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": {0: _moments(part)}, "param_groups": [{"lr": 0.01}]},
        "single_partition_of_fp32_groups": [part],
        "group_paddings": [size - len(part)],
        "param_alignment_paddings": [[0] * len(trained)],
        "partition_count": [ranks],
        "ds_version": "0.19.8",
        "param_slice_mappings": [addresses],
    }


def _parts_of_rank(trained: Tensors, ranks: int, rank: int) -> dict[str, Any]:
    """Stage 3: a rank's parts of each parameter in a row."""
    flat = torch.cat([_parts(tensor, ranks)[rank] for tensor in trained.values()])
    return {
        "partition_count": ranks,
        "optimizer_state_dict": {"state": {0: _moments(flat)}, "param_groups": [{"lr": 0.01}]},
        "fp32_flat_groups": [flat],
    }


def _parts(tensor: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
    """Equal flat parts of a parameter, the last of which is padded."""
    size = -(-tensor.numel() // ranks)
    return [part.clone() for part in pad(tensor.flatten(), (0, size * ranks - tensor.numel())).split(size)]


def _moments(part: torch.Tensor) -> dict[str, torch.Tensor]:
    zeros = torch.zeros_like(part)
    return {"step": torch.tensor(3.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
