"""The private name of `datasets` that the package uses; CONTRIBUTING.md says where it would break."""

from typing import Any


def fingerprint(dataset: Any) -> str:
    """Identity of the rows of a `datasets.Dataset`, which also names its cache files; it has no public name."""
    return str(dataset._fingerprint)
