"""The table at the end of a sweep."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp_shard.cli.sweep_table import sweep_table
from fsdp_shard.config import EvaluateConfig, compose_jobs
from fsdp_shard.utils import write_result


def test_a_row_has_what_differs_and_the_figures(tmp_path: Path) -> None:
    given = ["-m", 'checkpoint="a, b","c"', "dispatch.dtype=keep,float32", "data.path=d", f"run_dir={tmp_path}"]
    jobs = compose_jobs(EvaluateConfig, given, "evaluate")
    for number in range(3):
        write_result(tmp_path / str(number), {"perplexity": 12.34567 + number, "seconds": 3.0})
    rows = [re.split(r" {2,}", line.strip()) for line in sweep_table(jobs, {f"{tmp_path}/3"}).splitlines()]
    assert rows == [
        ["run", "checkpoint", "dispatch.dtype", "perplexity", "seconds", "status", "run_dir"],
        ["1", "a, b", "keep", "12.35", "3", "done", f"{tmp_path}/0"],
        ["2", "a, b", "float32", "13.35", "3", "done", f"{tmp_path}/1"],
        ["3", "c", "keep", "14.35", "3", "done", f"{tmp_path}/2"],
        ["4", "c", "float32", "-", "-", "failed", f"{tmp_path}/3"],
    ]
