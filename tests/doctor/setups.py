"""A run that works, for tests that break it or make it another that works."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.runs import Ended, run_recipe


@dataclass
class Setup:
    """A run that works, to be broken: its files are its own, and `settings` are what doctor is given."""

    root: Path
    model: Path
    data: Path
    monkeypatch: pytest.MonkeyPatch
    undo: ExitStack
    settings: dict[str, str] = field(default_factory=dict)

    def write_rows(self, rows: Sequence[object], name: str = "rows.jsonl") -> None:
        """Train on `rows` instead."""
        path = self.root / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.settings["data.path"] = str(path)

    def edit_config(self, **values: object) -> None:
        """Change values of the model's config.json."""
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def limit(self, kind: int, value: int) -> None:
        """Lower a limit of this process, which doctor inherits, until the test ends."""
        soft, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (value, most))
        self.undo.callback(resource.setrlimit, kind, (soft, most))

    def mount(self, options: str) -> Path:
        """A file system in memory with these options; the test is skipped where that is not allowed."""
        directory = self.root / "mounted"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system needs privileges")
        self.undo.callback(subprocess.run, ["umount", str(directory)], check=True)
        return directory

    def finish_a_run(self, *more: str) -> Path:
        """Train the run to its end."""
        given = [f"{name}={value}" for name, value in self.settings.items()]
        assert run_recipe("finetune", self.root / "run", *given, *more).status == 0
        return self.root / "run"

    def doctor(self) -> Ended:
        settings = {"run_dir": str(self.root / "run"), **self.settings}
        run_dir = Path(settings.pop("run_dir"))
        return run_recipe("doctor", run_dir, *(f"{name}={value}" for name, value in settings.items()))
