"""Keeps secrets out of what is written: errors, config.yaml, result.json. Imports nothing of the package."""

from __future__ import annotations

import os
import re

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_IN_ADDRESS = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@'\"]+@")  # scheme://user:password@host
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_SHORTEST = 8  # a shorter value of a variable is no secret, and could be a part of any word


def redact(text: str) -> str:
    """`text` with *** for passwords in addresses, tokens of the hub, and the values of variables that hold secrets."""
    for name in _VARIABLES:
        if len(value := os.environ.get(name, "")) >= _SHORTEST:
            text = text.replace(value, "***")
    return _HUB_TOKEN.sub("hf_***", _IN_ADDRESS.sub(r"\1***@", text))
