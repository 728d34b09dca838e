"""What a trace of torch's profiler says of a step: how often the host waited for the GPU, and when that was idle."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WAITS = re.compile(
    r"cuda(Stream|Device|Event)Synchronize$|cu(Stream|Ctx|Event)Synchronize$|cudaMemcpy$|hipStreamSynchronize$"
)
_CALLS = ("cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        num_waits: Calls in which the host waited for the GPU.
        idle: The part of the time between the first and the last kernel in which no kernel ran, from 0 to 1; None
            without kernels.
        waits: The names of the operators around these calls, and how often, most often first.
    """

    num_waits: int
    idle: float | None
    waits: dict[str, int]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, which may be compressed."""
    content = path.read_bytes()
    return list(json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"])


def summarize(events: Iterable[dict[str, Any]]) -> Steps:
    """Count the waits and the idle time of all events."""
    timed = [event for event in events if event.get("ph") == "X"]
    operators = [event for event in timed if event.get("cat") == "cpu_op"]
    last = max((op["ts"] + op["dur"] for op in operators), default=0.0)  # the profiler itself waits after that
    waits = [event for event in timed if _WAITS.search(event["name"]) and event.get("cat") in _CALLS]
    waits = [wait for wait in waits if wait["ts"] <= last]
    busy = sorted((event["ts"], event["ts"] + event["dur"]) for event in timed if event.get("cat") in _ON_GPU)
    found: dict[str, int] = {}
    for wait in waits:
        around = [op for op in operators if op["tid"] == wait["tid"] and _is_inside(wait, op)]
        name = min(around, key=lambda op: op["dur"])["name"] if around else wait["name"]
        found[name] = found.get(name, 0) + 1
    return Steps(len(waits), _idle(busy), dict(sorted(found.items(), key=lambda item: -item[1])))


def _is_inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"])


def _idle(busy: list[tuple[float, float]]) -> float | None:
    if not busy:
        return None
    free, end = 0.0, busy[0][0]
    for start, stop in busy:
        free += max(start - end, 0.0)
        end = max(end, stop)
    return free / (end - busy[0][0])
