"""Sound checkpoints by the real writers, made once; a case damages a copy of one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_shard.checkpoint import convert
from fsdp_shard.cli import load_recipe
from fsdp_shard.config import FinetuneConfig, compose_jobs
from fsdp_shard.distributed import DistributedContext
from tests.support import gguf_models
from tests.support.ranks import on_ranks
from tests.support.runs import RECIPES
from tests.support.tiny import save_adapter, save_model

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_made: list[Path] = []  # the directory of this process


def copy(name: str, root: Path) -> Path:
    """Copy the sound checkpoint of this name to a path that does not exist yet; returns it."""
    shutil.copytree(_made[0] / name, root, symlinks=True)
    return root


def damaged(name: str, damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """The `build` of a case: a copy of a sound checkpoint, after `damage` of the copy's directory."""

    def build(root: Path) -> None:
        damage(copy(name, root))

    return build


def make_all(place: Path) -> None:
    """Make those that are not there yet, and use them in this process."""
    _made[:] = [place]
    place.mkdir(parents=True, exist_ok=True)
    for name, make in BASES.items():
        if not (place / name).exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(place / "partial")
            os.rename(place / "partial", place / name)


def text_file() -> Path:
    """A text that the runs of the bases were trained on."""
    return _made[0] / "text.txt"


def conversations() -> Path:
    """Two conversations, to train on."""
    file = _made[0] / "chat.jsonl"
    messages = [{"role": role, "content": text} for role, text in (("user", "Hello"), ("assistant", "Hi there"))]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages * 2}) + "\n")
    return file


def _model(root: Path) -> None:
    """The tiny Llama with its byte tokenizer and a chat template, as transformers writes them."""
    save_model(root)
    (root / "chat_template.jinja").write_text(_TEMPLATE)


def _converted(root: Path, **settings: Any) -> None:
    convert(_made[0] / "model", root, **settings)


def _indexed(root: Path) -> None:
    """Several safetensors files with an index, without a manifest."""
    _converted(root, max_shard_size="60kB")
    (root / "manifest.json").unlink()


def _pytorch(root: Path) -> None:
    _model_files(root)
    torch.save(_state(), root / "pytorch_model.bin")


def _legacy(root: Path) -> None:
    _model_files(root)
    torch.save(_state(), root / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _adapter(root: Path) -> None:
    """A peft adapter of the model among the bases, whose path is in its config."""
    save_adapter(root, _made[0] / "model")


def _dcp(root: Path) -> None:
    """Torch's own, of model and optimizer."""
    _model_files(root)
    moments = {name: {"exp_avg": torch.zeros_like(tensor)} for name, tensor in _state().items()}
    dcp.save({"model": _state(), "optimizer": {"state": moments}, "step": 7}, checkpoint_id=root, no_dist=True)


def _torch_ranks(root: Path) -> None:
    """A file of each of 2 ranks, of DTensors."""
    _model_files(root)
    on_ranks(2, _save_rank, root, _state())


def _save_rank(context: DistributedContext, root: Path, state: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (context.world_size,))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in state.items()}
    torch.save(sharded, root / f"model_world_size_{context.world_size}_rank_{context.rank}.pt")


def _torch_checkpointing(root: Path) -> None:
    """As torch_checkpointing 0.1.1 leaves 2 ranks with a resharder, which is not needed for it: see `_describe`."""
    _model_files(root)
    on_ranks(2, _save_items, root, _state())


def _save_items(context: DistributedContext, root: Path, state: dict[str, torch.Tensor]) -> None:
    """The model as safetensors of local tensors, the optimizer by torch.save, and what describes both."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    model = {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in state.items()}
    optimizer = {"state": {name: {"exp_avg": torch.zeros_like(tensor)} for name, tensor in model.items()}}
    files = [f"part-{rank}.safetensors" for rank in range(context.world_size)]
    save_file({name: tensor.to_local().contiguous() for name, tensor in model.items()}, root / files[context.rank])
    torch.save(optimizer, root / f"optimizer_{context.rank}.pt")
    if context.rank == 0:
        moments = {f'["state","{name}","exp_avg"]': tensor for name, tensor in model.items()}
        document = {
            "metadata": {
                "model": _describe({f'["{name}"]': tensor for name, tensor in model.items()}, files),
                "optimizer": _describe(moments, [None] * context.world_size),
            },
            "world_size": context.world_size,
            "version": "2.0",
        }
        (root / "metadata.pkl").write_bytes(pickle.dumps(document))


def _describe(tensors: dict[str, Any], files: Sequence[str | None]) -> dict[str, Any]:
    """An item in its `metadata.pkl`, as in tests/checkpoint/formats/by_torch_checkpointing, which it wrote itself."""
    ranks = tuple(range(len(files)))
    mesh = {"device_type": "cpu", "mesh_shape": (len(files),), "mesh_data": ranks, "mesh_dim_names": None}
    found = {
        path: {
            "global_shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "stride": list(tensor.stride()),
            "mesh_spec": mesh,
            "placements": [{"type": "Shard", "dim": 0}],
        }
        for path, tensor in tensors.items()
    }
    layouts = [
        {"file_path": file, "serialization_format": {"type": "SafetensorsSerialization"}} if file else None
        for file in files
    ]
    return {
        "nested_path_to_metadata": {
            path: [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}]
            for path, data in found.items()
        },
        "rank_to_layout_info": dict(enumerate(layouts)),
    }


def _torch_huggingface(root: Path) -> None:
    """safetensors files of 2 ranks, by torch's writer."""
    _model_files(root)
    on_ranks(2, _save_huggingface, root, _state())


def _save_huggingface(context: DistributedContext, root: Path, state: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (context.world_size,))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in state.items()}
    dcp.save(sharded, storage_writer=HuggingFaceStorageWriter(str(root), save_distributed=True))


def _deepspeed(root: Path) -> None:
    """ZeRO stage 2 of 2 ranks with the keys that DeepSpeed 0.19 writes, by torch.save; DeepSpeed is not needed."""
    _model_files(root)
    (root / "latest").write_text("global_step1")
    step = root / "global_step1"
    step.mkdir()
    state, alias = _state(), "lm_head.weight"
    shapes = {name: tensor.shape for name, tensor in state.items()}
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    model = {
        "module": {**state, alias: state["model.embed_tokens.weight"]},
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {alias: "model.embed_tokens.weight"},
        "global_steps": 1,
        "ds_version": "0.19.0",
    }
    torch.save(model, step / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(flat.chunk(2)):
        moments = {"step": 1, "exp_avg": torch.zeros_like(part)}
        optimizer = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [part.clone()],
            "base_optimizer_state": {"state": {0: moments}},
        }
        file = step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.0"}, file)


def _gguf(root: Path) -> None:
    """By the gguf package's own writer: matrices in 8 bits, with a tokenizer."""
    root.mkdir()
    write_gguf(root / "model.gguf")


def write_gguf(file: Path, **values: Any) -> None:
    """A GGUF file with a chat template; `values` are metadata, (value, type) by name with `__` for dots."""
    template = {"tokenizer.chat_template": (_TEMPLATE, gguf.GGUFValueType.STRING)}
    more = {name.replace("__", "."): value for name, value in values.items()}
    gguf_models.write_gguf(file, "llama", gguf.GGMLQuantizationType.Q8_0, values=template | more)


def _run(root: Path) -> None:
    """The directory of a run of one step, which goes on when it is told to train two."""
    text_file().write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    (job,) = compose_jobs(FinetuneConfig, [*run_settings(root), "train.steps=1"], "finetune")
    with contextlib.redirect_stdout(io.StringIO()):
        recipe = load_recipe(RECIPES / "finetune.py")
        recipe.check(job.config)
        recipe.run_on_rank(job.config)
    (root / "result.json").unlink()


def run_settings(run_dir: Path | str) -> list[str]:
    """The settings of such a run."""
    return [
        f"model.path={_made[0]}/model",
        f"data.path={text_file()}",
        f"data.cache_dir={_made[0]}/tokens",
        "data.sequence_length=16",
        "launch.device=cpu",
        "shard.param_dtype=float32",
        f"run_dir={run_dir}",
    ]


def _state() -> dict[str, torch.Tensor]:
    """The tensors of the model, without the tied head."""
    return load_file(_made[0] / "model" / "model.safetensors")


def _model_files(root: Path) -> None:
    """What the model has besides its weights."""
    root.mkdir(exist_ok=True)
    for file in (_made[0] / "model").iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, root / file.name)


BASES: dict[str, Callable[[Path], None]] = {
    "model": _model,
    "sealed": _converted,  # with a manifest
    "indexed": _indexed,
    "sharded": partial(_converted, format="sharded", ranks=2),
    "sealed-dcp": partial(_converted, format="dcp", ranks=2),
    "pytorch": _pytorch,
    "legacy": _legacy,
    "dcp": _dcp,
    "torch-ranks": _torch_ranks,
    "torch-checkpointing": _torch_checkpointing,
    "torch-huggingface": _torch_huggingface,
    "deepspeed": _deepspeed,
    "gguf": _gguf,
    "adapter": _adapter,
    "run": _run,
}
