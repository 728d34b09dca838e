"""`RUN_DIR/result.json`: the figures of a run, written last, so that its being there means that the run completed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_shard.utils.secrets import redact

RESULT = "result.json"


def write_result(run_dir: str | os.PathLike[str], figures: Mapping[str, Any]) -> Path:
    """Write `figures` with `"status": "completed"` in one step; returns the path. Figures must be finite."""
    path = Path(run_dir) / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"status": "completed", **figures}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{RESULT}.partial")
    partial.write_text(redact(text), encoding="utf-8")
    os.replace(partial, path)
    return path
