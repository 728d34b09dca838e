"""One safetensors file, several with an index, and rank files: headers, offsets, names. Those of tests/checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint import malformed_files
from tests.faults.corpus import bases
from tests.faults.corpus.case import Case

_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def with_model_files(make: Callable[[Path], Path], damage: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A case of tests/checkpoint: `make` returns the file that `damage` is given; config and tokenizer come with it."""

    def build(root: Path) -> None:
        path = make(root)
        sound = bases.copy("model", root.parent.parent / "sound")
        for file in _MODEL_FILES:
            shutil.copyfile(sound / file, root / file)
        damage(path)

    return build


CASES = [Case(name, with_model_files(make, damage)) for name, (make, damage, _) in malformed_files.CASES.items()]
