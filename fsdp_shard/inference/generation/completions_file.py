"""The file of completions: rows appended in the order of the prompts, so that a run that was cut short goes on.

Beside it, `.NAME.settings` says what the rows were made of. A file without that, or made of something else, is never
touched. Imports no torch; knows no model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import locate, state_of
from fsdp_shard.errors import DataError
from fsdp_shard.inference.config import GenerateSettings
from fsdp_shard.inference.generation.prompts import Completion, Prompt


class OutputFile:
    """The rows at `path`, made of `ingredients` (a JSON document); `rows` are those that are there already.

    Raises DataError where the file holds rows that were made of something else. A row that was cut off is dropped.
    """

    def __init__(self, path: Path, ingredients: Any) -> None:
        self.path = path
        above = next(parent for parent in path.absolute().parents if parent.exists())
        if not above.is_dir() or path.is_dir():
            wrong, why = (path, "is a directory") if path.is_dir() else (above, "is no directory")
            raise DataError(f"output={path} cannot be written: {wrong} {why}; give another name.")
        self._side = path.with_name(f".{path.name}.settings")
        self._document = json.dumps(ingredients, indent=1, sort_keys=True) + "\n"
        self._lines: list[bytes] = []
        self.rows = self._read_rows() if path.exists() else []

    def append(self, completions: Iterable[Completion]) -> Iterator[Completion]:
        """Pass `completions` on, each once it is a row of the file, so that none is lost when a later one fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._side.with_name(f"{self._side.name}.partial")
        partial.write_text(self._document, encoding="utf-8")
        os.replace(partial, self._side)
        kept = sum(map(len, self._lines))
        with self.path.open("r+b" if self.path.exists() else "xb") as stream:
            stream.truncate(kept)
            stream.seek(kept)
            for completion in completions:
                row = {name: value for name, value in asdict(completion).items() if value is not None}
                stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                stream.flush()
                yield completion

    def _read_rows(self) -> list[dict[str, Any]]:
        if not self._side.exists():
            raise DataError(
                f"output={self.path} is there already, and nothing says what its rows were made of; give another name, "
                "or delete it."
            )
        if self._side.read_text(encoding="utf-8") != self._document:
            changed = _changed(self._side, self._document)
            raise DataError(
                f"output={self.path} holds completions of another {changed}; give another name, or delete it to begin "
                "anew."
            )
        self._lines = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return [json.loads(line) for line in self._lines]


def open_output(settings: GenerateSettings, run_dir: str, prompts: Sequence[Prompt], seed: int) -> OutputFile:
    """The file that `settings` name, or completions.jsonl in `run_dir`, with what it holds already."""
    path = Path(settings.output or Path(run_dir) / "completions.jsonl").expanduser()
    weights = state_of(locate(settings.checkpoint))
    return OutputFile(path, ingredients(settings, [prompt.text for prompt in prompts], seed, weights))


def ingredients(
    settings: GenerateSettings, prompts: Sequence[str], seed: int, weights: Sequence[tuple[str, int, int]]
) -> Any:
    """What completions are made of; two runs with the same may share a file. `weights` as `state_of` has them."""
    digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    return {
        "checkpoint": settings.checkpoint,
        "state of the checkpoint": [list(file) for file in weights],
        "prompts": [len(prompts), digest],
        "generation": asdict(settings.generation),
        "seed": seed,
        "chat": settings.chat,
        "dtype": settings.dispatch.dtype,
        "quantize": settings.dispatch.quantize,
    }


def _changed(side: Path, document: str) -> str:
    """The names of what differs, for people."""
    try:
        before, now = json.loads(side.read_text(encoding="utf-8")), json.loads(document)
    except ValueError:
        return "run"
    return " and ".join(name for name in now if before.get(name) != now[name]) or "run"
