"""A DCP directory that torch wrote, every way it can be wrong, and the message."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


def quietly(save: Callable[[], object]) -> None:
    """Without the warnings of torch's own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save()


def saved(root: Path) -> Path:
    """Two tensors in a DCP directory, as one process of torch saves them."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)}
    quietly(lambda: dcp.save(state, checkpoint_id=root))
    return root


def edit(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """`.metadata` after `change` of what it holds."""

    def apply(root: Path) -> None:
        metadata = pickle.loads((root / ".metadata").read_bytes())
        change(metadata)
        (root / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def storage(metadata: Metadata, **changes: Any) -> None:
    """Say other things of where the tensor `a` lies."""
    key = next(key for key in metadata.storage_data if key.fqn == "a")
    metadata.storage_data[key] = replace(metadata.storage_data[key], **changes)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def drop(metadata: Metadata) -> None:
    """Say of the tensor `a` that it has no pieces."""
    tensor = metadata.state_dict_metadata["a"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.chunks.clear()


def link_outside(root: Path) -> None:
    """The file of the data is a link to one outside of the directory."""
    (root / "__0_0.distcp").rename(root.parent / "outside.distcp")
    (root / "__0_0.distcp").symlink_to(root.parent / "outside.distcp")


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "file missing": (lambda r: (r / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "file cut short": (lambda r: os.truncate(r / "__0_0.distcp", 100), "cut short"),
    "file empty": (lambda r: os.truncate(r / "__0_0.distcp", 0), "cut short"),
    "a linked file": (link_outside, "outside the directory"),
    "metadata cut short": (lambda r: os.truncate(r / ".metadata", 300), ".metadata"),
    "metadata empty": (lambda r: os.truncate(r / ".metadata", 0), ".metadata"),
    "metadata of something else": (lambda r: (r / ".metadata").write_bytes(pickle.dumps([1])), "not the Metadata"),
    "metadata runs code": (
        lambda r: (r / ".metadata").write_bytes(pickle.dumps(Hostile(r.parent / "canary"))),
        "system",
    ),
    "up and out": (edit(lambda m: storage(m, relative_path="../x.distcp")), "outside the directory"),
    "absolute": (edit(lambda m: storage(m, relative_path="/etc/passwd")), "outside the directory"),
    "beyond the file": (edit(lambda m: storage(m, offset=10**9)), "cut short"),
    "at a wrong place": (edit(lambda m: storage(m, offset=1)), "__0_0.distcp"),
    "compressed": (edit(lambda m: storage(m, transform_descriptors=["zstd"])), "without compression"),
    "no place": (edit(lambda m: m.storage_data.clear()), "does not say where"),
    "no places at all": (edit(lambda m: setattr(m, "storage_data", None)), "does not say where"),
    "no pieces": (edit(drop), "not whole"),
    "another shape": (
        edit(lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([3, 3]))),
        "not whole",
    ),
}
