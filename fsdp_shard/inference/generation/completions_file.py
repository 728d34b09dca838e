"""The completions file: rows in prompt order, appended one by one, so that a run can be resumed.

`.NAME.settings` in the same directory records the inputs of the rows. A file without it, or with other inputs, is
never modified. Imports no torch.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_shard.errors import DataError
from fsdp_shard.inference.config import GenerateSettings
from fsdp_shard.inference.generation.prompts import Completion, Prompt
from fsdp_shard.utils import check_writable, refuse_remote, write_atomically


class CompletionsFile:
    """Rows of completions at `path`; an incomplete last row is dropped.

    Args:
        path: The .jsonl file, which may exist.
        inputs: The inputs of the rows, as JSON values.

    Attributes:
        path: The file.
        num_rows_before: Complete rows that it held when it was opened.
        num_new_tokens: New tokens of all rows, including those appended so far.

    Raises:
        ConfigError, DataError: The file cannot be written, or holds rows with other inputs.
    """

    def __init__(self, path: Path, inputs: Any) -> None:
        self.path = path
        check_writable(path.parent, f"output={path}")
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            wrong = "it cannot be replaced" if path.is_file() else "it is not a file"
            raise DataError(f"output={path} cannot be written: {wrong}; give another name.")
        self._settings_path = path.with_name(f".{path.name}.settings")
        self._settings = json.dumps(inputs, indent=1, sort_keys=True) + "\n"
        lines = self._read_lines() if path.exists() else []
        self.num_rows_before, self._num_bytes = len(lines), sum(map(len, lines))
        self.num_new_tokens = sum(self._num_tokens(number, line) for number, line in enumerate(lines, start=1))

    def append(self, completions: Iterable[Completion]) -> Iterator[Completion]:
        """Yield each of `completions` once it is a row of the file, so none is lost if a later one fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._settings_path, self._settings)
        with self.path.open("r+b" if self.path.exists() else "xb") as stream:
            stream.truncate(self._num_bytes)
            stream.seek(self._num_bytes)
            for completion in completions:
                row = {name: value for name, value in asdict(completion).items() if value is not None}
                stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                stream.flush()
                self.num_new_tokens += completion.num_new_tokens
                yield completion

    def _num_tokens(self, number: int, line: bytes) -> int:
        try:
            return int(json.loads(line)["num_new_tokens"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"output={self.path}, line {number}, is not a completion; repair it, or delete the file to start again."
            ) from error

    def _read_lines(self) -> list[bytes]:
        if not self._settings_path.exists():
            raise DataError(
                f"output={self.path} exists, and {self._settings_path.name}, which would record what its rows were "
                f"made from, does not; give another name, or delete the file."
            )
        before = self._settings_path.read_text(encoding="utf-8", errors="replace")
        if before != self._settings:
            raise DataError(
                f"output={self.path} holds completions made with other values of "
                f"{_changed_inputs(before, self._settings)}; give another name, or delete the file to start again."
            )
        return [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def open_completions(
    settings: GenerateSettings, run_dir: str | None, prompts: Sequence[Prompt], seed: int
) -> CompletionsFile | None:
    """Open the file in `settings`, or completions.jsonl in `run_dir`, if any; raises as CompletionsFile does."""
    if settings.output is None and run_dir is None:
        return None
    refuse_remote(run_dir or "", "run_dir", "give a local directory.")
    path = Path(settings.output or Path(run_dir or "") / "completions.jsonl").expanduser()
    weights = settings.source.file_states()
    return CompletionsFile(path, completion_inputs(settings, prompts, seed, weights))


def completion_inputs(
    settings: GenerateSettings, prompts: Sequence[Prompt], seed: int, weights: Sequence[tuple[str, int, int]]
) -> dict[str, Any]:
    """The inputs of completions, equal for runs that may share a file. `weights` are `Location.file_states`."""
    asked = [prompt.conversation or prompt.text for prompt in prompts]
    texts = [[one, prompt.adapter] if prompt.adapter else one for one, prompt in zip(asked, prompts, strict=True)]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    of_base = [(name, location.based_on(settings.checkpoint)) for name, location in settings.adapter_sources.items()]
    adapters = {name: [list(file) for file in location.file_states()] for name, location in of_base}
    return {
        "checkpoint": settings.checkpoint,
        "state of the checkpoint": [list(file) for file in weights],
        "prompts": [len(prompts), digest],
        "generation": asdict(settings.generation),
        "seed": seed,
        "chat": settings.chat,
        "dtype": settings.dispatch.dtype,
        "quantize": settings.dispatch.quantize,
        **({"system": settings.system} if settings.system is not None else {}),
        **({"chat_template": settings.template_text or settings.chat_template} if settings.chat_template else {}),
        **({"chat_template_kwargs": settings.template_variables} if settings.template_variables else {}),
        **({"adapters": adapters} if adapters else {}),
    }


def _changed_inputs(before: str, now: str) -> str:
    """Names of the inputs that differ."""
    try:
        old, new = json.loads(before), json.loads(now)
    except (ValueError, RecursionError):
        return "its settings"
    if not isinstance(old, dict):
        return "its settings"
    return " and ".join(name for name in new if old.get(name) != new[name]) or "its settings"
