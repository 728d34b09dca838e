"""Configs: every file under conf/ composes, every setting is told, and what is wrong is named with what is near."""

from __future__ import annotations

import dataclasses
import json
import shutil
import traceback
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
    names_elsewhere,
)
from fsdp_shard.config.compose import Job, compose_jobs, write_config
from fsdp_shard.config.nested_run_dirs import refuse_nested
from fsdp_shard.config.reference import groups_of, help_text, markdown, settings_of
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.training import AdamWConfig
from fsdp_shard.utils import Parsed, check, configs, parse_size, setting, shipped, walk

_GIVEN = {
    "finetune": ["model.path=org/name", "data.path=text.txt"],
    "convert": ["source=a", "target=b"],
    "evaluate": ["checkpoint=a", "data.path=text.txt"],
    "generate": ["checkpoint=a", "prompt=Hello"],
    "plan": ["model.path=org/name"],
    "doctor": [],
}


def _compose(command: str, *arguments: str) -> list[Job[Any]]:
    return compose_jobs(COMMANDS[command], [*_GIVEN[command], *arguments], f"fsdp-shard {command}")


def _one(command: str, *arguments: str) -> Any:
    (job,) = _compose(command, *arguments)
    return job.config


def _refusal(command: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _compose(command, *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes_to_its_dataclass(command: str) -> None:
    config = _one(command)
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
    plain, chosen = _one(command), _one(command, f"{group}={option}")
    plain.run_dir = chosen.run_dir
    assert chosen != plain, "a preset that changes nothing"


def test_every_file_under_conf_is_reached() -> None:
    paths = [file.relative_to(shipped("conf")) for file in shipped("conf").rglob("*") if file.is_file()]
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
    config = _one(command, f"{group}={option}")
    assert type(getattr(config, group)) is expected


def test_the_defaults_are_those_of_the_declarations() -> None:
    config = _one("finetune")
    assert config.shard == Fsdp2Config()
    assert config.optim == AdamWConfig()
    for name in ("train", "checkpoint", "launch"):
        assert getattr(config, name) == type(getattr(config, name))()


def test_overrides_have_their_types() -> None:
    config = _one(
        "finetune", "train.steps=7", "optim.betas=[0.8,0.9]", "train.max_grad_norm=null", "shard.blocks=[A,B]"
    )
    assert config.train.steps == 7
    assert config.optim.betas == [0.8, 0.9]
    assert config.train.max_grad_norm is None
    assert config.shard.blocks == ["A", "B"]
    assert type(config.shard.blocks) is list


def test_steps_or_epochs() -> None:
    for command in ("finetune", "plan", "doctor"):
        assert _one(command).train.num_steps == 100
        given = _one(command, "train.epochs=3", "train.warmup_steps=500").train
        assert (given.steps, given.epochs) == (None, 3.0)
    of_file = _one("finetune", "experiment=small_cpu", "train.steps=null", "train.epochs=1.5").train
    assert of_file.for_data(80).num_steps == 30


def test_mappings_can_be_given_whole() -> None:
    config = _one("generate", "dispatch.max_memory={0: 3GB, cpu: 2GB}", "dispatch.device_map={lm_head: 0, model: cpu}")
    assert config.dispatch.budgets == {0: 3 * 10**9, "cpu": 2 * 10**9}, "parsed when it was composed"
    assert config.dispatch.device_map == {"lm_head": 0, "model": "cpu"}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("adapter.rank=8", "adapter.rank needs adapter=lora; add that, or leave adapter.rank out."),
        ("optim.momentum=0.5", "optim.momentum needs optim=muon or optim=sgd; add that"),
        ("optim=sgd optim.fused=true", "optim.fused needs optim=adamw; add that"),
        ("train.lr=1", "train.lr is not a setting of finetune (here it is optim.lr)"),
        ("train.sequence_length=1", "(did you mean data.sequence_length?)"),
        (
            "--learning_rate 1e-4",
            "Unrecognized arguments: --learning_rate (here it is optim.lr); settings have the form",
        ),
        ("--train.steps=5", "Unrecognized arguments: --train.steps=5 (did you mean train.steps=VALUE?)"),
        ("run_dir=", "run_dir is empty; give a directory"),
        ("train.stepz=3", "train.stepz is not a setting of finetune (did you mean train.steps?)"),
        ("trian.steps=3", "(did you mean train.steps?)"),
        ("steps=3", "(did you mean train.steps?)"),
        ("max_grad_norm=3", "(did you mean train.max_grad_norm?)"),
        ("+train.stepz=3", "train.stepz is not a setting of finetune (did you mean train.steps?)"),
        ("++nothing_like_it=3", "nothing_like_it is not a setting of finetune."),
        ("shards=fsdp1", "shards is not a setting of finetune (did you mean shard?)"),
        (
            "shard=fsdp3",
            "shard=fsdp3: there is no such option; shard has fsdp2, fsdp1, ddp, float32, low_memory (did you mean fsdp",
        ),
        ("train=null", "train=null: there is no such option; train has default"),
        ("experiment=nothing", "experiment=nothing: there is no such option; experiment has billions_gpu, "),
        ("train.steps=abc", "train.steps=abc is not a whole number."),
        ("train.steps=1.5", "train.steps=1.5 is not a whole number."),
        ("optim.lr=fast", "optim.lr=fast is not a number."),
        ("debug=maybe", "debug=maybe is not true or false."),
        ("train.steps=0", "train.steps=0 is out of range: it must be at least 1."),
        ("optim.lr=0", "optim.lr=0.0 is out of range: it must be more than 0.0."),
        (
            "shard.activation_checkpointing=some",
            "checkpointing=some is not true, false, none, all",
        ),
        ("shard.activation_checkpointing=0", "activation_checkpointing=0 is not true, false"),
        ("shard.reshard_after_forward=1", "reshard_after_forward=1 is not true, false or a number of ranks from 2 on"),
        (
            "shard.reshard_after_forward=maybe",
            "shard.reshard_after_forward=maybe is not true or false or a whole number",
        ),
        ("shard=fsdp1 shard.reshard_after_forward=2", "use shard=fsdp2 for a number of ranks"),
        ("shard=fsdp1 shard.prefetch_forward=2", "shard=fsdp1 gathers at most one unit ahead"),
        ("shard.prefetch_backward=0", "shard=fsdp2 gathers at least one unit ahead in the backward pass"),
        ("shard.prefetch_backward=2 shard.reshard_after_forward=false", "would do nothing with shard.reshard_after"),
        ("shard.blocks=[A] shard.min_params=10", "two ways to choose the units"),
        ("shard.norms_in_float32=true shard.param_dtype=float32", "shard.norms_in_float32=true would do nothing"),
        ("shard=ddp shard.replicas=2", "shard.replicas=2 would do nothing with shard=ddp"),
        ("shard=ddp shard.cpu_offload=true", "shard.cpu_offload=true would do nothing with shard=ddp"),
        ("shard.param_dtype=bf16", "shard.param_dtype=bf16 is not one of float32, bfloat16"),
        ("train.global_batch_size=7 train.micro_batch_size=2", "train.global_batch_size=7 is not divisible"),
        ("launch.nodes=2", "launch.nodes=2 needs launch.rendezvous=host:port"),
        ("launch.rendezvous=a:1", "launch.rendezvous=a:1 has no effect with launch.nodes=1"),
        ("launch.rendezvous=here", "launch.rendezvous=here is not host:port"),
        ("train.steps", "train.steps is not of the form name=value, such as train.steps=VALUE"),
        ("shard.blocks=[a", "shard.blocks=[a cannot be parsed"),
        ("-m model.path=a,b", """model.path=a,b is one text. Quote each of its values, such as 'model.path="a","b"'"""),
        ("train.warmup_steps.x=1", "train.warmup_steps is 0, not a mapping that has x"),
        ("data=a.txt", "data is a section of settings and has no value itself; did you mean data.path=a.txt?"),
        ("train.warmup_steps=null", "train.warmup_steps=null: this setting needs a value"),
        ("train.steps=100 train.epochs=3", "train.steps=100 and train.epochs=3 both say how long to train; give one"),
        ("experiment=small_cpu train.epochs=3", "such as train.steps=null."),
        ("train.epochs=many", "train.epochs=many is not a number."),
        (
            "train.epochs=0.5 data.streaming=true",
            "train.epochs=0.5 cannot be combined with data.streaming=true, because the length of a stream is not known "
            "before its end; set train.steps instead.",
        ),
        (
            "train.epochs=3 data.path=??? data.mixture={a:{path:a.txt}}",
            "train.epochs=3 cannot be combined with data.mixture, because each source of a mixture has epochs of its "
            "own; set train.steps instead.",
        ),
        ("~train.steps", "train.steps"),
        ("~optim", "~optim would leave finetune without optim, which it needs"),
        ("launch.timeout_seconds=inf", "launch.timeout_seconds=inf is out of range: it must be at most 2592000.0."),
        ("--config-name=evaluate", "evaluate.yaml is a config of evaluate, not of finetune."),
        ("--foo", "Unrecognized arguments: --foo"),
        ("--cfg nothing", "Argument --cfg/-c: invalid choice: 'nothing'"),
        ("--config-dir nowhere", "--config-dir nowhere: there is no such directory."),
        (
            "hydra/launcher=joblib -m",
            "hydra/launcher=joblib: plugins of Hydra are not supported, and the runs of -m follow",
        ),
        ("hydra.run.dir=x", "hydra.run.dir=x has no effect: Hydra only composes the settings"),
        ("hydra.sweep.dir=x -m train.steps=1,2", "run_dir=DIR is the directory of a run, and that of a sweep."),
        ("++hydra.job.chdir=true", "++hydra.job.chdir=true has no effect"),
        ("--package=foo", "--package=foo has no effect"),
        ("hydra/sweeper=optuna optim=sgd,adamw -m", "hydra/sweeper=optuna: plugins of Hydra are not supported, and"),
        (
            "-m optim=adamw,sgdd",
            "optim=sgdd: there is no such option; optim has adamw, adamw8bit, adafactor, muon, sgd (",
        ),
        ("-m optim=sgd,adamw shard=fsdp1,fsdp3", "shard=fsdp3: there is no such option; shard has "),
    ],
)
def test_what_is_wrong_is_named(argument: str, said: str) -> None:
    assert said in _refusal("finetune", *argument.split())


@pytest.mark.parametrize(
    ("command", "name", "here"),
    [
        ("finetune", "learning_rate", "optim.lr"),
        ("finetune", "num_train_epochs", "train.epochs"),
        ("finetune", "per_device_train_batch_size", "train.micro_batch_size"),
        ("finetune", "gradient_accumulation_steps", "train.global_batch_size (train.micro_batch_size x ranks x accum"),
        ("finetune", "max_seq_length", "data.sequence_length"),
        ("finetune", "output_dir", "run_dir"),
        ("finetune", "lora_r", "adapter=lora adapter.rank"),
        ("finetune", "bf16", "shard.param_dtype=bfloat16"),
        ("generate", "model_name_or_path", "checkpoint"),
        ("generate", "torch_dtype", "dispatch.dtype"),
        ("convert", "output_dir", "target"),
        ("convert", "checkpoint", "source"),
        ("plan", "max_length", "data.sequence_length"),
    ],
)
def test_names_of_other_libraries_are_answered(command: str, name: str, here: str) -> None:
    assert f"{name} is not a setting of {command} (here it is {here}" in _refusal(command, f"{name}=1")


@pytest.mark.parametrize(
    ("command", "argument", "words"),
    [
        (
            "finetune",
            "tensor_parallel=2",
            "of generate, not of finetune; leave it out (or did you mean shard.tensor_par",
        ),
        ("convert", "checkpoint.max_shard_size=1GB", "of finetune, not of convert; leave it out (or did you mean max_"),
        ("evaluate", "train.steps=3", "train.steps is a setting of finetune, not of evaluate; leave it out."),
        ("evaluate", "model.dtype=float32", "is not a setting of evaluate (here it is dispatch.dtype)"),
    ],
)
def test_settings_of_another_command_are_named_as_such(command: str, argument: str, words: str) -> None:
    assert words in _refusal(command, argument)


def test_what_other_libraries_have_is_said_only_where_it_exists() -> None:
    assert "here it is" not in _refusal("generate", "num_train_epochs=1")
    known = {
        name for schema in COMMANDS.values() for name in (*groups_of(schema), *(s.name for s in settings_of(schema)))
    }
    here = [name.partition(" (")[0].split() for name in names_elsewhere._NAMES]
    said = {part.partition("=")[0] for parts in here for part in parts}
    assert said <= known, "a name that was changed"


def test_held_out_data_alone_are_enough_to_evaluate_on() -> None:
    (job,) = compose_jobs(COMMANDS["evaluate"], ["checkpoint=a", "data.eval_path=held.txt"], "evaluate")
    assert (job.config.data.path, job.config.data.eval_path) == ("", "held.txt")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        compose_jobs(COMMANDS["evaluate"], ["checkpoint=a"], "evaluate")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        compose_jobs(FinetuneConfig, ["model.path=a", "data.eval_path=held.txt"], "finetune")


def test_settings_that_must_be_given_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match=r"data\.path and model\.path are not set\. Add data\.path=VALUE model"):
        compose_jobs(FinetuneConfig, [], "fsdp-shard finetune")


def test_settings_that_must_be_given_are_explained_by_the_first_sentence_of_their_help() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_jobs(FinetuneConfig, ["model.path=m"], "fsdp-shard finetune")
    assert str(caught.value).endswith(
        "data.path: The data to train on or evaluate: a file, a directory, a pattern such as data/*.jsonl, or a "
        "dataset on the hub."
    )


def test_callers_from_python_see_no_traceback_of_hydra() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_jobs(FinetuneConfig, ["train.stepz=1"], "fsdp-shard finetune")
    assert "site-packages" not in "".join(traceback.format_exception(caught.value))


def test_a_wrong_key_in_a_preset_of_the_user_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  stepz: 3\n")
    said = _refusal("finetune", "--config-dir", str(tmp_path), "experiment=mine")
    assert "experiment/mine" in said
    assert "train.stepz is not a setting of finetune (did you mean train.steps?)" in said


def test_files_of_the_user_that_lack_what_hydra_needs_are_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("experiment/mine", "mine"):
        (tmp_path / f"{name}.yaml").write_text("train:\n  steps: 3\n")
    said = _refusal("finetune", f"--config-dir={tmp_path}", "experiment=mine")
    assert said.startswith("experiment/mine.yaml: its settings are taken for a section experiment; make `# @package")
    for given in ([], ["train.steps=2"]):
        with pytest.raises(ConfigError, match=r"mine\.yaml has some settings, .* begin it with `defaults: \[finetune,"):
            compose_jobs(FinetuneConfig, [f"--config-dir={tmp_path}", "--config-name", "mine", *given], "finetune")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("launch: {nodes: 2:4}", "launch.nodes is the text '2:4' as on the command line, but Hydra reads it as 124;"),
        (
            "shard: {blocks: [a, no]}",
            "shard.blocks[1] is the text 'no' as on the command line, but Hydra reads it as F",
        ),
    ],
)
def test_values_that_hydra_reads_otherwise_are_refused(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file, unused = (tmp_path / "experiment" / f"{name}.yaml" for name in ("mine", "unused"))
    unused.write_text(line)
    file.write_text(f"# @package _global_\n{line}\n")
    given = ["finetune", "--config-dir", str(tmp_path), "experiment=mine"]
    assert f"{file}: {said}" in _refusal(*given)
    quoted = "launch: {nodes: '2:4', rendezvous: 'a:1'}\noptim: {lr: 1e-5}\nshard: {blocks: [a, 'no']}\n"
    file.write_text(f"# @package _global_\n{quoted}")
    config = _one(*given)
    assert (config.launch.nodes, config.shard.blocks, config.optim.lr) == ("2:4", ["a", "no"], 1e-5)


def test_presets_of_the_user_go_before_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "small_cpu.yaml").write_text("# @package _global_\ntrain:\n  steps: 61\n")
    for flag in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        assert _one("finetune", *flag, "experiment=small_cpu").train.steps == 61
    assert _one("finetune", "experiment=small_cpu").train.steps == 60


_OWN = "# Mine\nmodel: {path: a}\ndata.path: b\nadapter: lora\nadapter.rank: 4\ntrain:\n  steps: 61\n"
_OWN_PRESET = "# @package _global_\ndefaults:\n  - override /adapter: lora\n  - _self_\nadapter: {rank: 4}\n"


def test_a_file_of_ones_own_is_the_first_argument(tmp_path: Path) -> None:
    directory = tmp_path / "a=b, [c]"
    directory.mkdir()
    (directory / "mine.yaml").write_text(_OWN)
    (directory / "preset.yml").write_text(_OWN_PRESET)
    mine, preset = str(directory / "mine.yaml"), str(directory / "preset.yml")
    (job,) = compose_jobs(FinetuneConfig, [mine, "adapter.alpha=3"], "finetune")
    config: Any = job.config
    assert (config.model.path, config.data.path, config.train.steps) == ("a", "b", 61)
    assert (config.adapter.rank, config.adapter.alpha) == (4, 3.0)
    jobs = compose_jobs(FinetuneConfig, ["-m", mine, "train.steps=1,2"], "finetune")
    assert [job.config.train.steps for job in jobs] == [1, 2]
    (job,) = compose_jobs(FinetuneConfig, [preset, *_GIVEN["finetune"]], "finetune")
    config = job.config
    assert (config.adapter.rank, config.model.path) == (4, "org/name")
    write_config(_one("finetune", f"run_dir={directory}", "seed=3", "shard=fsdp1"))
    (job,) = compose_jobs(FinetuneConfig, [str(directory / "config.yaml"), "train.steps=4"], "finetune")
    assert (job.config.seed, job.config.train.steps, type(job.config.shard)) == (3, 4, Fsdp1Config)
    assert compose_jobs(GenerateConfig, ["checkpoint=a", "prompt=b.yaml"], "x")[0].config.prompt == "b.yaml"


def test_values_in_a_file_of_ones_own_are_those_of_the_command_line(tmp_path: Path) -> None:
    """YAML 1.1 has numbers to the base 60 and 8, and seven words for true and false."""
    labels = "[no, on, 010, 2:30, 2024-01-01]"
    (tmp_path / "mine.yaml").write_text(
        "launch: {nodes: 2:4, rendezvous: a:1}\n"
        f"model: {{path: a, task: sequence_classification, labels: {labels}}}\n"
        "data: {path: b, subset: ~}\ntrain: {steps: 010, log_every: 1_0}\noptim: {lr: 1e-5}\n"
        "debug: yes\nshard: {reshard_after_forward: false}\n"
    )
    (job,) = compose_jobs(FinetuneConfig, [str(tmp_path / "mine.yaml")], "finetune")
    config: Any = job.config
    assert config.launch.nodes == "2:4"
    assert config.model.labels == ["no", "on", "010", "2:30", "2024-01-01"]
    assert (config.train.steps, config.train.log_every, config.optim.lr, config.data.subset) == (10, 10, 1e-5, None)
    assert (config.debug, config.shard.reshard_after_forward) == (True, False)
    (tmp_path / "written.yaml").write_text(config.to_yaml())
    (again,) = compose_jobs(FinetuneConfig, [str(tmp_path / "written.yaml")], "finetune")
    assert again.config == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {steps: 3, steps: 4}", "FILE cannot be read as YAML: found duplicate key steps"),
        ("train: {stepz: 3}", "FILE: train.stepz is not a setting of finetune (did you mean train.steps?)"),
        ("train: {steps: abc}", "FILE: train.steps=abc is not a whole number."),
        ("train: 3", "FILE: train is 3, and must have an option or settings"),
        ("data: x", "FILE: data is x, and must have settings"),
        ("adapter: lorra", "FILE: adapter=lorra: there is no such option; adapter has none, lora (did you mean lora?)"),
        ("defaults: [override /shrd: a]", "FILE: Could not override 'shrd'."),
        ("defaults: [nothing]", "FILE: there is no config nothing"),
        ("model: {dtype: a}\nmodel.dtype: b", "FILE: model.dtype is given twice, in model and in model.dtype; give it"),
        (
            "run_dir: a/${HOME}",
            "FILE: run_dir has ${...}, which would be replaced by another setting or a variable, and",
        ),
        (
            "run_dir: a/${HOME",
            "FILE: run_dir has ${...}, which would be replaced by another setting or a variable, and",
        ),
        (
            "data: {split: '${oc.env:NO_SUCH}'}",
            "FILE: data.split has ${...}, which would be replaced by another setting",
        ),
        ("data.split: '${no.such:1}'", "FILE: data.split has ${...}, which would be replaced by another setting"),
        ("seed: ${run_dir}", "FILE: seed has ${...}, which would be replaced by another setting or a variable, and"),
        ("adapter: ${run_dir}", "FILE: adapter is ${run_dir}, and must have an option or settings"),
        ("defaults: ['${run_dir}']", "FILE: Error resolving interpolation '${run_dir}'"),
        ("defaults: 3", "FILE: defaults is not a list"),
        ("defaults: [convert_schema]", "FILE is a config of convert, not of finetune."),
        ("[a]", "FILE must have settings"),
        ("a: [", "FILE cannot be read as YAML: "),
        (None, "FILE: there is no such file of settings."),
    ],
)
def test_what_is_wrong_in_a_file_of_ones_own_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        compose_jobs(FinetuneConfig, [str(file), *_GIVEN["finetune"]], "finetune")
    assert str(raised.value).startswith(said.replace("FILE", str(file)))


@pytest.mark.parametrize(
    "text", ["Price ${seed} of it", "${", "${ x", "${oc.env:HOME}", "a\\\\${x} and ${y}", "$x {y}"]
)
def test_free_text_in_a_file_of_ones_own_is_taken_as_it_is(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"checkpoint": "a", "prompt": text, "system": text, "chat": True}))
    config = compose_jobs(GenerateConfig, [str(file)], "generate")[0].config
    assert (config.prompt, config.system) == (text, text)
    file.write_text(json.dumps({"train": {"sample_prompts": ["a", text]}, "data.source_format": f"{text} {{source}}"}))
    found: Any = compose_jobs(FinetuneConfig, [str(file), *_GIVEN["finetune"], "data.kind=pairs"], "finetune")[0].config
    assert (found.train.sample_prompts, found.data.source_format) == (["a", text], f"{text} {{source}}")
    file.write_text(found.to_yaml())
    assert compose_jobs(FinetuneConfig, [str(file)], "finetune")[0].config == found


def test_other_settings_in_a_file_of_ones_own_may_name_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    (tmp_path / "mine.yaml").write_text("run_dir: runs/${oc.env:WHO}-${seed}\n")
    (job,) = compose_jobs(FinetuneConfig, [str(tmp_path / "mine.yaml"), *_GIVEN["finetune"]], "finetune")
    assert job.config.run_dir == "runs/me-0"


def test_one_file_of_ones_own_comes_first() -> None:
    assert "b.yaml is not of the form name=value; one file of settings is read" in _refusal("finetune", "b.yaml")
    with pytest.raises(ConfigError, match="both name a config"):
        compose_jobs(FinetuneConfig, ["a.yaml", "--config-name=b"], "finetune")


def test_the_home_directory_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _one("finetune", "run_dir=~/one").run_dir == f"{tmp_path}/one"
    assert _one("finetune", "run_dir=s3://bucket/one").run_dir == "s3://bucket/one", "which is refused by its name"


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
    jobs = _compose("generate", "-m", """prompt="Hello, world",'Say "hi"', "${x}\"""")
    assert [job.config.prompt for job in jobs] == ["Hello, world", 'Say "hi"', "${x}"]
    assert _one("generate", 'prompt="a","b"').prompt == '"a","b"'
    layouts = _compose("finetune", "-m", "checkpoint.layout=sharded,gathered")
    assert [job.config.checkpoint.layout for job in layouts] == ["sharded", "gathered"], "a word, not text"


def test_null_unsets_a_text_that_can_be_unset() -> None:
    assert _one("finetune", "data.eval_path=a").data.eval_path == "a"
    assert _one("finetune", "data.eval_path=a", "data.eval_path=null").data.eval_path is None
    given = "train.trackers=[wandb]", "train.tracker_project=null"
    assert _one("finetune", *given).train.tracker_project == "null"


def test_a_sweep_is_one_job_for_each_combination_each_in_its_own_directory(tmp_path: Path) -> None:
    jobs = _compose("finetune", "train.steps=1,2", "-m", "shard=fsdp1,fsdp2", f"run_dir={tmp_path}/sweep")
    assert [(job.config.train.steps, type(job.config.shard)) for job in jobs] == [
        (1, Fsdp1Config),
        (1, Fsdp2Config),
        (2, Fsdp1Config),
        (2, Fsdp2Config),
    ]
    assert [job.config.run_dir for job in jobs] == [f"{tmp_path}/sweep/{number}" for number in range(4)]
    assert "train.steps=2" in jobs[2].overrides
    assert not list(tmp_path.iterdir()), "composing writes nothing"
    assert len(_compose("finetune", "hydra.mode=MULTIRUN", "train.steps=1,2")) == 2


def test_a_wrong_run_of_a_sweep_is_named() -> None:
    assert "adapter.rank needs adapter=lora" in _refusal("finetune", "-m", "adapter=lora,none", "adapter.rank=4")
    assert "data=a,b: data is a section" in _refusal("finetune", "-m", "data=a,b")


def test_the_whole_sweep_is_checked_before_any_of_it_runs() -> None:
    assert "train.steps=0 is out of range" in _refusal("finetune", "-m", "train.steps=1,0")


def _fail(config: FinetuneConfig) -> None:
    pytest.fail("nothing is to run")


def _refuse(config: FinetuneConfig) -> None:
    raise ConfigError("checked")


def test_joined_ranks_have_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(FinetuneConfig, _fail, _refuse)

    def refusal(*given: str) -> str:
        with pytest.raises(ConfigError) as raised:
            recipe.run([*_GIVEN["finetune"], "-m", "train.steps=1,2", *given], "finetune")
        return str(raised.value)

    assert "asks for 2 runs one after the other, but 3 machines (launch.nodes) meet only once" in refusal(
        "launch.nodes=3", "launch.rendezvous=a:1"
    )
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert "torchrun or srun has started cannot go on together after a failed run" in refusal()
    # A batch script of Slurm starts the ranks of each run itself.
    assert refusal("launch.ranks=2") == "checked"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun or srun has started cannot go on together after a failed run" in refusal()


def test_composing_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _compose("finetune", "-m", "train.steps=1,2")
    _compose("finetune")
    assert not list(tmp_path.iterdir())


def test_a_run_is_planned_as_it_was(tmp_path: Path) -> None:
    write_config(_one("finetune", f"run_dir={tmp_path}", "optim=sgd"))
    (job,) = compose_jobs(PlanConfig, [str(tmp_path), "trace=true", "device.memory=1GB"], "plan")
    assert (job.config.run, job.config.trace, type(job.config.optim)) == (str(tmp_path), True, OPTIONS["optim"]["sgd"])
    with pytest.raises(ConfigError, match=r"train\.steps would plan another run"):
        compose_jobs(PlanConfig, [str(tmp_path), "train.steps=3"], "plan")


@dataclass
class _Extended(FinetuneConfig):
    """A recipe's own config: the settings of finetune and one more."""

    extra: int = setting(3, "A setting of its own.", minimum=0)


def test_a_recipe_can_add_settings_of_its_own() -> None:
    (job,) = compose_jobs(_Extended, [*_GIVEN["finetune"], "extra=4", "train.steps=2"], "mine")
    assert type(job.config) is _Extended
    assert (job.config.extra, job.config.train.steps) == (4, 2)
    with pytest.raises(ConfigError, match=r"did you mean extra\?"):
        compose_jobs(_Extended, [*_GIVEN["finetune"], "extr=4"], "mine")
    # The next composition of the plain one does not see it.
    assert type(_one("finetune")) is FinetuneConfig


def test_the_written_config_is_resolved_and_replaces_an_older_one(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    run_dir = tmp_path / "a" / "b"
    for steps in (5, 6):
        write_config(_one("finetune", f"run_dir={run_dir}", f"train.steps={steps}"))
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
    config = _one(command, f"run_dir={tmp_path}", "seed=3", *of_group.get(command, []))
    write_config(config)
    (again,) = compose_jobs(COMMANDS[command], ["--config-dir", str(tmp_path), "--config-name", "config"], "test")
    assert again.config == config
    assert [type(value) for _, _, value in walk(again.config)] == [type(v) for _, _, v in walk(config)]


def test_a_run_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*/file/x cannot be written: Not a directory"):
        write_config(_one("finetune", f"run_dir={tmp_path}/file/x"))


def test_a_run_directory_inside_of_a_run_or_a_checkpoint(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(_one("evaluate", f"run_dir={tmp_path}/run"))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for inside, words in (
        (tmp_path / "run" / "a" / "b", "the directory of another run"),
        (tmp_path / "link" / "a", "the directory of another run"),
        (model / "a", "the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=rf"run_dir={inside} is in {words}.*give a directory outside"):
            refuse_nested(_one("finetune", f"run_dir={inside}"))
    for run_dir in (tmp_path / "run", tmp_path / "other", model):
        refuse_nested(_one("finetune", f"run_dir={run_dir}"))
    monkeypatch.chdir(model)
    refuse_nested(_one("evaluate"))  # its default is in the working directory


def _leaves(config: Any, prefix: str = "") -> set[str]:
    return {name for name, _, _ in walk(config, prefix)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_says_what_it_is(command: str) -> None:
    told = settings_of(COMMANDS[command])
    assert all(s.help for s in told), [s.name for s in told if not s.help]
    used = {name for name in _leaves(_one(command)) if is_used(COMMANDS[command], name)}
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
        config, leaves = _one(command, *given), _leaves(node(), f"{group}.")
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
    assert "at most 1.0; sgd: more than 0.0" in told["optim.momentum"].sentence
    assert "| `objective.beta` | `0.1`; simpo `2.0` | How strongly" in markdown()
    assert "  objective.beta=0.1; simpo 2.0\n" in help_text(FinetuneConfig, "finetune")


def test_the_reference_is_current() -> None:
    file = Path(__file__).parent.parent.parent / "docs" / "config.md"
    assert file.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_root_schemas_are_where_the_commands_are() -> None:
    assert set(_GIVEN) == set(COMMANDS)
    for schema in COMMANDS.values():
        assert dataclasses.is_dataclass(schema)
    assert PlanConfig.ranks_are == "planned"
    assert [command for command in COMMANDS if not COMMANDS[command].writes] == ["doctor"]
    assert FinetuneConfig.ranks_are == "started"
    assert GenerateConfig.ranks_are == "started"
    assert ConvertConfig.ranks_are == "one"


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
