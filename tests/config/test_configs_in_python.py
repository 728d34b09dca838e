"""Configs built in Python: the public checks of a command refuse what its command line refuses, with the same words."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fsdp_shard as fs
from fsdp_shard.config import COMMANDS
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import Fsdp1Config, Fsdp2Config
from fsdp_shard.training import AdamWConfig, DistillConfig, SgdConfig, TrainConfig
from fsdp_shard.utils import check
from tests.config.composed import refusal


def _check_generation(config: fs.GenerateConfig) -> None:
    fs.check_generation(config, config.launch, None, config.seed)


def _start(config: fs.FinetuneConfig) -> None:
    with fs.start_run(config):
        pass


CHECKS: dict[str, Callable[[Any], None]] = {
    "finetune": fs.check_finetune,
    "convert": fs.check_conversion,
    "evaluate": fs.check_evaluation,
    "generate": _check_generation,
    "plan": fs.check_plan,
}

RUNS: dict[str, Callable[[Any], object]] = {
    "finetune": _start,
    "convert": fs.run_conversion,
    "evaluate": lambda config: fs.run_evaluation(config, "run"),
    "generate": lambda config: fs.complete_prompts(config, None, 0),
    "plan": fs.plan_run,
}

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("finetune", {"train.steps": 0}),
    ("finetune", {"loss": "mine:loss", "model.chunked_loss": True}),
    ("finetune", {"checkpoint.keep_every": 2}),
    ("finetune", {"checkpoint.keep_last": 0}),
    ("finetune", {"train.max_grad_norm": math.nan}),
    ("finetune", {"launch.device": "tpu"}),
    ("finetune", {"data.cache_dir": "s3://bucket/cache"}),
    ("finetune", {"run_dir": "s3://bucket/run"}),
    ("convert", {"ranks": 2}),
    ("convert", {"nest": "a"}),
    ("convert", {"format": "sharded"}),
    ("convert", {"format": "sharded", "ranks": 0}),
    ("convert", {"format": "hf"}),
    ("convert", {"dtype": "bf16"}),
    ("convert", {"max_shard_size": "x"}),
    ("convert", {"target": "s3://bucket/model"}),
    ("convert", {"seed": 3}),
    ("convert", {"launch.ranks": 2}),
    ("evaluate", {"batch_size": -1}),
    ("evaluate", {"stride": 0}),
    ("evaluate", {"task": "xyz"}),
    ("evaluate", {"perplexity.by": "document"}),
    ("evaluate", {"perplexity.num_resamples": 200}),
    ("evaluate", {"dispatch.quantize": "int3"}),
    ("evaluate", {"dispatch.schedule": "layer"}),
    ("evaluate", {"dispatch.dtype": "bf16"}),
    ("evaluate", {"seed": 3}),
    ("generate", {"generation.temperature": 0.1}),
    ("generate", {"generation.top_p": 5.0, "generation.do_sample": True}),
    ("generate", {"prompts": "prompts.txt"}),
    ("generate", {"dispatch.schedule": "layer_major"}),
    ("generate", {"output": "s3://bucket/a.jsonl"}),
    ("plan", {"train.micro_batch_size": 0}),
    ("plan", {"launch.max_restarts": 2}),
    ("plan", {"launch.ranks": "4:2"}),
    ("plan", {"data.sequence_length": -100}),
    ("plan", {"shard.param_dtype": "bf16"}),
]


def _built(command: str, given: Mapping[str, Any]) -> Any:
    """The config that the arguments of `composed.GIVEN` and the settings `given` make."""
    required: dict[str, dict[str, Any]] = {
        "finetune": {"model.path": "org/name", "data.path": "text.txt"},
        "convert": {"source": "a", "target": "b"},
        "evaluate": {"checkpoint": "a", "data.path": "text.txt"},
        "generate": {"checkpoint": "a", "prompt": "Hello"},
        "plan": {"model.path": "org/name"},
    }
    config = COMMANDS[command]()
    for name, value in {**required[command], **given}.items():
        *sections, leaf = name.split(".")
        holder: Any = config
        for section in sections:
            holder = getattr(holder, section)
        assert hasattr(holder, leaf)
        setattr(holder, leaf, value)
    return config


def _message(check: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        check()
    return str(caught.value)


@pytest.mark.parametrize(("command", "given"), WRONG, ids=[f"{command} {given}" for command, given in WRONG])
def test_what_the_command_line_refuses_is_refused_in_python(
    command: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {True: "true"}
    said = refusal(command, *(f"{name}={words.get(value, value)}" for name, value in given.items()))
    assert _message(partial(CHECKS[command], _built(command, given))) == said
    assert _message(partial(RUNS[command], _built(command, given))) == said
    assert not any(tmp_path.iterdir())


def test_windows_that_leave_out_tokens_are_refused_by_both_stages(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c\n" * 100)
    config = fs.EvaluateConfig(checkpoint=str(tiny_model), stride=100)
    config.data.path, config.data.sequence_length = str(tmp_path / "text.txt"), 16
    said = _message(partial(fs.check_evaluation, config))
    assert said.startswith("stride=100 and data.sequence_length=16 leave tokens that no window has")
    assert _message(partial(fs.run_evaluation, config, str(tmp_path / "run"))) == said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("shard", "fsdp2", "shard='fsdp2' is str, expected an object with the settings of shard (ShardConfig): "),
        ("objective", None, "objective=None is NoneType, expected an object with the settings of objective "),
        ("train", {"steps": 5}, "train={'steps': 5} is dict, expected an object with the settings of train "),
        ("train", TrainConfig, "train=<class '"),
        (
            "train.micro_batchsize",
            64,
            "train.micro_batchsize is not a setting (did you mean micro_batch_size?); ",
        ),
        (
            "modle",
            "a",
            "modle is not a setting (did you mean model?); a value of your own has a name ",
        ),
    ],
)
def test_other_values_for_a_section_and_unknown_names_are_refused(name: str, value: object, said: str) -> None:
    for command in ("finetune", "plan"):
        config = _built(command, {})
        section, _, leaf = name.rpartition(".")
        setattr(getattr(config, section) if section else config, leaf, value)
        for stage in (CHECKS, RUNS):
            assert _message(partial(stage[command], config)).startswith(said)


@dataclass(slots=True)
class _OwnSection:
    size: int = 3


@dataclass
class _OwnConfig(fs.FinetuneConfig):
    alpha: float = 0.5
    own: _OwnSection = field(default_factory=_OwnSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.beta = 1 - self.alpha


def test_configs_of_users_may_compute_attributes() -> None:
    config = _OwnConfig()
    config.model.path = config.data.path = "a"
    check(config)
    assert config.beta == 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_dir_that_is_not_given_is_named_by_date(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = COMMANDS[command]
    config, other = schema(), schema()
    of = "finetune" if command == "doctor" else command
    assert re.fullmatch(rf"outputs/{of}/\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{{6}}", config.run_dir)
    assert config.run_dir != other.run_dir, "a second run would resume the first"
    assert schema(run_dir="a ${now:%Y}").run_dir == "a ${now:%Y}", "text is taken literally"
    if config.writes:
        fs.write_config(config)
        assert Path(config.run_dir, "config.yaml").is_file()


def test_settings_that_are_not_given_are_named_as_on_the_command_line() -> None:
    assert _message(partial(fs.check_evaluation, fs.EvaluateConfig())).startswith(
        "checkpoint and data.path are not set"
    )
    assert _message(partial(fs.check_conversion, fs.ConvertConfig(source="a"))).startswith("target is not set. Add ")
    assert "neither is given" in _message(partial(_check_generation, fs.GenerateConfig(checkpoint="a")))


def test_a_required_setting_may_be_left_to_another_one(tiny_model: Path) -> None:
    config = fs.EvaluateConfig(checkpoint=str(tiny_model), task="speed")
    fs.check_evaluation(config)
    assert config.data.path == ""


def test_a_run_that_was_not_checked_refuses_sections_that_contradict_each_other(tmp_path: Path) -> None:
    config = _built("finetune", {"train.epochs": 2.0, "data.streaming": True, "run_dir": str(tmp_path / "run")})
    config.launch.device = "cpu"
    with pytest.raises(ConfigError, match=r"train\.epochs=2 cannot be combined with data\.streaming=true"):
        _start(config)


def test_a_config_composed_in_python_is_that_of_the_command_line(tmp_path: Path) -> None:
    @dataclass
    class Own(fs.FinetuneConfig):
        gamma: float = 2.0

    required = ["model.path=model", "data.path=text.txt"]
    config = fs.compose_config(Own, [*required, "shard=fsdp1", "optim=sgd", "adapter=lora", "gamma=3"])
    assert (type(config.shard), type(config.optim), config.gamma) == (Fsdp1Config, SgdConfig, 3.0)
    assert type(fs.compose_config(fs.FinetuneConfig, required).shard) is Fsdp2Config
    (tmp_path / "mine.yaml").write_text("model: {path: model}\ntrain: {steps: 7}\n")
    preset = fs.compose_config(fs.FinetuneConfig, [str(tmp_path / "mine.yaml"), "data.path=text.txt", "seed=3"])
    assert (preset.train.steps, preset.model.path, preset.seed) == (7, "model", 3)
    assert isinstance(fs.compose_config(fs.PlanConfig, required[:1]).optim, AdamWConfig)
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        fs.compose_config(fs.FinetuneConfig, required[:1])
    with pytest.raises(ConfigError, match=r"optim\.lr=-1"):
        fs.compose_config(fs.FinetuneConfig, [*required, "optim.lr=-1"])


def test_what_is_made_from_settings_follows_them(tmp_path: Path) -> None:
    """A config is used for several runs: values of settings that have changed since are made anew, others kept."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    finetune, plan = fs.FinetuneConfig(), fs.PlanConfig()
    evaluate, distill = fs.EvaluateConfig(checkpoint=a, against=a), DistillConfig(teacher=a)
    for path in (a, b):
        finetune.model.path = plan.model.path = evaluate.checkpoint = evaluate.against = distill.teacher = path
        for source in (finetune.source, plan.source, evaluate.source, evaluate.other_source, distill.source):
            assert source is not None
            assert source.path == path
    assert finetune.source is finetune.source, "a location holds open files"
    assert copy.deepcopy(finetune).source.path == b
    evaluate.dispatch.max_memory = {0: "2GB"}
    assert evaluate.dispatch.budgets == {0: 2_000_000_000}
    evaluate.dispatch.max_memory["cpu"] = "1GB"
    assert evaluate.dispatch.budgets == {0: 2_000_000_000, "cpu": 1_000_000_000}
