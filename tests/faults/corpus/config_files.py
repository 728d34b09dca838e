"""config.json and generation_config.json: fields of the wrong type, numbers beyond all, nesting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case


def config(**changes: Any) -> Callable[[Path], object]:
    def apply(root: Path) -> None:
        document = json.loads((root / "config.json").read_text())
        (root / "config.json").write_text(json.dumps(document | changes))

    return apply


CASES = [
    Case("hidden_size is a text", damaged("model", config(hidden_size="many")), damages="config"),
    Case("hidden_size is a list", damaged("model", config(hidden_size=[36])), damages="config"),
    Case("an unknown key", damaged("model", config(comment="no harm")), expect="accepted", damages="config"),
]
