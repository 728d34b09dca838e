"""Which model an evaluation is of, by the digests of its weights and its config."""

from typing import Any

from fsdp_shard.checkpoint import Location, config_digest, describe_weights


def describe_model(source: Location) -> dict[str, Any]:
    """Return what `describe_weights` does, and the digest of the config that the model is built from."""
    return describe_weights(source) | {"config": config_digest(source.directory)}


def digests(weights: dict[str, Any]) -> list[str]:
    """The digests in what `describe_model` returns: of weights, settings of an adapter, config and base."""
    own = [weights["digest"], *(weights[name] for name in ("adapter", "config") if name in weights)]
    return [*own, *(digests(weights["base"]) if "base" in weights else [])]
