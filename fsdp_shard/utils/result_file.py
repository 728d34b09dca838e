"""`RUN_DIR/result.json`: the figures of a run, written last: if it exists, the run has completed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_shard.utils.atomic_write import write_atomically
from fsdp_shard.utils.secrets import redact

RESULT = "result.json"


def write_result(run_dir: str | os.PathLike[str], figures: Mapping[str, Any]) -> Path:
    """Write result.json atomically, with `"status": "completed"`.

    Args:
        run_dir: Directory of the run; made if it does not exist.
        figures: Results of the run; numbers must be finite.

    Returns:
        Path of the file.
    """
    path = Path(run_dir) / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"status": "completed", **figures}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, redact(text))
    return path
