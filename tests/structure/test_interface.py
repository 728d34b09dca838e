"""The Python interface: the names of the package, and that none costs more than it must."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fsdp_shard


@pytest.mark.parametrize("name", fsdp_shard.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(fsdp_shard)
    value = getattr(fsdp_shard, name)
    if name != "__version__":
        assert value.__name__ == name
        assert "Example:" in value.__doc__, "every function of the interface shows its use"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="No fsdp_shard attribute nonsense"):
        fsdp_shard.nonsense  # noqa: B018 - the access is the test


def test_what_moves_bytes_only_loads_no_torch() -> None:
    code = (
        "import sys, fsdp_shard; fsdp_shard.open_checkpoint; fsdp_shard.convert; fsdp_shard.verify\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
