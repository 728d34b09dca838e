"""A token of the hub is in no error, log, config or result."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from fsdp_shard.cli import load_recipe, print_error
from fsdp_shard.config import COMMANDS, compose_jobs, write_config
from fsdp_shard.errors import FsdpShardError
from tests.faults.counts import count
from tests.faults.saves import in_fork
from tests.support.runs import RECIPES


@pytest.mark.parametrize("where", ["environment", "address", "name"])
def test_a_token_is_never_written(
    where: str, tmp_path: Path, tiny_model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_" + "TotallySecretToken"
    monkeypatch.setenv("HF_TOKEN", token if where != "name" else "another")
    path = {"environment": str(tiny_model), "address": f"https://user:{token}@host/org/name", "name": f"org/{token}"}
    said = in_fork(_spend_token, tmp_path, texts, path[where])
    assert token not in said
    assert ("***" in said) == (where != "environment")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert tmp_path / "run" / "config.yaml" in files
    assert not [file for file in files if token.encode() in file.read_bytes()]
    count("token in logs, configs or results")


def _spend_token(place: Path, texts: Path, path: str) -> str:
    """All that a run says: it trains, or is given a source that is none."""
    out = io.StringIO()
    arguments = [f"model.path={path}", f"data.path={texts}/held_out.txt", "train.steps=1", "launch.device=cpu"]
    arguments += ["data.sequence_length=16", f"run_dir={place}/run", f"data.cache_dir={place}/tokens"]
    (job,) = compose_jobs(COMMANDS["finetune"], arguments, "finetune")
    recipe = load_recipe(RECIPES / "finetune.py")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        write_config(job.config)
        try:
            recipe.check(job.config)
            recipe.run_on_rank(job.config)
        except FsdpShardError as error:
            print_error(error, debug=True)
    return out.getvalue()
