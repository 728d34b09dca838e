"""What a case of the corpus is."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.faults.corpus


@dataclass(frozen=True)
class Case:
    """A checkpoint that is damaged or hostile, or one that only looks so.

    Attributes:
        name: What is wrong with it, in a few words; its own in its file.
        build: Makes it at a path that does not exist yet, below an empty directory of the case; may return the path
            that commands are given instead. What it returns otherwise is ignored.
        expect: `error` if no command may believe it, `accepted` if all must do with it what they do with any other,
            `any` if both are right.
        damages: What is wrong: `headers` (default; whatever describes the tensors), `values` (bytes of tensors),
            `storages` (bytes that a file has a CRC of), `weights` (tensors that are not those of the model),
            `config`, `tokenizer`, `chat` (the template), `training` (trainer.json, metrics), `adapter`, `links` (files
            that are links), `sealed` (files other than in the manifest). Commands that do not read it may succeed;
            `commands.READERS` has those that must not.
    """

    name: str
    build: Callable[[Path], Any]
    expect: str = "error"
    damages: str = "headers"


def subjects() -> list[str]:
    """The files of the corpus that have cases."""
    names = [module.name for module in pkgutil.iter_modules(tests.faults.corpus.__path__)]
    return sorted(name for name in names if hasattr(_module(name), "CASES"))


def cases(subject: str) -> dict[str, Case]:
    """The cases of a file of the corpus, by name."""
    found: list[Case] = list(_module(subject).CASES)
    assert len({case.name for case in found}) == len(found), f"two cases of {subject} have one name"
    return {case.name: case for case in found}


def all_cases() -> Iterator[tuple[str, Case]]:
    """(subject, case) of the whole corpus."""
    for subject in subjects():
        for case in cases(subject).values():
            yield subject, case


def _module(name: str) -> Any:
    return importlib.import_module(f"tests.faults.corpus.{name}")
