"""The table at the end of a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import CHECKPOINTS, MANIFEST, RUN_CONFIG, Store
from fsdp_shard.cli.sweep_table import refuse_other_sweep, sweep_table
from fsdp_shard.config import EvaluateConfig, FinetuneConfig, Job, compose_jobs
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


def test_a_run_of_another_sweep_is_not_continued(tmp_path: Path) -> None:
    def jobs(rates: str, steps: int) -> list[Job[FinetuneConfig]]:
        given = ["-m", "model.path=m", "data.path=d", f"run_dir={tmp_path}", f"train.steps={steps}"]
        return compose_jobs(FinetuneConfig, [*given, f"optim.lr={rates}"], "finetune")

    for job in (first := jobs("0.1,0.01", 2)):
        step = Store(Path(job.config.run_dir) / CHECKPOINTS).path(2)
        step.mkdir(parents=True)
        (step / MANIFEST).touch()
        (step / RUN_CONFIG).write_text(job.config.to_yaml())
    refuse_other_sweep(first)  # goes on
    with pytest.raises(ConfigError, match=r"^Run 1 .*/1, whose settings were others \(optim.lr 0.01 -> 1.0\)"):
        refuse_other_sweep(jobs("0.1,1", 4))
