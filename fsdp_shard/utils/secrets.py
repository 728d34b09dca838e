"""Redaction of secrets in everything that is written: errors, config.yaml, result.json, trackers."""

import os
import re

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_LOGIN_IN_URL = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@'\"]+@")  # scheme://user:password@host
_ADDRESS = re.compile(r"(?<=://)[^\s'\"\\<>`]+")  # what follows scheme://, up to what ends it in text, YAML or JSON
_SECRET_PARAMETER = re.compile(r"^(sig|code|pwd)$|signature|token|key|credential|passw|secret|auth", re.IGNORECASE)
_CLOSING = "])},.:"  # behind an address, and no part of it
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_SECRET_SETTING = re.compile(
    r"(^|[._])(tokens?|passwords?|passwd|secrets?|credentials?|api_?key|access_?key)$", re.IGNORECASE
)
_SHORTEST = 8  # a shorter value of a variable is no secret, and could be a part of any word


def redact(text: str) -> str:
    """Replace secrets in `text` by ***: logins and signatures in URLs, hub tokens, variables such as HF_TOKEN."""
    for name in _VARIABLES:
        if len(value := os.environ.get(name, "")) >= _SHORTEST:
            text = text.replace(value, "***")
    text = _ADDRESS.sub(lambda found: _without_signature(found[0]), text)
    return _HUB_TOKEN.sub("hf_***", _LOGIN_IN_URL.sub(r"\1***@", text))


def _without_signature(address: str) -> str:
    """An address whose query has *** for what signs a request, as X-Amz-Signature, sig and access_token do."""
    path, *parts = re.split("([?&;])", address)
    return path + "".join(_without_value(part) for part in parts)


def _without_value(parameter: str) -> str:
    """`sig=***` of `sig=VALUE`, with what stands behind the address; a parameter that is no secret as it is."""
    name, equals, value = parameter.partition("=")
    behind = value[len(value.rstrip(_CLOSING)) :]
    return f"{name}{equals}***{behind}" if value != behind and _SECRET_PARAMETER.search(name) else parameter


def redact_setting(name: str, value: str) -> str:
    """Redact the value of the setting `name`; a name such as `hub_token` or `api_key` hides all of it."""
    return "***" if _SECRET_SETTING.search(name) else redact(value)
