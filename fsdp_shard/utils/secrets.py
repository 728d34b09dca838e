"""Redacts secrets in all output: errors, config.yaml, result.json, trackers."""

import os
import re

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_LOGIN_IN_URL = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@'\"]+@")  # scheme://user:password@host
_ADDRESS = re.compile(r"(?<=://)[^\s'\"\\<>`]+")  # the part after scheme://, up to its end in text, YAML or JSON
_SECRET_PARAMETER = re.compile(r"^(sig|code|pwd)$|signature|token|key|credential|passw|secret|auth", re.IGNORECASE)
_CLOSING = "])},.:"  # may follow an address, but are not part of it
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_SECRET_SETTING = re.compile(
    r"(^|[._])(tokens?|passwords?|passwd|secrets?|credentials?|api_?key|access_?key)$", re.IGNORECASE
)
_SHORTEST = 8  # shorter values of variables are not secrets, and could be part of any word


def redact(text: str) -> str:
    """Replace secrets in `text` with ***: logins and signatures in URLs, hub tokens, variables such as HF_TOKEN."""
    for name in _VARIABLES:
        if len(value := os.environ.get(name, "")) >= _SHORTEST:
            text = text.replace(value, "***")
    text = _ADDRESS.sub(lambda found: _without_signature(found[0]), text)
    return _HUB_TOKEN.sub("hf_***", _LOGIN_IN_URL.sub(r"\1***@", text))


def _without_signature(address: str) -> str:
    """Replace signatures in an address's query with ***, such as X-Amz-Signature, sig and access_token."""
    path, *parts = re.split("([?&;])", address)
    return path + "".join(_without_value(part) for part in parts)


def _without_value(parameter: str) -> str:
    """Turn `sig=VALUE` into `sig=***`, keeping text after the address; other parameters are unchanged."""
    name, equals, value = parameter.partition("=")
    behind = value[len(value.rstrip(_CLOSING)) :]
    return f"{name}{equals}***{behind}" if value != behind and _SECRET_PARAMETER.search(name) else parameter


def redact_setting(name: str, value: str) -> str:
    """Redact the value of the setting `name`; for a name such as `hub_token` or `api_key`, all of it."""
    return "***" if _SECRET_SETTING.search(name) else redact(value)
