"""Write requests to the Hugging Face hub, with waits that the hub requests and one-sentence errors.

Only pushing makes such requests. huggingface_hub is imported with the first one.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from fsdp_shard.errors import ConfigError, FsdpShardError, RemoteError, one_line
from fsdp_shard.utils import first_line, redact, say

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")

_ATTEMPTS = 4  # for a request that the hub answers with 429
_LONGEST_WAIT, _FIRST_WAIT = 300, 5  # seconds; the first is doubled at each attempt if the hub names no time
_RESET = re.compile(r"\bt=(\d{1,9})\b", re.ASCII)  # of the header RateLimit, as in "api";r=0;t=12
_LONGEST_REASON = 300
_RETRIED_BY_LIBRARY = ("/preupload/", "/objects/batch")
_CAUSES = {
    400: "the hub does not take what was sent",
    401: "the hub does not accept the token; log in again with `hf auth login`, or set HF_TOKEN to one that may write",
    403: "the token may not write there; give a repository of your own or of an organization that you belong to, or a "
    "token with the permission to write",
    404: "there is no such repository or branch, or the token may not see it",
    409: "somebody else creates or changes it at the same time",
    412: "somebody else has changed it in the meantime",
    413: "a file is larger than the hub takes",
    429: f"the hub still asks for fewer requests after {_ATTEMPTS} attempts or more; wait some minutes",
    507: "there is no space left in that account",
}


def require_hub() -> None:
    """Raise ConfigError if huggingface_hub may not make requests, or has no write token."""
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        raise ConfigError(
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, which forbids every request to the hub; unset it to push."
        )
    if get_token() is None:
        raise ConfigError(
            "There is no token for the hub: log in with `hf auth login`, or set HF_TOKEN to a token that may write."
        )


def request(what: str, call: Callable[[], T]) -> T:
    """Make a request, and retry it if the hub asks to wait (HTTP 429, for the time in RateLimit or Retry-After).

    Args:
        what: Description of its failure, such as `org/name could not be written`.
        call: Makes the request through huggingface_hub.

    Raises:
        RemoteError: The hub rejects the request or fails, or the connection fails.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except FsdpShardError:
            raise
        except Exception as error:  # large uploads raise errors of several libraries
            seconds = None if attempt == _ATTEMPTS else _asked_wait(error, attempt)
            if seconds is None:
                raise _remote_error(what, error) from error
            say(
                f"the hub asks for fewer requests (HTTP 429): waiting {seconds} s, attempt {attempt} of {_ATTEMPTS}",
                sys.stderr,
            )
            time.sleep(seconds)
    raise AssertionError("the last attempt returns or raises")


def _asked_wait(error: BaseException, attempt: int) -> int | None:
    """Seconds to wait before the next attempt; None for no further attempt."""
    answer = _answer(error)
    if answer is None or answer.response.status_code != 429:
        return None
    path = urlsplit(str(answer.response.url)).path
    if answer.response.request.method == "PUT" or any(part in path for part in _RETRIED_BY_LIBRARY):
        return None  # huggingface_hub has made several attempts
    seconds = _retry_after(answer)
    if seconds is None:
        seconds = _FIRST_WAIT * 2 ** (attempt - 1)
    return seconds if seconds <= _LONGEST_WAIT else None


def _retry_after(answer: HfHubHTTPError) -> int | None:
    """Seconds after which the hub accepts requests again; None if unknown."""
    headers = answer.response.headers
    if (reset := _RESET.search(headers.get("RateLimit", ""))) is not None:
        return int(reset[1]) + 1  # the value is rounded
    given = headers.get("Retry-After", "").strip()
    return int(given) if given.isdecimal() and given.isascii() and len(given) < 10 else None


def _remote_error(what: str, error: Exception) -> RemoteError:
    answer = _answer(error)
    if answer is None:
        last = list(_chain(error))[-1]
        reason = one_line(first_line(last), _LONGEST_REASON).rstrip(".")
        cause = "the connection to the hub failed" if _is_network(error) else "the upload failed"
        return RemoteError(redact(f"{what}: {cause} ({type(last).__name__}: {reason})."))
    status = answer.response.status_code
    cause = _CAUSES.get(status, "the hub fails" if status >= 500 else "the hub refuses that")
    if status == 429 and (seconds := _retry_after(answer) or 0) > _LONGEST_WAIT:
        cause = f"the hub asks to wait {seconds} s, which is too long to wait for"
    words = next((text for one in _chain(error) if (text := getattr(one, "server_message", None))), "")
    said = one_line(words.strip().partition("\n")[0], _LONGEST_REASON).rstrip(".")
    return RemoteError(redact(f"{what}: {cause} (HTTP {status}{f': {said}' if said else ''})."))


def _answer(error: BaseException) -> HfHubHTTPError | None:
    """The hub's answer among the causes of an error, if any."""
    from huggingface_hub.errors import HfHubHTTPError

    return next((one for one in _chain(error) if isinstance(one, HfHubHTTPError)), None)


def _is_network(error: BaseException) -> bool:
    """Whether an error comes from the connection, not from files on this machine."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx, from 2.0 on of httpx2

    kinds = (HTTPError, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
    return any(isinstance(one, kinds) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
