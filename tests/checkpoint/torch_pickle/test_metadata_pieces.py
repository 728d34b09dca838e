"""Pieces of a `.metadata` that are read as a whole, against torch's own reading and the machine without shortcuts."""

import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_shard.checkpoint.torch_pickle import allow_list
from fsdp_shard.checkpoint.torch_pickle.metadata_pieces import SHORTCUTS
from fsdp_shard.checkpoint.torch_pickle.unpickler import Calls, Machine
from fsdp_shard.errors import CheckpointError

RANKS = 3
SHAPES = {"w": (9, 4), "b": (300,), "e": (3, 2, 70_000), "huge": (6_000_000_000, 4), "flags": (3, 1, 1, 2)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The `.metadata` that torch's planner and writer make of what three ranks send; no tensor has data."""
    folder = tmp_path_factory.mktemp("dcp")
    planned, metadata = create_default_global_save_plan([_sent(_plan(rank)) for rank in range(RANKS)])
    metadata.planner_data = {name: ("model", name) for name in SHAPES}
    results = [_sent(_results(rank, _sent(plan))) for rank, plan in enumerate(planned)]
    FileSystemWriter(folder, sync_files=False).finish(metadata, results)
    return Path(folder, ".metadata").read_bytes()


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _plan(rank: int) -> SavePlan:
    items = []
    for name, shape in SHAPES.items():
        rows = shape[0] // RANKS
        offsets = torch.Size([rank * rows, *[0] * (len(shape) - 1)])
        chunk = ChunkStorageMetadata(offsets, torch.Size([rows, *shape[1:]]))
        data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(f"model.{name}", chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _results(rank: int, plan: SavePlan) -> list[WriteResult]:
    file = f"__{rank}_0.distcp"
    return [
        WriteResult(item.index, 200, _StorageInfo(file, number * 3_000_000_000, 70_000 + number))
        for number, item in enumerate(plan.items)
    ]


def _read(data: bytes, shortcuts: bool) -> str:
    """All of what a machine reads without addresses, or its error."""
    try:
        read = repr(Machine(data, 0, allow_list._NAMES, None, SHORTCUTS if shortcuts else {}).run())
        return re.sub("0x[0-9a-f]+", "", read)
    except CheckpointError as error:
        return str(error)


def test_pieces_are_as_torch_reads_them(written: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    by_machine: list[str] = []
    build = Calls.build

    def counting(calls: Calls, target: Any, state: Any) -> None:
        by_machine.append(type(target).__name__)
        build(calls, target, state)

    monkeypatch.setattr(Calls, "build", counting)
    ours, plain = allow_list.load(written, "file"), pickle.loads(written)
    for name, tensor in plain.state_dict_metadata.items():
        read = ours.state_dict_metadata[name]
        assert [(one.offsets, one.sizes) for one in read.chunks] == [
            (tuple(one.offsets), tuple(one.sizes)) for one in tensor.chunks
        ]
    assert {(key.fqn, key.offset, key.index): vars(info) for key, info in ours.storage_data.items()} == {
        (key.fqn, tuple(key.offset), key.index): {"transform_descriptors": None, **vars(info)}
        for key, info in plain.storage_data.items()
    }
    # The first of all spells out names, the first of a rank its file; those of four dimensions are rare.
    assert by_machine.count("ChunkStorageMetadata") == 1 + RANKS < RANKS * len(SHAPES)
    assert by_machine.count("StorageInfo") == RANKS + RANKS < RANKS * len(SHAPES)


@pytest.mark.long
def test_what_differs_by_a_byte_is_read_as_by_the_machine(written: bytes) -> None:
    bytes_of = random.Random(0)
    for position in range(0, len(written), 2):
        damaged = bytearray(written)
        damaged[position] = bytes_of.choice(b"\x00\x01(.KMJ\x8a\x8c\x94\x85\x86huqrb0]}\xff")
        assert _read(bytes(damaged), True) == _read(bytes(damaged), False), position


def test_what_pieces_memoize_can_be_recalled(written: bytes) -> None:
    number, recalled = 0, ""
    while "not in its memo" not in recalled:
        again = written[:-1] + b"0j" + number.to_bytes(4, "little") + b"."
        recalled = _read(again, True)
        assert recalled == _read(again, False)
        number += 1
    assert number > 16 * RANKS * len(SHAPES) / 2


@pytest.mark.parametrize("put", [b"Nq\x350", b"Nr\x35\x00\x00\x000"])
def test_a_memo_with_gaps_is_left_to_the_machine(written: bytes, put: bytes) -> None:
    """The numbers that follow are not those of a memo that only grows: an object takes the place of another."""
    for start in (2, 11):  # behind the protocol, and behind the frame
        damaged = written[:start] + put + written[start:]
        assert _read(damaged, True) == _read(damaged, False)
