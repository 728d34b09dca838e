"""Weights in the layout of torchtitan's checkpoints, loaded as its CheckpointManager does. Does not need torchtitan.

torchrun --nproc-per-node 2 examples/dcp_torchtitan.py CHECKPOINT MODEL_DIRECTORY STEP_DIRECTORY

    fsdp-shard convert source=MODEL target=CHECKPOINT format=dcp                      # names at the top, without `nest`
    fsdp-shard convert source=OUTPUTS/checkpoint target=MODEL config=MODEL_DIRECTORY  # back, from its newest step-N

torchtitan keeps the model flat: `dcp.load(model.state_dict(), checkpoint_id=checkpoint.initial_load_path)`. The names
are those of the trained model, here a transformers model. torchtitan's own Llama has other names, such as
layers.0.attention.wq.weight, and rotary weights in another order; see docs/coming-from/dcp.md.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def main(loaded: str, source: str, saved: str) -> None:
    """Load the model alone, as torchtitan does at the first step, and save it as torchtitan does at the last step."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    dcp.load(model.state_dict(), checkpoint_id=loaded)
    dcp.save(model.state_dict(), checkpoint_id=saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # A thread of gloo that frees its last tensors while Python exits would abort the process (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
