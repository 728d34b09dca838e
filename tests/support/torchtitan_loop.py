"""torchtitan's own CheckpointManager, on ranks of torchrun: loads initial weights, and saves the last step.

torchrun --nproc-per-node 2 torchtitan_loop.py WEIGHTS MODEL_DIRECTORY OUTPUTS
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from transformers import AutoConfig, AutoModelForCausalLM


def main(weights: str, source: str, outputs: str) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, initial_load_path=weights),
        dataloader=None,
        model_parts=[model],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=outputs,
    )
    assert manager.load()
    manager.save(10, last_step=True)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # A thread of gloo that frees its last tensors while Python exits would abort the process (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
