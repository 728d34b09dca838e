from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

from fsdp_shard.checkpoint import digests
from fsdp_shard.checkpoint.digests import (
    CHUNK_BYTES,
    chunk_digest,
    complete_chunk_digests,
    read_chunk_digests,
    tensor_digest,
)
from fsdp_shard.checkpoint.integrity.content_digest import config_digest
from fsdp_shard.checkpoint.location import open_checkpoint
from tests.checkpoint.files import random_tensor, raw_bytes, write_huggingface


def test_the_digest_is_what_is_documented(tmp_path: Path) -> None:
    tensor = random_tensor((3, 200_001), torch.float32)
    data = raw_bytes(tensor)
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    assert len(chunks) == 3
    tree = b"F32 3,200001\0" + b"".join(xxhash.xxh3_128(chunk).digest() for chunk in chunks)
    with open_checkpoint(write_huggingface(tmp_path, {"w": tensor})) as index:
        found = tensor_digest("F32", (3, 200_001), list(read_chunk_digests(index, "w")))
    assert found == xxhash.xxh3_128(tree).hexdigest()


def test_dtype_and_shape_are_part_of_the_digest() -> None:
    chunk = [chunk_digest(bytes(24))]
    found = {
        tensor_digest("F32", (2, 3), chunk),
        tensor_digest("F32", (3, 2), chunk),
        tensor_digest("I32", (2, 3), chunk),
    }
    assert len(found) == 3


@given(st.data())
def test_chunks_hashed_in_parts_make_up_the_whole(data: st.DataObject) -> None:
    content = bytes(range(256)) * 2
    content = content[: data.draw(st.integers(0, len(content)))]
    size = len(content)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=3))), size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CHUNK_BYTES", 100)
        expected = {at // 100: chunk_digest(content[at : at + 100]) for at in range(0, size, 100)}
        for start, stop in itertools.pairwise(cuts):
            complete = {n: d for n, d in expected.items() if start <= n * 100 and min(n * 100 + 100, size) <= stop}
            assert complete_chunk_digests(memoryview(content)[start:stop], start, size) == complete


def test_the_digest_of_a_config_covers_the_code_that_it_names(tmp_path: Path) -> None:
    """What earlier runs computed with a model is kept by it."""
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_own.Own"}}')
    found = []
    for scale in (1, 3, 1):
        (tmp_path / "modeling_own.py").write_text(f"SCALE = {scale}\n")
        found.append(config_digest(tmp_path))
    assert found[0] == found[2] != found[1]
    (tmp_path / "config.json").write_text("{}")
    plain = config_digest(tmp_path)
    (tmp_path / "modeling_own.py").unlink()
    assert config_digest(tmp_path) == plain
