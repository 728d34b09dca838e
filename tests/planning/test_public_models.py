"""Plans of public models from their config files alone: the size that each is published with, in seconds and megabytes.

The files in `public_models/` are the config.json of the hub, whose name is in `MODELS`.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PretrainedConfig

from fsdp_shard.models import ModelConfig, build_on_meta, load_config, no_split_blocks
from fsdp_shard.planning.memory import plan_memory
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.optimizer import step_bytes
from fsdp_shard.sharding import Fsdp1Config, Fsdp2Config, ShardConfig, plan_units
from fsdp_shard.training import AdamWConfig, MuonConfig, TrainConfig
from fsdp_shard.utils import resident_bytes
from tests.support.cpu_speed import slowdown
from tests.support.runs import Ended, run_recipe
from tests.support.sampled import sampled

FILES = Path(__file__).parent / "public_models"
# What a plan may take after all modules are imported; twice that on a machine that does other things as well.
CPU_SECONDS, MEMORY_BYTES = 5.0, 500 * 10**6


class Public(NamedTuple):
    """A model, the number of parameters that its publishers or safetensors files count, and how it is trained here."""

    hub_id: str
    num_params: int
    text: str
    ranks: int
    sequence_length: int = 2048


MODELS = {
    "t5-3b": Public("google-t5/t5-3b", 2_851_598_336, "2.85 B", 8, 512),
    "gpt-j-6b": Public("EleutherAI/gpt-j-6b", 6_050_882_784, "6.05 B", 8),
    "gpt-neox-20b": Public("EleutherAI/gpt-neox-20b", 20_554_567_680, "20.6 B", 16),
    "opt-30b": Public("facebook/opt-30b", 29_974_540_288, "30 B", 32),
    "bloom": Public("bigscience/bloom", 176_247_271_424, "176 B", 384),
    "mistral-7b-v0.1": Public("mistralai/Mistral-7B-v0.1", 7_241_732_096, "7.24 B", 8, 4096),
    "llama-3-70b": Public("meta-llama/Meta-Llama-3-70B", 70_553_706_496, "70.6 B", 64, 4096),
    "mixtral-8x7b-v0.1": Public("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, "46.7 B", 32, 4096),
    "qwen3-30b-a3b": Public("Qwen/Qwen3-30B-A3B", 30_532_122_624, "30.5 B", 16, 4096),
    # Of the 671.03 B in its files, 14,848 are the biases of its routers, which are buffers; one more block is for MTP.
    "deepseek-v3": Public("deepseek-ai/DeepSeek-V3", 671_026_404_352, "671 B", 1024, 4096),
}


def directory_of(name: str, tmp_path: Path) -> Path:
    """A directory with only the config.json of a model."""
    directory = tmp_path / name
    directory.mkdir()
    shutil.copy(FILES / f"{name}.json", directory / "config.json")
    return directory


def config_of(name: str, tmp_path: Path) -> PretrainedConfig:
    return load_config(directory_of(name, tmp_path))


def run_of(name: str, shard: ShardConfig, **settings: Any) -> PlannedRun:
    optim = settings.pop("optim", AdamWConfig())
    task = "seq2seq" if name == "t5-3b" else "causal_lm"
    model = ModelConfig(path="x", task=task)
    public = MODELS[name]
    return PlannedRun(model, shard, TrainConfig(), optim, public.sequence_length, settings.get("ranks", public.ranks))


def _measure(to_parent: Connection, command: str, run_dir: Path, overrides: Sequence[str]) -> None:
    before = resident_bytes()
    ended = run_recipe(command, run_dir, *overrides)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    to_parent.send((ended, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 - before))


def measured(command: str, run_dir: Path, *overrides: str) -> tuple[Ended, float, int]:
    """What a command leaves, the CPU seconds that it takes, and the bytes that its largest process grows by."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(there, command, run_dir, overrides))
    process.start()
    there.close()
    found: tuple[Ended, float, int] = here.recv()
    process.join()
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(MODELS, 3))
def test_the_command_plans_it_in_seconds(name: str, tmp_path: Path) -> None:
    public = MODELS[name]
    overrides = [
        f"model.path={directory_of(name, tmp_path)}", f"launch.ranks={public.ranks}",
        f"data.sequence_length={public.sequence_length}", "shard.activation_checkpointing=true",
        *(["model.task=seq2seq"] if name == "t5-3b" else []),
    ]  # fmt: skip
    ended, cpu_seconds, grown = measured("plan", tmp_path / "run", *overrides)
    assert ended.status == 0, ended.err
    assert ended.err == ""
    result = ended.result
    assert result["num_params"] == result["num_trained_params"] == public.num_params
    assert sum(block["num_params"] for block in result["blocks"]) == public.num_params
    assert sum(rank["parameters_bytes"] for rank in result["per_rank"]) == 4 * public.num_params
    assert result["peak_bytes"] is not None
    assert f": {public.text} parameters, " in ended.out
    assert cpu_seconds < 2 * CPU_SECONDS * slowdown()
    assert grown < MEMORY_BYTES


@pytest.mark.long
def test_t5_3b_takes_10_6_gib_in_float32(tmp_path: Path) -> None:
    plan = plan_memory(config_of("t5-3b", tmp_path), run_of("t5-3b", Fsdp2Config()))
    assert plan.model_class == "T5ForConditionalGeneration"
    assert round(plan.bytes_by_dtype["float32"] / 2**30, 2) == 10.62


def test_biases_of_routers_are_no_parameters(tmp_path: Path) -> None:
    model = build_on_meta(config_of("deepseek-v3", tmp_path))
    biases = {name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 58
    blocks, units = no_split_blocks(model), plan_units(model, Fsdp2Config())
    public = MODELS["deepseek-v3"]
    assert sum(block.num_params for block in blocks) == sum(unit.num_params for unit in units) == public.num_params
    assert not biases & {name for unit in units for name in unit.parameters}
    assert biases <= set(model.state_dict())  # a checkpoint has them


class _CountingConfig(AdamWConfig):
    """AdamW that counts the parameters which it is built for."""

    counts: list[int]

    def create(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self.counts.append(sum(len(group["params"]) for group in groups))
        return super().create(groups)


@pytest.mark.long
@pytest.mark.parametrize("shard", [Fsdp2Config(), Fsdp1Config()], ids=["fsdp2", "fsdp1"])
def test_the_state_of_the_optimizer_is_measured_once_for_each_kind(shard: ShardConfig, tmp_path: Path) -> None:
    optim = _CountingConfig()
    optim.counts = []
    plan = plan_memory(config_of("llama-3-70b", tmp_path), run_of("llama-3-70b", shard, optim=optim))
    assert len(plan.per_rank) == 64
    assert sum(optim.counts) < 723 / 4  # a sixty-fourth of each of its 723 parameters, on 64 ranks


def _shapes(model: torch.nn.Module) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


@pytest.mark.parametrize("optim", [AdamWConfig(), MuonConfig()])
def test_kinds_of_parameters_add_up_to_all(optim: AdamWConfig | MuonConfig, tmp_path: Path) -> None:
    model = build_on_meta(config_of("qwen3-30b-a3b", tmp_path), "float32")
    shapes, dtypes = _shapes(model), dict.fromkeys(_shapes(model), torch.float32)
    one_by_one = sum(step_bytes(optim, {name: shape}, shapes, dtypes)[0] for name, shape in list(shapes.items())[:40])
    assert step_bytes(optim, dict(list(shapes.items())[:40]), shapes, dtypes)[0] == one_by_one
