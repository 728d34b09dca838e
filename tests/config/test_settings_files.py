"""Settings in files: presets of a user's own, and whole files given as the first argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.config import FinetuneConfig, GenerateConfig
from fsdp_shard.config.compose import compose_jobs
from fsdp_shard.config.config_file import write_config
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import Fsdp1Config
from tests.config.composed import GIVEN, one, refusal


def test_a_wrong_key_in_a_preset_of_the_user_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  stepz: 3\n")
    said = refusal("finetune", "--config-dir", str(tmp_path), "experiment=mine")
    assert "experiment/mine" in said
    assert "train.stepz is not a setting of finetune (did you mean train.steps?)" in said


def test_files_of_the_user_that_lack_what_hydra_needs_are_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("experiment/mine", "mine"):
        (tmp_path / f"{name}.yaml").write_text("train:\n  steps: 3\n")
    said = refusal("finetune", f"--config-dir={tmp_path}", "experiment=mine")
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
    assert f"{file}: {said}" in refusal(*given)
    quoted = "launch: {nodes: '2:4', rendezvous: 'a:1'}\noptim: {lr: 1e-5}\nshard: {blocks: [a, 'no']}\n"
    file.write_text(f"# @package _global_\n{quoted}")
    config = one(*given)
    assert (config.launch.nodes, config.shard.blocks, config.optim.lr) == ("2:4", ["a", "no"], 1e-5)


def test_presets_of_the_user_go_before_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "small_cpu.yaml").write_text("# @package _global_\ntrain:\n  steps: 61\n")
    for flag in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        assert one("finetune", *flag, "experiment=small_cpu").train.steps == 61
    assert one("finetune", "experiment=small_cpu").train.steps == 60


_OWN = "# Mine\nmodel: {path: a}\ndata.path: b\nadapter: lora\nadapter.rank: 4\ntrain:\n  steps: 61\n"
_OWN_PRESET = "# @package _global_\ndefaults:\n  - override /adapter: lora\n  - _self_\nadapter: {rank: 4}\n"


@pytest.mark.long
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
    (job,) = compose_jobs(FinetuneConfig, [preset, *GIVEN["finetune"]], "finetune")
    config = job.config
    assert (config.adapter.rank, config.model.path) == (4, "org/name")
    write_config(one("finetune", f"run_dir={directory}", "seed=3", "shard=fsdp1"))
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
        compose_jobs(FinetuneConfig, [str(file), *GIVEN["finetune"]], "finetune")
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
    found: Any = compose_jobs(FinetuneConfig, [str(file), *GIVEN["finetune"], "data.kind=pairs"], "finetune")[0].config
    assert (found.train.sample_prompts, found.data.source_format) == (["a", text], f"{text} {{source}}")
    file.write_text(found.to_yaml())
    assert compose_jobs(FinetuneConfig, [str(file)], "finetune")[0].config == found


def test_other_settings_in_a_file_of_ones_own_may_name_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    (tmp_path / "mine.yaml").write_text("run_dir: runs/${oc.env:WHO}-${seed}\n")
    (job,) = compose_jobs(FinetuneConfig, [str(tmp_path / "mine.yaml"), *GIVEN["finetune"]], "finetune")
    assert job.config.run_dir == "runs/me-0"


def test_one_file_of_ones_own_comes_first() -> None:
    assert "b.yaml is not of the form name=value; one file of settings is read" in refusal("finetune", "b.yaml")
    with pytest.raises(ConfigError, match="both name a config"):
        compose_jobs(FinetuneConfig, ["a.yaml", "--config-name=b"], "finetune")


def test_the_home_directory_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert one("finetune", "run_dir=~/one").run_dir == f"{tmp_path}/one"
    assert "run_dir=s3://bucket/one is a remote address" in refusal("finetune", "run_dir=s3://bucket/one")
