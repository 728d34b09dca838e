"""The table at the end of a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import CHECKPOINTS, MANIFEST, RUN_CONFIG, StepStore
from fsdp_shard.cli.sweep_table import refuse_other_sweep, refuse_shared, sweep_table
from fsdp_shard.config import (
    ConvertConfig,
    EvaluateConfig,
    FinetuneConfig,
    GenerateConfig,
    Job,
    RunConfig,
    compose_jobs,
)
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import write_result


def test_a_row_has_what_differs_and_the_figures(tmp_path: Path) -> None:
    given = ["-m", 'checkpoint="a, b","c"', "dispatch.dtype=keep,float32", "data.path=d", f"run_dir={tmp_path}"]
    jobs = compose_jobs(EvaluateConfig, given, "evaluate")
    for number in range(3):
        write_result(tmp_path / str(number), {"perplexity": 12.34567 + number, "seconds": 3.0})
    rows = [re.split(r" {2,}", line.strip()) for line in sweep_table(jobs, {f"{tmp_path}/3"}).splitlines()]
    assert rows == [
        ["run", "checkpoint", "dispatch.dtype", "perplexity", "seconds", "status", "run_dir"],
        ["0", "a, b", "keep", "12.35", "3", "done", f"{tmp_path}/0"],
        ["1", "a, b", "float32", "13.35", "3", "done", f"{tmp_path}/1"],
        ["2", "c", "keep", "14.35", "3", "done", f"{tmp_path}/2"],
        ["3", "c", "float32", "-", "-", "failed", f"{tmp_path}/3"],
    ]


def test_a_setting_that_is_null_is_shown_as_it_is_given(tmp_path: Path) -> None:
    given = ["-m", "model.path=m", "data.path=d", "train.max_grad_norm=null,1", f"run_dir={tmp_path}"]
    jobs = compose_jobs(FinetuneConfig, given, "finetune")
    rows = [line.split() for line in sweep_table(jobs, set()).splitlines()]
    assert [row[:2] for row in rows] == [["run", "train.max_grad_norm"], ["0", "null"], ["1", "1.0"]]


def test_a_run_of_another_sweep_is_not_continued(tmp_path: Path) -> None:
    def jobs(rates: str, steps: int) -> list[Job[FinetuneConfig]]:
        given = ["-m", "model.path=m", "data.path=d", f"run_dir={tmp_path}", f"train.steps={steps}"]
        return compose_jobs(FinetuneConfig, [*given, f"optim.lr={rates}"], "finetune")

    for job in (first := jobs("0.1,0.01", 2)):
        step = StepStore(Path(job.config.run_dir) / CHECKPOINTS).path(2)
        step.mkdir(parents=True)
        (step / MANIFEST).touch()
        (step / RUN_CONFIG).write_text(job.config.to_yaml())
    refuse_other_sweep(first)  # goes on
    with pytest.raises(ConfigError, match=r"^Run 1 .*/1, whose settings were others \(optim.lr 0.01 -> 1.0\)"):
        refuse_other_sweep(jobs("0.1,1", 4))


@pytest.mark.parametrize(
    ("schema", "given", "said"),
    [
        (
            FinetuneConfig,
            "model.path=m data.path=d optim.lr=0.1,0.2 checkpoint.remote=s3://b/run",
            r"^checkpoint.remote=s3://b/run is that of 2 runs .* each with another checkpoint\.remote\.$",
        ),
        (
            ConvertConfig,
            'source=m target="a","./a/","b" dtype=float32,bfloat16 overwrite=true',
            r"^target=a is that of 4 runs ",
        ),
        (
            GenerateConfig,
            "checkpoint=m prompt=p output=o.jsonl generation.max_new_tokens=2,3",
            r"^output=o.jsonl is that of 2 ",
        ),
    ],
)
def test_runs_that_write_to_one_place_are_refused(
    tmp_path: Path, schema: type[RunConfig], given: str, said: str
) -> None:
    jobs = compose_jobs(schema, ["-m", *given.split(), f"run_dir={tmp_path}"], schema.command)
    with pytest.raises(ConfigError, match=said):
        refuse_shared(jobs)


def test_runs_that_write_to_places_of_their_own_are_a_sweep(tmp_path: Path) -> None:
    given = ["-m", "model.path=m", "data.path=d", f"run_dir={tmp_path}", 'checkpoint.remote="s3://b/0","s3://b/1"']
    refuse_shared(compose_jobs(FinetuneConfig, given, "finetune"))
