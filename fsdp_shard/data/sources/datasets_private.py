"""The private name of `datasets` that is used, and a context that silences the package."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def fingerprint(dataset: Any) -> str:
    """Identity of the rows of a `datasets.Dataset`, which also names its cache files; it has no public name."""
    return str(dataset._fingerprint)


_LOCK = threading.RLock()  # streams are read in threads


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the log of `datasets` (we report its errors), and show progress bars only on a terminal."""
    import datasets

    with _LOCK:
        verbosity = datasets.logging.get_verbosity()
        hides_bars = not datasets.are_progress_bars_disabled() and not sys.stderr.isatty()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        if hides_bars:
            datasets.disable_progress_bars()
        try:
            yield
        finally:
            datasets.logging.set_verbosity(verbosity)
            if hides_bars:
                datasets.enable_progress_bars()
