"""fsdp-shard: fine-tune Hugging Face models under FSDP, keep their checkpoints, run inference from them.

The names below are the Python interface. Each is imported when it is first used, so that `import fsdp_shard` alone
loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fsdp_shard.blocks import no_split_blocks as no_split_blocks
    from fsdp_shard.checkpoint.checks.verify import verify as verify
    from fsdp_shard.checkpoint.convert import convert as convert
    from fsdp_shard.checkpoint.index import open_checkpoint as open_checkpoint
    from fsdp_shard.inference.dispatch import load_dispatched as load_dispatched
    from fsdp_shard.sharding.wrappers import shard as shard

# Public name -> the module that has it.
_HOMES = {
    "open_checkpoint": "fsdp_shard.checkpoint.index",
    "convert": "fsdp_shard.checkpoint.convert",
    "verify": "fsdp_shard.checkpoint.checks.verify",
    "load_dispatched": "fsdp_shard.inference.dispatch",
    "no_split_blocks": "fsdp_shard.blocks",
    "shard": "fsdp_shard.sharding.wrappers",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
