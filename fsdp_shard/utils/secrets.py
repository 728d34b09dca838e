"""Redaction of secrets in everything that is written: errors, config.yaml, result.json, trackers."""

import os
import re

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_LOGIN_IN_URL = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@'\"]+@")  # scheme://user:password@host
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_SECRET_SETTING = re.compile(
    r"(^|[._])(tokens?|passwords?|passwd|secrets?|credentials?|api_?key|access_?key)$", re.IGNORECASE
)
_SHORTEST = 8  # a shorter value of a variable is no secret, and could be a part of any word


def redact(text: str) -> str:
    """Replace secrets in `text` by ***: logins in URLs, hub tokens, values of variables such as HF_TOKEN."""
    for name in _VARIABLES:
        if len(value := os.environ.get(name, "")) >= _SHORTEST:
            text = text.replace(value, "***")
    return _HUB_TOKEN.sub("hf_***", _LOGIN_IN_URL.sub(r"\1***@", text))


def redact_setting(name: str, value: str) -> str:
    """Redact the value of the setting `name`; a name such as `hub_token` or `api_key` hides all of it."""
    return "***" if _SECRET_SETTING.search(name) else redact(value)
