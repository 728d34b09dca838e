"""How slow the processor is at the moment, for limits of processor time."""

from __future__ import annotations

import time

_LOOP_SECONDS, _NUM_OBJECTS = 0.09, 200_000  # on the machine that limits are stated for
_MOST = 4.0  # a limit that grows further limits nothing


def slowdown() -> float:
    """Return how many times as long a loop takes here as on the machine that limits are stated for; 1 to 4.

    Virtual processors are at times three times as slow, in processor time too: their core and its cache also serve
    others. So the loop makes and finds objects, as Python's own work does, more than a cache holds.
    """

    def measure() -> float:
        began = time.process_time()
        objects = {number: str(number) for number in range(_NUM_OBJECTS)}
        for number in range(_NUM_OBJECTS):
            assert objects[number * 7919 % _NUM_OBJECTS]
        return time.process_time() - began

    return min(max(1.0, max(measure() for _ in range(5)) / _LOOP_SECONDS), _MOST)
