"""What `plan` says of a teacher: where it is by its budgets, what it takes, and what would take less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from fsdp_shard.errors import ConfigError, InputError
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import MemoryPlan, PlannedRun, plan_memory
from fsdp_shard.planning.search.planner import Planner
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import OBJECTIVES, OPTIMIZERS, LoraConfig, TrainConfig
from tests.support.runs import run_recipe

_SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
_STUDENT = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **_SIZES)
_TEACHER = LlamaConfig(hidden_size=256, intermediate_size=2048, num_hidden_layers=3, **_SIZES)
_MIB, _LENGTH = 1 << 20, 128
# Embeddings and head of 512 x 256, and in each layer attention of 3 x 256 x 256, and an MLP of 3 x 256 x 2,048.
_WEIGHTS = 4 * (2 * 512 * 256 + 3 * (3 * 256 * 256 + 3 * 256 * 2048 + 2 * 256) + 256)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config of a teacher, and no weights."""
    directory = tmp_path_factory.mktemp("teacher")
    _TEACHER.save_pretrained(directory)
    return directory


def plan(teacher: Path, *, on_gpu: bool = True, rows: int = 2, **objective: Any) -> MemoryPlan:
    """The plan of a run that `teacher` teaches alongside."""
    return plan_memory(_STUDENT, run_of(teacher, on_gpu=on_gpu, rows=rows, **objective))


def run_of(teacher: Path, *, on_gpu: bool = True, rows: int = 2, **objective: Any) -> PlannedRun:
    settings = {"teacher": str(teacher), "teacher_logits": "computed", **objective}
    train = TrainConfig(steps=1, global_batch_size=2 * rows, micro_batch_size=rows)
    sections = ModelConfig(path=""), WRAPPERS["fsdp2"](), train, OPTIMIZERS["adamw"]()
    distill = OBJECTIVES["distill"](**settings)
    return PlannedRun(*sections, _LENGTH, 2, LoraConfig(rank=2), objective=distill, on_gpu=on_gpu)


def bytes_of(found: MemoryPlan) -> tuple[int, int]:
    """What it holds on a rank's device, and in host memory."""
    rank = found.per_rank[0]
    return rank.teacher_bytes, max(0, rank.needed_host_bytes - rank.staging_bytes)


def test_without_budgets_all_of_it_is_on_the_device(teacher: Path) -> None:
    on_gpu, on_cpu = (plan(teacher, on_gpu=on_gpu) for on_gpu in (True, False))
    for found in (on_gpu, on_cpu):
        held, on_host = bytes_of(found)
        assert (0 <= held - _WEIGHTS < 1024, on_host) == (True, 0), "the rest are the frequencies of its positions"


def test_budgets_put_blocks_into_host_memory_and_on_the_disk(teacher: Path) -> None:
    some, more = (plan(teacher, teacher_max_memory={0: "15MiB", "cpu": size}) for size in ("8MiB", "64MiB"))
    (held, on_host), (of_more, on_more) = bytes_of(some), bytes_of(more)
    assert 10 * _MIB < held <= 15 * _MIB
    assert 10 * _MIB < of_more <= 15 * _MIB
    assert on_host <= 8 * _MIB, "what is read from the disk on its way"
    assert of_more + on_more >= _WEIGHTS, "nothing is on the disk"


def test_a_teacher_on_the_cpu_takes_nothing_of_a_gpu(teacher: Path) -> None:
    beside, alone = plan(teacher), plan(teacher, teacher_max_memory={"cpu": "64MiB"})
    held, on_host = bytes_of(alone)
    assert held == 0
    assert on_host > _WEIGHTS
    assert (alone.peak_bytes or 0) < (beside.peak_bytes or 0) - _WEIGHTS


def test_its_pass_grows_with_the_batch(teacher: Path) -> None:
    few, many = (max_pass(plan(teacher, rows=rows)) for rows in (1, 4))
    assert few > 0
    assert many == pytest.approx(4 * few, rel=0.02)


def max_pass(found: MemoryPlan) -> int:
    """The most bytes of the teacher's pass."""
    return max(snapshot.terms.get("pass of the teacher", 0) for snapshot in found.per_rank[0].snapshots)


def flops_of_a_pass(rows: int) -> int:
    """What torch's counter finds in a real pass of the teacher, without the pairs that its mask hides."""
    model = AutoModelForCausalLM.from_config(_TEACHER)
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(input_ids=torch.zeros((rows, _LENGTH), dtype=torch.long), use_cache=False)
    hidden_pairs = rows * _TEACHER.num_hidden_layers * _LENGTH * (_LENGTH - 1) // 2
    return int(counter.get_total_flops()) - 4 * _TEACHER.hidden_size * hidden_pairs


def test_its_passes_are_in_the_cost_of_a_step(teacher: Path) -> None:
    planner = Planner(_STUDENT)
    on_device, before, streamed, on_cpu = (
        planner.cost(run_of(teacher, **settings))
        for settings in (
            {},
            {"teacher_logits": "precomputed"},
            {"teacher_max_memory": {0: "15MiB", "cpu": "8MiB"}},
            {"teacher_max_memory": {"cpu": "64MiB"}},
        )
    )
    assert (on_device.flops or 0) - (before.flops or 0) == flops_of_a_pass(2)
    assert on_device.model_flops == before.model_flops
    assert on_device.memory_bytes - before.memory_bytes == _WEIGHTS
    assert (on_device.to_device_bytes, before.to_device_bytes) == (0, 0)
    assert streamed.flops == on_device.flops
    assert _WEIGHTS - 15 * _MIB <= streamed.to_device_bytes < _WEIGHTS
    assert on_cpu == before, "it takes nothing of the device"


def test_budgets_of_gpus_alone_are_refused_for_ranks_without(teacher: Path) -> None:
    with pytest.raises(ConfigError, match="has no size for the CPU, and the planned ranks have no GPU"):
        plan(teacher, on_gpu=False, teacher_max_memory={0: "20GB"})


def test_a_pass_that_does_not_run_without_data_is_said(tmp_path: Path) -> None:
    AutoConfig.for_model(
        "vit", architectures=["ViTForImageClassification"], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=40, image_size=32, patch_size=8, dtype="float32", vocab_size=512,
    ).save_pretrained(tmp_path)  # fmt: skip
    found = plan(tmp_path)
    assert found.uncounted["teacher"]
    assert found.per_rank[0].teacher_bytes > 0
    assert found.peak_bytes is not None


def test_errors_name_the_teacher(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=f"objective.teacher={tmp_path}: "):
        plan(tmp_path)
    with pytest.raises(InputError, match=f"objective.teacher={teacher}: .*too little"):
        plan(teacher, teacher_max_memory={0: "1MiB", "cpu": "64MiB"})


@pytest.mark.long
def test_the_command_plans_it_and_names_what_takes_less(teacher: Path, tmp_path: Path) -> None:
    _STUDENT.save_pretrained(tmp_path / "student")
    typed = [
        f"model.path={tmp_path / 'student'}", "data.sequence_length=128", "adapter=lora", "objective=distill",
        f"objective.teacher={teacher}", "device=h100", "launch.ranks=1", "train.global_batch_size=1",
    ]  # fmt: skip
    before = run_recipe("plan", tmp_path / "before", *typed)
    assert "The teacher runs before training, in the memory that is free then" in before.out
    assert "Not planned" not in before.out
    assert "pass of the teacher" not in before.out
    alongside = [*typed, "objective.teacher_logits=computed"]
    lacking = [*alongside, "launch.ranks=2", "train.global_batch_size=2", "objective.teacher_max_memory={0: 20GB}"]
    refused = run_recipe("plan", tmp_path / "lacking", *lacking)
    assert (
        "finetune would refuse these settings: objective.teacher_max_memory names GPU 0, but not GPU 1" in refused.out
    )
    assert (
        "would refuse" not in run_recipe("plan", tmp_path / "all", *lacking[:-1], lacking[-1][:-1] + ", 1: 20GB}").out
    )
    found = run_recipe("plan", tmp_path / "alongside", *alongside, f"device.memory={_WEIGHTS + 900 * _MIB}")
    assert "The teacher runs alongside: its memory is in this plan, and its passes are in the FLOPs" in found.out
    needed = found.result["peak_bytes"] + sum(found.result["overhead_bytes"].values())
    tight = run_recipe("plan", tmp_path / "tight", *alongside, f"device.memory={needed - 5 * _MIB}")
    assert tight.status == 1
    assert "objective.teacher_logits=precomputed" in tight.out, tight.out
