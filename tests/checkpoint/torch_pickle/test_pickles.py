"""Pickles of real writers are read as what they are; anything that wants to run, or to take for ever, is refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import io
import os
import pickle
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata, TensorStorageMetadata

from fsdp_shard.checkpoint.io.safetensors_format import from_torch_name
from fsdp_shard.checkpoint.torch_pickle import allow_list, metadata_classes
from fsdp_shard.errors import CheckpointError


def loaded(value: Any, protocol: int = 2) -> Any:
    return allow_list.load(pickle.dumps(value, protocol=protocol), "x.pt")


PLAIN: list[Any] = [
    None,
    {"a": [1, -1, 255, 256, 65536, -(2**31), 2**31, 2**62, 2**127 - 1, 0.5, True, None, "ü", b"\x00\xff", ()]},
    {"long text": "x" * 70_000, "long bytes": b"y" * 70_000, 3: (1, 2, 3, 4), (1, "a"): {"deep": [[[]]]}},
    {1, 2, 3},
    list(range(3000)),
    bytearray(b"abc"),
    random.Random(0).getstate(),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back_equal(value: Any, protocol: int) -> None:
    assert loaded(value, protocol) == value


def test_objects_that_contain_themselves() -> None:
    items: list[Any] = [1]
    items.append(items)
    found = loaded(items)
    assert found[1] is found
    outer: dict[str, Any] = {}
    outer["self"] = (outer,)
    assert loaded(outer)["self"][0]["self"] is not None


@pytest.mark.parametrize("protocol", [2, 4])
def test_harmless_objects_of_libraries_are_records(protocol: int) -> None:
    found = loaded(
        {
            "ordered": collections.OrderedDict(a=1),
            "default": collections.defaultdict(list, b=2),
            "namespace": argparse.Namespace(lr=0.1),
            "scalar": np.float64(1.5),
            "array": np.arange(3),
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "device": torch.device("cuda:1"),
            "path": Path("/a/b"),
        },
        protocol,
    )
    assert (found["ordered"], found["default"], found["size"]) == ({"a": 1}, {"b": 2}, (2, 3))
    assert found["namespace"].get("lr") == 0.1
    assert (found["dtype"], found["device"]) == ("torch.bfloat16", "cuda:1")
    assert found["scalar"].name.endswith("multiarray.scalar")
    assert isinstance(found["array"], metadata_classes.Record)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_dcp_equals_what_torch_reads(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(3, 4, dtype=torch.bfloat16), "empty": torch.ones(0, 2), "s": torch.tensor(1)},
        "step": 3,
        "rng": torch.get_rng_state(),
    }
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    ours, theirs = allow_list.load(data, ".metadata"), pickle.loads(data)
    assert isinstance(ours, metadata_classes.Metadata)
    assert isinstance(theirs, TorchMetadata)
    assert ours.planner_data == theirs.planner_data
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    for name, expected in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found).__name__ == type(expected).__name__
        if isinstance(found, metadata_classes.TensorStorageMetadata):
            assert isinstance(expected, TensorStorageMetadata)
            assert found.size == tuple(expected.size)
            assert from_torch_name(found.properties.dtype) == from_torch_name(str(expected.properties.dtype))
            assert [dataclasses.astuple(chunk) for chunk in found.chunks] == [
                (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in expected.chunks
            ]
    assert {
        (key.fqn, key.offset, key.index): (info.relative_path, info.offset, info.length)
        for key, info in ours.storage_data.items()
    } == {
        (key.fqn, key.offset and tuple(key.offset), key.index): (info.relative_path, info.offset, info.length)
        for key, info in theirs.storage_data.items()
    }


class Asks:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch CANARY",), "posix.system"),
        (eval, ("open('CANARY', 'w')",), "builtins.eval"),
        (exec, ("open('CANARY', 'w')",), "builtins.exec"),
        (open, ("CANARY", "w"), "io.open|_io.open"),
        (subprocess.check_output, (["touch", "CANARY"],), "subprocess.check_output|commands.check_output"),
        (__import__, ("antigravity",), "builtins.__import__"),
        (torch.load, ("CANARY",), "torch.serialization.load"),
        (getattr, (os, "system"), "posix|cannot|importlib|builtins.getattr"),
        (pickle.loads, (b"N.",), "_?pickle.loads"),
        (zlib.decompress, (zlib.compress(b"x"),), "zlib.decompress"),
        (torch.hub.load_state_dict_from_url, ("http://localhost/x",), "torch.hub.load_state_dict_from_url"),
        (io.FileIO, ("CANARY", "w"), "_io.FileIO"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_wants_to_run_is_refused_by_name(
    protocol: int, function: Any, arguments: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if function is getattr:
        data = b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00a\x86R."
        name = "os.system"
    else:
        data = pickle.dumps({"weight": Asks(function, *arguments)}, protocol=protocol)
    with pytest.raises(CheckpointError, match=f"x.pt asks to run '({name})'"):
        allow_list.load(data, "x.pt")
    assert not (tmp_path / "CANARY").exists()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


_SIZE = b"ctorch\nSize\n"
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "no end": (b"\x80\x02N", "cut short"),
    "nothing": (b"\x80\x02.", "more or less than one object"),
    "two objects": (opcodes(b"NN"), "more or less than one object"),
    "an open mark": (opcodes(b"(N"), "more or less than one object"),
    "behind the end": (opcodes(b"N") + b"x", "1 bytes after the end"),
    "protocol 1": (b"\x80\x01N.", "protocol 1"),
    "protocol 9": (b"\x80\x09N.", "protocol 9"),
    "unknown opcode": (opcodes(b"\xff"), "opcode"),
    "a text opcode": (opcodes(b"I1\n"), "opcode"),
    "EXT1": (opcodes(b"\x82\x01"), "opcode"),
    "INST": (opcodes(b"(ios\nsystem\n"), "opcode"),
    "too little on the stack": (opcodes(b"\x86"), "stack"),
    "no mark": (opcodes(b"t"), "stack"),
    "build on nothing": (opcodes(b"N)b"), "sets the state of a NoneType"),
    "build on a list": (opcodes(b"])b"), "sets the state of a list"),
    "build on a class": (opcodes(_SIZE, b"}b"), "sets the state of a Global"),
    "call of a text": (opcodes(b"X\x01\x00\x00\x00a)R"), "calls something that is not a class"),
    "call without a tuple": (opcodes(_SIZE, b"]R"), "calls something that is not a class"),
    "wrong arguments": (opcodes(_SIZE, b"NNN\x87R"), "gives torch.Size what it does not take"),
    "a negative size": (opcodes(_SIZE, b"J\xff\xff\xff\xff\x85\x85R"), "something else than counts"),
    "a size of text": (opcodes(_SIZE, b"X\x01\x00\x00\x00a\x85R"), "not a short tuple"),
    "no such memo": (opcodes(b"h\x07"), "recalls object 7, which is not in its memo"),
    "no UTF-8": (opcodes(b"X\x01\x00\x00\x00\xff"), "UnicodeDecodeError"),
    "length of 4 GB": (opcodes(b"X\xff\xff\xff\xffabc"), "cut short"),
    "length of 2^63": (opcodes(b"\x8e" + b"\xff" * 7 + b"\x7f"), "cut short"),
    "bytearray of 2^62": (opcodes(b"\x96" + b"\xff" * 7 + b"\x3f"), "cut short"),
    "an endless name": (opcodes(b"c" + b"a" * 5000), "cut short in a name"),
    "an unknown persistent id": (opcodes(b"NQ"), "storage outside of it"),
    "a list as a key": (opcodes(b"}]Ns"), "has a list as a key"),
    "a dict as a key": (opcodes(b"}}Ns"), "has a dict as a key"),
    "a nested tuple as a key": (opcodes(b"})" + b"\x85" * 500_000 + b"Ns"), "has a tuple as a key"),
    "a tuple of 2^60 as a key": (
        opcodes(b"})" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"Ns"),
        "has a tuple as a key",
    ),
    "a key of a set": (opcodes(b"(]\x91"), "has a list as a key"),
    "append to a number": (opcodes(b"K\x01Na"), "appends to something that is not a list"),
    "items of a list": (opcodes(b"]NNs"), "adds keys to something that is not a dictionary"),
    "an odd number of items": (opcodes(b"}(Nu"), "adds keys to something that is not a dictionary"),
    "a name of numbers": (opcodes(b"K\x01K\x02\x93"), "names a class by something that is not a string"),
    "getattr of a text": (opcodes(b"cbuiltins\ngetattr\nNN\x86R"), "builtins.getattr"),
    "getattr out of a class": (
        opcodes(b"cbuiltins\ngetattr\nctorch\nTensor\nX\x09\x00\x00\x00__class__\x86R"),
        "asks to run 'torch.Tensor.__class__'",
    ),
    "a dotted name": (opcodes(b"ctorch\nos.system\n"), "asks to run 'torch.os.system'"),
    "state of a chunk": (
        opcodes(b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81}X\x05\x00\x00\x00sizesK\x01sb"),
        "gives a ChunkStorageMetadata a state that it cannot have",
    ),
}


@pytest.mark.long
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles_are_one_error(name: str) -> None:
    data, message = MALFORMED[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        allow_list.load(data, "x.pt")
    assert str(caught.value).startswith("x.pt ")
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
def test_a_memo_of_four_billion_entries_takes_no_memory() -> None:
    assert allow_list.load(opcodes(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff"), "x.pt") is None


@pytest.mark.timeout(20)
def test_a_list_that_is_copied_again_and_again_is_refused() -> None:
    items = b"".join(b"K%c" % (i % 100) for i in range(20_000))
    again = b"cbuiltins\nlist\nq\x01h\x00\x85R0" + b"h\x01h\x00\x85R0" * 20_000
    with pytest.raises(CheckpointError, match="copies the same items over and over"):
        allow_list.load(opcodes(b"](" + items + b"eq\x000", again, b"N"), "x.pt")


@pytest.mark.timeout(20)
def test_every_cut_of_a_pickle_is_an_error() -> None:
    data = pickle.dumps({"a": [1, "x", torch.Size([1, 2])], "b": collections.OrderedDict(c=torch.float32)}, protocol=2)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            allow_list.load(data[:length], "x.pt")


def test_reading_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps({"a": np.float32(1), "b": torch.Size([1])}))
    program = (
        "import sys; from fsdp_shard.checkpoint.torch_pickle import allow_list, torch_zip\n"
        f"allow_list.load(open({str(tmp_path / 'x')!r}, 'rb').read(), 'x')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
