"""A model through every hand: our FSDP1 run, our rank files, DCP, accelerate's load and save, a plain directory."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import StepStore, convert, open_checkpoint
from fsdp_shard.distributed import DistributedContext
from tests.support.digests import digest_tensor, tensor_digests
from tests.support.ranks import on_ranks
from tests.support.saved_training import train_and_save
from tests.support.sharded import WRAPPERS, assembled
from tests.support.tiny import llama, token_batch

MODEL = "pytorch_model_fsdp_0"  # where accelerate looks for a sharded state dict


def load_and_save_with_accelerate(context: DistributedContext, source: Path, target: Path) -> None:
    """A model of zeros, under accelerate's FSDP2, filled from `source` and saved to `target`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import load_fsdp_model, save_fsdp_model

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # asked for, but not used: the ranks have met
    model = llama(seed=9)
    for parameter in model.parameters():
        parameter.data.zero_()
    mesh = init_device_mesh("cpu", (context.world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model.model.norm.weight, DTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin: Any = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(cpu=True)
        load_fsdp_model(plugin, accelerator, model, source)
        save_fsdp_model(plugin, accelerator, model, target)


def test_the_chain_keeps_every_bit(tiny_model: Path, tmp_path: Path) -> None:
    config = WRAPPERS["fsdp1"](param_dtype="float32")
    held = on_ranks(2, train_and_save, config, tmp_path / "run", tiny_model)
    plain = llama()
    plain.load_state_dict(assembled(held, {n: p.shape for n, p in plain.named_parameters()}), strict=False)
    wanted = plain.eval()(token_batch(5)).logits

    step = StepStore(tmp_path / "run" / "sharded").path(1)
    convert(step, tmp_path / "dcp" / MODEL, format="dcp", ranks=3, nest="model")
    on_ranks(2, load_and_save_with_accelerate, tmp_path / "dcp", tmp_path / "accelerate")
    convert(tmp_path / "accelerate", tmp_path / "bare")
    with open_checkpoint(step) as before, open_checkpoint(tmp_path / "bare") as after:
        assert tensor_digests(before) == {
            name: digest_tensor(after, name) for name in after.names if name not in before.aliases
        }
    for file in ("config.json", "generation_config.json"):
        (tmp_path / "accelerate" / file).write_bytes((tiny_model / file).read_bytes())
    convert(tmp_path / "accelerate", tmp_path / "model")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model")(token_batch(5)).logits, wanted)
