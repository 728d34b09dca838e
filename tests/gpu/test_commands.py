"""The commands as a user gives them, on the GPU: look before training, train with a profile, generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.child import Bench, apart
from tests.gpu.models import written

check = pytest.mark.check
_ROOT = Path(__file__).resolve().parent.parent.parent


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp_shard", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


@check(seconds=200, concurrent="all")
def test_commands_run(bench: Bench) -> None:
    if not all(bench.has("commands", package) for package in ("hydra", "omegaconf", "datasets", "pyarrow", "pandas")):
        return
    kind, run_dir = bench.device.type, bench.directory / "run"
    path = apart(written, bench.directory, "100M", 4, bench.device.torch_device)
    text = bench.directory / "text.txt"
    text.write_text((_ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")[:30_000], encoding="utf-8")
    training = [
        f"model.path={path}",
        f"data.path={text}",
        f"data.cache_dir={bench.directory}/tokens",
        f"data.sequence_length={bench.size(512, 32)}",
        f"launch.device={kind}",
        f"run_dir={run_dir}",
    ]
    commands = {
        "doctor": ["doctor", *training],
        "finetune": ["finetune", *training, "train.steps=4", "checkpoint.every=2", "train.profile=[3]"],
        "generate": ["generate", f"checkpoint={run_dir}", "prompt=A rank", "generation.max_new_tokens=8"],
    }
    failed = []
    for name in ["finetune", "generate"] if bench.size(0, 1) else commands:
        ended = _run(*commands[name])
        if ended.returncode:
            failed.append(f"{name}: {ended.stderr[-300:] or ended.stdout[-300:]}")
    bench.record("commands that fail", len(failed), "", at_most=0, note="; ".join(failed), exact=True)
    pages = list((run_dir / "profile").glob("*-memory.html"))
    bench.record("pages of the GPU's memory in the profile", len(pages), "", at_least=1)
