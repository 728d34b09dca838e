"""A conversion by fsdp_shard, measured from inside, after the imports: SOURCE TARGET [KEY=VALUE ...].

Prints one line of JSON: seconds, cpu_seconds, grown_bytes (peak memory above that after the imports).
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

from fsdp_shard.checkpoint import convert, open_checkpoint


def resident(field: str) -> int:
    """`VmHWM` (the peak so far) or `VmRSS` of this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main(source: str, target: str, *pairs: str) -> None:
    settings: dict[str, object] = {}
    for pair in pairs:
        key, value = pair.split("=", 1)
        settings[key] = value == "true" if value in ("true", "false") else int(value) if value.isdigit() else value
    if "dtype" in settings:
        import torch  # noqa: F401 (a cast needs it, and its import is none of the conversion)
    before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    if target == "-":
        open_checkpoint(source).close()
    else:
        convert(source, target, **settings)  # type: ignore[arg-type]  # values come from the command line
    found = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "grown_bytes": max(resident("VmHWM") - before, 0),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
