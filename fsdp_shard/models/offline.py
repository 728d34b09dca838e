"""Prevents requests that a model's files cause: transformers downloads the backbone that a config names."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from huggingface_hub import get_session
from huggingface_hub.errors import OfflineModeIsEnabled

_refuses = ContextVar("_refuses", default=False)


@contextmanager
def without_requests(*, unless: bool) -> Iterator[None]:
    """Reject hub requests of this thread as if there were no network; files and the cache can be read.

    Args:
        unless: Change nothing, because the user requested something that may need a download.
    """
    session = get_session()
    if _refuse not in session.event_hooks["request"]:
        session.event_hooks = {**session.event_hooks, "request": [_refuse, *session.event_hooks["request"]]}
    before = _refuses.set(not unless)
    try:
        yield
    finally:
        _refuses.reset(before)


def _refuse(request: Any) -> None:
    if _refuses.get():
        raise OfflineModeIsEnabled(
            f"its files ask for {request.url}, and what a file names is not fetched; give a model that is complete."
        )
