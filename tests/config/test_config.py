"""Configs: every file under conf/ composes, sweeps are one job each, and every setting is in the reference."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.cli import Recipe
from fsdp_shard.config import (
    COMMANDS,
    OPTIONS,
    ConvertConfig,
    FinetuneConfig,
    GenerateConfig,
    PlanConfig,
    is_used,
)
from fsdp_shard.config.compose import compose_jobs
from fsdp_shard.config.config_file import write_config
from fsdp_shard.config.nested_run_dirs import refuse_nested
from fsdp_shard.config.reference import groups_of, help_text, markdown, settings_of
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.training import AdamWConfig
from fsdp_shard.utils import Parsed, check, configs, parse_size, setting, shipped_directory, walk
from tests.config.composed import GIVEN, compose, one, refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes_to_its_dataclass(command: str) -> None:
    config = one(command)
    assert type(config) is COMMANDS[command]
    of = "finetune" if command == "doctor" else command  # whose directory it looks at
    assert config.run_dir.startswith(f"outputs/{of}/")
    assert (config.seed, config.debug, config.launch.ranks) == (0, False, 1)
    check(config)


def _presets() -> list[tuple[str, str, str]]:
    """(command, group, option) of every YAML file below a group, for each command that has the group."""
    files = [item.name.removesuffix(".yaml").rpartition("/") for item in configs()]
    return [
        (c, group, option)
        for c in COMMANDS
        for schema in [COMMANDS[c]]
        for group, _, option in files
        if group in groups_of(schema)
    ]


@pytest.mark.parametrize(("command", "group", "option"), _presets())
def test_every_preset_composes(command: str, group: str, option: str) -> None:
    plain, chosen = one(command), one(command, f"{group}={option}")
    plain.run_dir = chosen.run_dir
    assert chosen != plain, "a preset that changes nothing"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "objective=dpo objective.reference=dispatched objective.reference_max_memory={cpu:lots}",
            "objective.reference_max_memory.cpu=lots is not a size",
        ),
        (
            "launch.nodes=1:2 launch.rendezvous=a:1 checkpoint.optimizer=false",
            "launch.nodes=1:2 resumes from the last checkpoint",
        ),
    ],
)
def test_a_plan_refuses_what_training_refuses_at_once(typed: str, said: str) -> None:
    for command in ("finetune", "plan"):
        assert said in refusal(command, *typed.split())


def test_every_file_under_conf_is_reached() -> None:
    paths = [
        file.relative_to(shipped_directory("conf")) for file in shipped_directory("conf").rglob("*") if file.is_file()
    ]
    files = {path.as_posix() for path in paths if path.parts[0] != "lm_eval"}  # tasks of the harness
    reached = {f"{command}.yaml" for command in COMMANDS} | {
        f"{group}/{option}.yaml" for _, group, option in _presets()
    }
    assert files == reached
    assert all(item.description for item in configs()), "each begins with a comment that `ls` shows"


@pytest.mark.parametrize(
    ("command", "group", "option", "expected"),
    [
        ("finetune", "shard", "fsdp2", Fsdp2Config),
        ("finetune", "shard", "fsdp1", Fsdp1Config),
        ("finetune", "shard", "ddp", DdpConfig),
        ("plan", "shard", "fsdp1", Fsdp1Config),
        ("finetune", "optim", "adamw", AdamWConfig),
    ],
)
def test_a_group_option_is_its_dataclass(command: str, group: str, option: str, expected: type) -> None:
    config = one(command, f"{group}={option}")
    assert type(getattr(config, group)) is expected


def test_the_defaults_are_those_of_the_declarations() -> None:
    config = one("finetune")
    assert config.shard == Fsdp2Config()
    assert config.optim == AdamWConfig()
    for name in ("train", "checkpoint", "launch"):
        assert getattr(config, name) == type(getattr(config, name))()


def test_overrides_have_their_types() -> None:
    config = one("finetune", "train.steps=7", "optim.betas=[0.8,0.9]", "train.max_grad_norm=null", "shard.blocks=[A,B]")
    assert config.train.steps == 7
    assert config.optim.betas == [0.8, 0.9]
    assert config.train.max_grad_norm is None
    assert config.shard.blocks == ["A", "B"]
    assert type(config.shard.blocks) is list


def test_steps_or_epochs() -> None:
    for command in ("finetune", "plan", "doctor"):
        assert one(command).train.num_steps == 100
        given = one(command, "train.epochs=3", "train.warmup_steps=500").train
        assert (given.steps, given.epochs) == (None, 3.0)
    of_file = one("finetune", "experiment=small_cpu", "train.steps=null", "train.epochs=1.5").train
    assert of_file.for_data(80).num_steps == 30


def test_mappings_can_be_given_whole() -> None:
    config = one("generate", "dispatch.max_memory={0: 3GB, cpu: 2GB}", "dispatch.device_map={lm_head: 0, model: cpu}")
    assert config.dispatch.budgets == {0: 3 * 10**9, "cpu": 2 * 10**9}, "parsed when it was composed"
    assert config.dispatch.device_map == {"lm_head": 0, "model": "cpu"}


_TEXTS = (
    *(
        "Hello, world",
        "What's up",
        'Say "hi"',
        '"quoted"',
        "'",
        "a: b",
        "[x]",
        "{y}",
        "choice(a,b)",
        "a=b,c=d",
        " ends ",
    ),
    *("${x}", "${", "\\${x}", "x\\\\${y}'", "${oc.env:HOME}", "true", "5", "null", "a#b", "100 %", "é"),
    *("C:\\new", "end\\", "\\\\'", "two\nlines", "\t"),
)


@pytest.mark.parametrize("text", [text for text in _TEXTS if text.strip()])
def test_text_is_taken_as_it_is(text: str, tmp_path: Path) -> None:
    given = [f"prompt={text}", f"checkpoint=dir/{text}", f"run_dir={tmp_path}"]
    (job,) = compose_jobs(GenerateConfig, given, "generate")
    assert (job.config.prompt, job.config.checkpoint) == (text, f"dir/{text}")
    write_config(job.config)
    (again,) = compose_jobs(GenerateConfig, ["--config-dir", str(tmp_path), "--config-name", "config"], "generate")
    assert again.config == job.config
    swept = compose_jobs(GenerateConfig, ["-m", *given, "generation.batch_size=1,2"], "generate")
    assert [(job.config.prompt, job.config.generation.batch_size) for job in swept] == [(text, 1), (text, 2)]


def test_text_is_swept_where_each_value_is_quoted() -> None:
    jobs = compose("generate", "-m", """prompt="Hello, world",'Say "hi"', "${x}\"""")
    assert [job.config.prompt for job in jobs] == ["Hello, world", 'Say "hi"', "${x}"]
    assert one("generate", 'prompt="a","b"').prompt == '"a","b"'
    layouts = compose("finetune", "-m", "checkpoint.layout=sharded,gathered")
    assert [job.config.checkpoint.layout for job in layouts] == ["sharded", "gathered"], "a word, not text"


def test_null_unsets_a_text_that_can_be_unset() -> None:
    assert one("finetune", "data.eval_path=a").data.eval_path == "a"
    assert one("finetune", "data.eval_path=a", "data.eval_path=null").data.eval_path is None
    given = "train.trackers=[wandb]", "train.tracker_project=null"
    assert one("finetune", *given).train.tracker_project == "null"


def test_null_unsets_a_required_text_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    mixture = "data.mixture={a: {path: a.txt}}"
    assert one("finetune", "data.path=null", mixture).data.path == ""
    assert one("evaluate", "data.path=null", "data.eval_path=held.txt").data.path == ""
    assert one("doctor", "data.path=null", mixture).data.path == ""
    assert "data.path is not set" in refusal("finetune", "data.path=null")
    assert "data.path=text.txt and data.mixture both say" in refusal("finetune", mixture)
    file = tmp_path / "mine.yaml"
    for path in ("data: {path: null}", "data.path: null"):
        file.write_text(f"model.path: b\n{path}\ndata.mixture: {{a: {{path: a.txt}}}}")
        (job,) = compose_jobs(FinetuneConfig, [str(file)], "finetune")
        assert (job.config.model.path, job.config.data.path) == ("b", "")
    file.write_text("model.path: b\ndata.path: a.txt")
    (job,) = compose_jobs(FinetuneConfig, [str(file), "data.path=null", mixture], "finetune")
    assert job.config.data.path == ""


def test_a_sweep_is_one_job_for_each_combination_each_in_its_own_directory(tmp_path: Path) -> None:
    jobs = compose("finetune", "train.steps=1,2", "-m", "shard=fsdp1,fsdp2", f"run_dir={tmp_path}/sweep")
    assert [(job.config.train.steps, type(job.config.shard)) for job in jobs] == [
        (1, Fsdp1Config),
        (1, Fsdp2Config),
        (2, Fsdp1Config),
        (2, Fsdp2Config),
    ]
    assert [job.config.run_dir for job in jobs] == [f"{tmp_path}/sweep/{number}" for number in range(4)]
    assert "train.steps=2" in jobs[2].overrides
    assert not list(tmp_path.iterdir()), "composing writes nothing"
    assert len(compose("finetune", "hydra.mode=MULTIRUN", "train.steps=1,2")) == 2


def test_a_wrong_run_of_a_sweep_is_named() -> None:
    assert "adapter.rank needs adapter=lora" in refusal("finetune", "-m", "adapter=lora,none", "adapter.rank=4")
    assert "data=a,b: data is a section" in refusal("finetune", "-m", "data=a,b")


def test_the_whole_sweep_is_checked_before_any_of_it_runs() -> None:
    assert "train.steps=0 is out of range" in refusal("finetune", "-m", "train.steps=1,0")


def _fail(config: FinetuneConfig) -> None:
    pytest.fail("nothing is to run")


def _refuse(config: FinetuneConfig) -> None:
    raise ConfigError("checked")


@pytest.mark.long
def test_joined_ranks_have_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(FinetuneConfig, _fail, _refuse)

    def refusal(*given: str) -> str:
        with pytest.raises(ConfigError) as raised:
            recipe.run([*GIVEN["finetune"], "-m", "train.steps=1,2", *given], "finetune")
        return str(raised.value)

    assert "would run 2 jobs one after the other, but 3 machines (launch.nodes) meet only once" in refusal(
        "launch.nodes=3", "launch.rendezvous=a:1"
    )
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert "torchrun or srun has started cannot continue together after a failed run" in refusal()
    # A batch script of Slurm starts the ranks of each run itself.
    assert refusal("launch.ranks=2") == "checked"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun or srun has started cannot continue together after a failed run" in refusal()


def test_composing_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose("finetune", "-m", "train.steps=1,2")
    compose("finetune")
    assert not list(tmp_path.iterdir())


def test_a_run_is_planned_as_it_was(tmp_path: Path) -> None:
    write_config(one("finetune", f"run_dir={tmp_path}", "optim=sgd"))
    (job,) = compose_jobs(PlanConfig, [str(tmp_path), "trace=true", "device.memory=1GB"], "plan")
    assert (job.config.run, job.config.trace, type(job.config.optim)) == (str(tmp_path), True, OPTIONS["optim"]["sgd"])
    with pytest.raises(ConfigError, match=r"train\.steps would plan another run"):
        compose_jobs(PlanConfig, [str(tmp_path), "train.steps=3"], "plan")


@dataclass
class _Extended(FinetuneConfig):
    """A recipe's own config: the settings of finetune and one more."""

    extra: int = setting(3, "A setting of its own.", minimum=0)


def test_a_recipe_can_add_settings_of_its_own() -> None:
    (job,) = compose_jobs(_Extended, [*GIVEN["finetune"], "extra=4", "train.steps=2"], "mine")
    assert type(job.config) is _Extended
    assert (job.config.extra, job.config.train.steps) == (4, 2)
    with pytest.raises(ConfigError, match=r"did you mean extra\?"):
        compose_jobs(_Extended, [*GIVEN["finetune"], "extr=4"], "mine")
    # The next composition of the plain one does not see it.
    assert type(one("finetune")) is FinetuneConfig


def test_the_written_config_is_resolved_and_replaces_an_olderone(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    run_dir = tmp_path / "a" / "b"
    for steps in (5, 6):
        write_config(one("finetune", f"run_dir={run_dir}", f"train.steps={steps}"))
    written: Any = OmegaConf.load(run_dir / "config.yaml")
    assert written.train.steps == 6
    assert written.run_dir == str(run_dir)
    assert written.optim.betas == [0.9, 0.999]
    assert "${" not in (run_dir / "config.yaml").read_text()
    assert [file.name for file in run_dir.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("command", [command for command in COMMANDS if COMMANDS[command].writes])
def test_a_run_can_be_made_again_from_its_written_config(command: str, tmp_path: Path) -> None:
    of_group = {
        "finetune": ["shard=fsdp1", "train.steps=7"],
        "generate": ["generation=sampled"],
        "evaluate": ["perplexity.by=documents"],
    }
    seed = [] if "seed" in COMMANDS[command].unused else ["seed=3"]
    config = one(command, f"run_dir={tmp_path}", *seed, *of_group.get(command, []))
    write_config(config)
    (again,) = compose_jobs(COMMANDS[command], ["--config-dir", str(tmp_path), "--config-name", "config"], "test")
    assert again.config == config
    assert [type(value) for _, _, value in walk(again.config)] == [type(v) for _, _, v in walk(config)]


def test_a_run_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*/file/x cannot be written: Not a directory"):
        write_config(one("finetune", f"run_dir={tmp_path}/file/x"))


def test_a_run_directory_inside_of_a_run_or_a_checkpoint(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(one("evaluate", f"run_dir={tmp_path}/run"))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for inside, words in (
        (tmp_path / "run" / "a" / "b", "the directory of another run"),
        (tmp_path / "link" / "a", "the directory of another run"),
        (model / "a", "the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=rf"run_dir={inside} is in {words}.*give a directory outside"):
            refuse_nested(one("finetune", f"run_dir={inside}"))
    for run_dir in (tmp_path / "run", tmp_path / "other", model):
        refuse_nested(one("finetune", f"run_dir={run_dir}"))
    monkeypatch.chdir(model)
    refuse_nested(one("evaluate"))  # its default is in the working directory


def _leaves(config: Any, prefix: str = "") -> set[str]:
    return {name for name, _, _ in walk(config, prefix)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_says_what_it_is(command: str) -> None:
    told = settings_of(COMMANDS[command])
    assert all(s.help for s in told), [s.name for s in told if not s.help]
    used = {name for name in _leaves(one(command)) if is_used(COMMANDS[command], name)}
    assert {s.name for s in told} >= used
    assert all(is_used(COMMANDS[command], s.name) for s in told)
    text = help_text(COMMANDS[command], f"fsdp-shard {command}")
    assert all("; ".join([f"  {s.name}={s.default}", *map(" ".join, s.defaults)]) + "\n" in text for s in told)
    assert max(map(len, text.split("\n"))) <= 120


def test_settings_of_one_option_only_say_which() -> None:
    @dataclass
    class Other(Fsdp2Config):
        prefetch: int = setting(1, "Blocks to gather ahead.", minimum=0)

    OPTIONS["shard"]["other"] = Other
    try:
        (found,) = [s for s in settings_of(FinetuneConfig) if s.name == "shard.prefetch"]
    finally:
        del OPTIONS["shard"]["other"]
    assert found.sentence == "Blocks to gather ahead. (at least 0; only shard=other)"


@pytest.mark.parametrize("group", OPTIONS)
def test_the_reference_has_the_default_of_every_option(group: str) -> None:
    command = next(name for name, schema in COMMANDS.items() if group in groups_of(schema))
    for option, node in OPTIONS[group].items():
        given = [f"{group}={option}", *(["objective.teacher=x"] if option == "distill" else [])]
        config, leaves = one(command, *given), _leaves(node(), f"{group}.")
        for told in settings_of(COMMANDS[command]):
            default = next((value for names, value in told.defaults if option in names.split(", ")), told.default)
            if told.name in leaves and default not in ("???", "null") and not default.startswith("["):
                found = next(value for name, _, value in walk(config) if name == told.name)
                assert str(found).lower() == default.lower(), f"{told.name} of {group}={option}"


def test_what_differs_between_options_names_them() -> None:
    told = {found.name: found for found in settings_of(FinetuneConfig)}
    assert told["optim.weight_decay"].defaults == (("adafactor, sgd", "0.0"), ("muon", "0.1"))
    assert "reference. ipo: How" in told["objective.beta"].sentence
    assert "simpo: Scale of the rewards." in told["objective.beta"].sentence
    assert "gradient. sgd: Fraction" in told["optim.momentum"].sentence
    assert "| `objective.beta` | `0.1`; simpo `2.0` | How strongly" in markdown()
    assert "  objective.beta=0.1; simpo 2.0\n" in help_text(FinetuneConfig, "finetune")


def test_the_reference_is_current() -> None:
    file = Path(__file__).parent.parent.parent / "docs" / "config.md"
    assert file.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_root_schemas_are_where_the_commands_are() -> None:
    assert set(GIVEN) == set(COMMANDS)
    for schema in COMMANDS.values():
        assert dataclasses.is_dataclass(schema)
    assert PlanConfig.rank_mode == "planned"
    assert [command for command in COMMANDS if not COMMANDS[command].writes] == ["doctor"]
    assert FinetuneConfig.rank_mode == "started"
    assert GenerateConfig.rank_mode == "started"
    assert ConvertConfig.rank_mode == "one"


def test_a_setting_is_parsed_once_and_reported_by_its_full_name() -> None:
    seen: list[str] = []

    def parse(value: str, name: str) -> int:
        seen.append(name)
        return parse_size(value, name)

    @dataclass
    class Section:
        size: str = "2kB"
        size_bytes = Parsed("size", parse)

    @dataclass
    class Config:
        section: Section = field(default_factory=Section)

    config = Config()
    check(config)
    assert (config.section.size_bytes, config.section.size_bytes, seen) == (2000, 2000, ["section.size"])
    assert Section("3kB").size_bytes == 3000, "one that was made in Python is parsed when it is used"
    with pytest.raises(ConfigError, match=r"section\.size=big is not a size"):
        check(Config(Section("big")))
