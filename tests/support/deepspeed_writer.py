"""Real DeepSpeed, on two gloo ranks of their own processes: trains a step and saves. Started by test_deepspeed.py.

python -m tests.support.deepspeed_writer OUT RANK PORT STAGE-DTYPE...

A DTYPE is fp32, bf16, bf16_masters (bfloat16 master weights) or bf16_optimizer (BF16_Optimizer, which accumulates
gradients in float32). Beside each save, `OUT/STAGE-DTYPE.bin` gets the weights as the engine itself gathers them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

_BF16 = {"bf16": {"enabled": True}}
_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": _BF16,
    "bf16_masters": {"bf16": _MASTERS},
    "bf16_optimizer": {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
}


class Model(torch.nn.Module):
    """Tied head, a frozen layer, buffers of two dtypes, and sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.a = torch.nn.Linear(5, 9)
        self.frozen = torch.nn.Linear(9, 3, bias=False)
        self.b = torch.nn.Linear(9, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad = False
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.a(self.embed(tokens)))
        loss: torch.Tensor = self.head(self.b(hidden)).sum() + self.frozen(hidden).sum()
        return loss


def main(out: str, kinds: list[str]) -> None:
    import deepspeed

    torch.set_num_threads(1)
    # Its operator for shared memory is compiled at the first use, which takes minutes, and gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for kind in kinds:
        stage, dtype = kind.split("-")
        save(f"{out}/{kind}", int(stage), dtype)
    torch.distributed.destroy_process_group()


def save(out: str, stage: int, dtype: str) -> None:
    import deepspeed

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **DTYPES[dtype],
    }
    model = Model()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in trained if name.endswith("weight")]},
        {"params": [parameter for name, parameter in trained if name.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.arange(4).reshape(2, 2)))
    engine.step()
    engine.save_checkpoint(out)
    weights = gathered(engine.module, stage)
    if torch.distributed.get_rank() == 0:
        torch.save(weights, f"{out}.bin")
    torch.distributed.barrier()


def gathered(model: torch.nn.Module, stage: int) -> dict[str, torch.Tensor]:
    """The master weights, and of parameters that are not trained the weights; buffers are not gathered."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            found[name] = parameter.detach().clone()
    return found


if __name__ == "__main__":
    out, rank, port, *kinds = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    main(out, kinds)
