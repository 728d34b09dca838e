"""Addresses of remote stores, such as s3://bucket/run: recognizing and checking them.

Every command imports this module, but `store` only if there is an address.
"""

import os
import re

from fsdp_shard.errors import ConfigError

_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the address of a remote store, not a local path."""
    return _ADDRESS.fullmatch(str(path)) is not None


def check_remote(url: str, name: str) -> None:
    """Raise ConfigError unless `url`, the value of setting `name`, is the address of a directory, without secrets."""
    match = _ADDRESS.fullmatch(url)
    if match is None or not match[2].strip("/"):
        raise ConfigError(f"{name}={url} is not the address of a remote directory, such as s3://bucket/run.")
    if match[1].lower() in _LOCAL:
        raise ConfigError(f"{name}={url} is a local directory: give it as run_dir instead.")
    user, at, _ = match[2].partition("/")[0].rpartition("@")
    if "?" in url or (at and ":" in user):
        raise ConfigError(
            f"{name} {match[1]}://*** has a password or options in it. Leave them out: credentials and endpoint come "
            "from the environment, such as AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."
        )


def refuse_remote(path: str, name: str, instead: str) -> None:
    """Raise ConfigError if `path`, the value of setting `name`, is remote but has to be local; `instead` advises."""
    if is_remote(path):
        raise ConfigError(f"{name}={path} is a remote address, but {name} must be a local path; {instead}")
