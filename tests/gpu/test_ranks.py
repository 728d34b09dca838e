"""Two ranks with a GPU each, over NCCL: the losses are those of one rank, and a rank that is killed is named."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import MixtralConfig

from fsdp_shard.distributed import DistributedContext, LaunchConfig, init_distributed, launch
from fsdp_shard.errors import RankError
from fsdp_shard.training import train
from tests.gpu.child import Bench, NotInstalledError, apart
from tests.gpu.loops import Job, filled_alike, training_run
from tests.gpu.models import config_of
from tests.support.ranks import Launched, on_ranks

check = pytest.mark.check
_FLOAT32 = {"param_dtype": "float32", "reduce_dtype": "float32"}
_STEPS = 4
_MIXTURE = MixtralConfig(
    architectures=["MixtralForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=320, num_local_experts=4,
    num_experts_per_tok=2, max_position_embeddings=512,
)  # fmt: skip
_MODES: dict[str, dict[str, int]] = {
    "NCCL": {},
    "HSDP": {"replicas": 2},
    "TP": {"tensor_parallel": 2},
    "EP": {"expert_parallel": 2},
    "CP": {"context_parallel": 2},
    "CP in a ring": {"context_parallel": 2},
}


def losses(context: DistributedContext, job: Job, num_windows: int) -> list[float]:
    """The losses of this rank's job, with `num_windows` windows a step over all ranks."""
    divided = replace(job, num_micro_batches=num_windows // context.num_data_ranks)
    model = filled_alike(divided, context)
    return [report.loss for report in train(training_run(divided, model, context, _STEPS))]


def _alone(job: Job, kind: str) -> list[float]:
    with init_distributed(kind, timeout_seconds=60) as context:
        return losses(context, job, 2)


def _on_two(job: Job, kind: str, mode: dict[str, int]) -> list[list[float]]:
    return on_ranks(2, losses, job, 2, device=kind, **mode)


@check(seconds=60, gpus=2, concurrent="none")
@pytest.mark.parametrize("mode", list(_MODES))
def test_losses_on_two_ranks_are_those_of_one(mode: str, bench: Bench) -> None:
    if mode == "EP" and Version(transformers.__version__) < Version("5.23"):
        raise NotInstalledError("transformers 5.23 or newer, which shard.expert_parallel needs")
    config: Any = _MIXTURE if mode == "EP" else config_of("100M", layers=2)
    job = Job(config, bench.size(256, 32), shard=_FLOAT32, windows=8)
    expected = apart(_alone, job, bench.device.type)
    method = {"context_method": "ring"} if "ring" in mode else {}
    found = apart(_on_two, replace(job, shard=_FLOAT32 | _MODES[mode] | method), bench.device.type, _MODES[mode])
    assert found[0] == found[1]
    worst = max(abs(one - other) / abs(other) for one, other in zip(found[0], expected, strict=True))
    bench.record(f"{mode} on 2 ranks: losses beside one rank", worst, "relative", at_most=1e-4, exact=True)


def _is_killed(config: Launched) -> None:
    """Rank 1 is killed while rank 0 is in a collective with it."""
    with init_distributed(config.launch.device, timeout_seconds=config.launch.timeout_seconds) as context:
        tensor = torch.ones(1 << 20, device=context.device)
        for number in range(1000):
            if context.rank == 1 and number == 10:
                (Path(config.run_dir) / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(tensor)
            float(tensor[0])


def _seconds_to_notice(directory: str, kind: str) -> tuple[float, str]:
    config = Launched(directory, LaunchConfig(ranks=2, device=kind, timeout_seconds=100))
    try:
        launch(_is_killed, config)
    except RankError as error:
        return time.time() - (Path(directory) / "killed").stat().st_mtime, str(error)
    raise AssertionError("no error")


@check(seconds=60, gpus=2, concurrent="none")
def test_a_killed_rank_is_named(bench: Bench) -> None:
    seconds, said = apart(_seconds_to_notice, str(bench.directory), bench.device.type)
    assert "Rank 1 was killed by SIGKILL" in said, said
    bench.record("seconds until a killed rank is named", seconds, "s", at_most=40)
