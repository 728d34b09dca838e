from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.digests import CHUNK_BYTES, chunk_digest, frame_digest, header_digest
from fsdp_shard.checkpoint.integrity.non_finite import DTYPES, NonFinite, find_non_finite
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.integrity.verify_report import ByteRange, Problem
from fsdp_shard.checkpoint.io.safetensors_format import itemsize, to_torch
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.steps.manifest import read_manifest
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import edit_header, random_tensor, raw_bytes, write_huggingface


def converted(tmp_path: Path) -> Path:
    tensors = {"a": random_tensor((700_001,), torch.float32), "b": random_tensor((4, 3), torch.bfloat16)}
    convert(write_huggingface(tmp_path / "source", tensors), tmp_path / "model", format="sharded", ranks=2)
    return tmp_path / "model"


def test_verify_names_file_tensor_and_bytes(tmp_path: Path) -> None:
    root = converted(tmp_path)
    report = verify(root)
    assert report.is_sound
    assert report.content_checked
    assert "sound (2 tensors, 2.67 MiB; every byte" in str(report)
    path = root / "shard-00001-of-00002.safetensors"
    with open(path, "r+b") as file:
        file.seek(-100, 2)
        position, (old,) = file.tell(), file.read(1)
        file.seek(position)
        file.write(bytes([old ^ 1]))
    (problem,) = verify(root).problems
    assert (problem.file, problem.tensor) == (path.name, "a")
    assert problem.start is not None
    assert problem.stop is not None
    assert problem.start <= position < problem.stop
    assert str(path) in problem.message


def test_verify_names_both_files_where_a_chunk_lies_in_two(tmp_path: Path) -> None:
    root = converted(tmp_path)
    with open_checkpoint(root) as index:
        ((file, start, stop), (other, _, _)) = index.spans("b", 0, 12)
    with open(root / file, "r+b") as stream:
        stream.seek(start)
        stream.write(b"\x99\x99")
    (problem,) = verify(root).problems
    assert [place.file for place in problem.places] == [file, other]
    assert problem.tensor == "b"
    assert (problem.start, problem.stop) == (start, stop)
    for place in problem.places:
        assert f"{root / place.file}, bytes {place.start}-" in problem.message
    assert "any of them may be damaged" in problem.message


def test_verify_finds_what_is_wrong_beside_the_weights(tmp_path: Path) -> None:
    root = converted(tmp_path)
    config = (root / "config.json").read_text()
    (root / "config.json").write_text(config.replace("lamma", "mamma"))
    assert [problem.file for problem in verify(root).problems] == ["config.json"]
    (root / "config.json").write_text(config + " ")
    assert "bytes, but" in verify(root).problems[0].message
    (root / "config.json").unlink()
    assert "is missing" in verify(root).problems[0].message


def test_verify_finds_a_changed_header_and_a_cut_file(tmp_path: Path) -> None:
    root = converted(tmp_path)
    path = root / "shard-00000-of-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format":"pt"', b'"format":"tp"'))
    assert "the header of" in verify(root).problems[0].message
    path.write_bytes(content[:-3])
    report = verify(root)
    assert [problem.file for problem in report.problems] == [path.name]
    assert not report.content_checked


def test_a_manifest_of_other_weights_is_refused(tmp_path: Path) -> None:
    root = converted(tmp_path)
    other = {"a": torch.zeros(3), "c": torch.zeros(1)}
    convert(write_huggingface(tmp_path / "other source", other), tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_text((root / "manifest.json").read_text())
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(tmp_path / "other")
    manifest = read_manifest(root)
    assert manifest is not None
    record = manifest.tensors["a"]
    manifest.tensors["a"] = dataclasses.replace(record, chunks=record.chunks[1:])
    (root / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(CheckpointError, match="2 chunks of tensor a, which has 3"):
        open_checkpoint(root)


def test_without_a_manifest_structure_is_checked(tmp_path: Path) -> None:
    root = write_huggingface(tmp_path, {"w": torch.zeros(3)})
    report = verify(root)
    assert report.is_sound
    assert not report.content_checked
    assert "content could not be checked" in str(report)
    edit_header(root / "model.safetensors", lambda document: document["w"].update(dtype="F31"))
    assert "F31" in verify(root).problems[0].message
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "gone")
    empty = verify(write_huggingface(tmp_path / "empty", {}))
    assert [problem.message for problem in empty.problems] == [f"{tmp_path / 'empty'} has no tensors."]


def test_one_large_tensor_is_shared_by_threads_and_damage_is_joined(tmp_path: Path) -> None:
    tensor = random_tensor((40 << 18,), torch.float32)  # 40 chunks: two jobs
    convert(write_huggingface(tmp_path / "source", {"w": tensor}), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    with open_checkpoint(path) as index:
        ((_, start, _),) = index.spans("w", 0, 1)
    with open(path, "r+b") as file:
        for chunk in (3, 4, 35):
            file.seek(start + chunk * CHUNK_BYTES + 7)
            file.write(b"damaged")
    problems = verify(tmp_path / "model").problems
    assert [(problem.start, problem.stop) for problem in problems] == [
        (start + first * CHUNK_BYTES, start + stop * CHUNK_BYTES) for first, stop in ((3, 5), (35, 36))
    ]


def test_bytes_around_tensors_are_checked_in_any_format(tmp_path: Path) -> None:
    """A file with no header of its own: the frame is whatever no tensor owns."""
    content = b"before" + bytes(8) + b"between" + bytes(4) + b"after"
    (tmp_path / "weights").write_bytes(content)
    owned = [(21, 25), (6, 14)]
    expected = chunk_digest(b"beforebetweenafter").hex()
    assert frame_digest(tmp_path / "weights", owned) == expected
    assert frame_digest(tmp_path / "weights", []) == chunk_digest(content).hex()
    root = converted(tmp_path)
    path = root / "shard-00000-of-00002.safetensors"
    with open_checkpoint(root) as index:
        pieces = [
            (piece.start, piece.start + math.prod(piece.shape) * itemsize(entry.dtype))
            for entry in index.tensors.values()
            for piece in entry.pieces
            if piece.file == path.name
        ]
    manifest = read_manifest(root)
    assert manifest is not None
    assert frame_digest(path, pieces) == header_digest(path) == manifest.files[path.name].header_digest


def test_what_lies_around_the_tensors_of_dcp_is_checked(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", {"a": torch.ones(9, 4), "b": torch.ones(3)})
    root = tmp_path / "dcp"
    convert(source, root, format="dcp", ranks=2)
    assert verify(root).content_checked
    assert verify(root, source).is_sound
    path = root / "__1_0.distcp"
    content = path.read_bytes()
    with open_checkpoint(root) as index:
        ((_, start, stop),) = [place for place in index.spans("a", 0, 36) if place[0] == path.name]
    opened = 0
    for at in {*range(0, len(content), 61), start, stop - 1, len(content) - 1}:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        report = verify(root)
        assert str(path) in report.problems[0].message
        if start <= at < stop:
            assert report.problems[0].tensor == "a"
        elif report.format is not None:
            opened += 1
            assert "the bytes around its tensors" in report.problems[0].message
    assert opened


def test_a_manifest_and_a_config_are_found_where_the_path_leads(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "plain" / "checkpoint-5", {"a": torch.zeros(8, 4)})
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    assert "lacks transformer.wte.weight" in verify(tmp_path / "plain").problems[0].message
    (source / "config.json").write_text('{"model_type": "lamma"}')
    convert(source, tmp_path / "outer" / "checkpoint-5")
    assert verify(tmp_path / "outer").content_checked


def test_a_header_so_damaged_that_nothing_opens_is_named(tmp_path: Path) -> None:
    root = converted(tmp_path)
    path = root / "shard-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[9] ^= 0x55
    path.write_bytes(content)
    report = verify(root)
    (problem,) = report.problems
    assert problem.file == path.name
    assert f"the header of {path}" in problem.message
    assert str(report) == problem.message


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_nan_and_infinities_are_found(name: str, tmp_path: Path) -> None:
    dtype = to_torch(name)
    patterns = torch.tensor([0x7F800001, 0xFF800000, 0x7FF00000, 0x7FF00001, 0x80, 0x7C, 0xFE, 0x7FC00000])
    bits = torch.cat([random_tensor((4096,), dtype, seed=1).view(torch.uint8), patterns.view(torch.uint8)])
    tensor = bits.view(dtype)
    values = tensor.to(torch.complex128 if name == "C64" else torch.float64)
    is_nan = values.isnan()
    is_inf = values.isinf() & ~is_nan
    (bad,) = torch.nonzero(is_nan | is_inf, as_tuple=True)
    assert len(bad)
    first = int(bad[0])
    assert find_non_finite(name, memoryview(raw_bytes(tensor))) == NonFinite(
        int(is_nan.sum()), int(is_inf.sum()), first
    )
    assert find_non_finite(name, memoryview(raw_bytes(tensor[:first]))) is None


def test_nan_is_reported_with_its_place(tmp_path: Path) -> None:
    tensor = torch.zeros(600, 1000)  # more than a chunk
    tensor[500, 3], tensor[500, 4], tensor[599, 0] = math.nan, math.inf, -math.inf
    root = write_huggingface(tmp_path, {"fine": torch.ones(4), "w": tensor, "n": torch.ones(2, dtype=torch.int8)})
    report = verify(root)
    (problem,) = report.problems
    with open_checkpoint(root) as index:
        ((file, start, stop),) = index.spans("w", 500_003, 500_004)
    assert problem == Problem(
        f"{root / file}, bytes {start}-{stop - 1}: tensor w is not finite from [500, 3] on: 1 NaN and 2 infinite of "
        "600,000 elements.",
        (ByteRange(file, start, stop),),
        "w",
    )
    assert "WRONG" in str(report)
    assert json.loads(report.to_json())["problems"][0]["places"] == [{"file": file, "start": start, "stop": stop}]


def test_a_file_alone_is_not_compared_with_the_config(tmp_path: Path) -> None:
    root = write_huggingface(tmp_path, {"a": torch.zeros(8, 4)})
    (root / "config.json").write_text('{"model_type": "gpt2"}')
    assert not verify(root).is_sound
    assert verify(root / "model.safetensors").is_sound  # one file of several, perhaps: its layers need not be all
    (root / "config.json").write_text("[]")
    assert "is not a JSON object" in verify(root).problems[0].message


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(300, 7, generator=generator),
        "norm": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 4),
        "count": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "large": torch.randn(300_000, generator=generator),
    }


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [None, 3])
def test_contents_are_the_same_in_other_formats_and_dtypes(
    dtype: str | None, ranks: int | None, tmp_path: Path
) -> None:
    source = write_huggingface(tmp_path / "source", weights(), head="embed")
    layout = {"format": "sharded", "ranks": ranks} if ranks else {}
    convert(source, tmp_path / "other", dtype=dtype, **layout)  # type: ignore[arg-type]  # settings of either layout
    for one, two in itertools.permutations([source, tmp_path / "other"]):
        report = verify(one, two)
        assert report.is_sound, report
        assert report.num_cast == (4 if dtype else 0)
        assert "have the same content" in str(report)


def test_a_tied_tensor_may_be_stored_twice(tmp_path: Path) -> None:
    tensor = torch.randn(4, 4)
    tied = write_huggingface(tmp_path / "tied", {"embed": tensor}, head="embed")
    twice = write_huggingface(tmp_path / "twice", {"embed": tensor, "head": tensor.clone()})
    untied = write_huggingface(tmp_path / "untied", {"embed": tensor, "head": tensor + 1})
    once = write_huggingface(tmp_path / "once", {"embed": tensor})
    assert verify(tied, twice).is_sound
    assert verify(tied, once).is_sound  # the name of a tie is no content
    assert [problem.tensor for problem in verify(untied, tied).problems] == ["head"]
    assert "is in" in verify(twice, once).problems[0].message


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    one = write_huggingface(tmp_path / "one", weights())
    changed = weights()
    changed["large"][299_998] += 1
    changed["count"] = changed["count"].to(torch.int32)
    changed["embed"] = changed["embed"].T.contiguous()
    two = write_huggingface(tmp_path / "two", changed)
    messages = {problem.tensor: problem.message for problem in verify(one, two).problems}
    assert set(messages) == {"large", "count", "embed"}
    assert "differs from [299998] on" in messages["large"]
    assert f"{two / 'model.safetensors'}, bytes " in messages["large"]
    assert "1 of its 2 chunks differ" in messages["large"]
    assert f"is int64 in {one}, but int32 in {two}" in messages["count"]
    assert "is [300, 7] in" in messages["embed"]


def test_a_difference_after_the_cast(tmp_path: Path) -> None:
    wide = torch.randn(300_000)
    narrow = wide.bfloat16()
    narrow[290_000] += 1
    wide[7] = math.nan
    narrow[7] = -math.nan
    one = write_huggingface(tmp_path / "one", {"w": wide, "h": wide.half()})
    two = write_huggingface(tmp_path / "two", {"w": narrow, "h": wide.half().bfloat16()})
    (problem,) = verify(one, two).problems
    assert problem.message.startswith("tensor w differs from [290000] on: ")
    assert "float32 and bfloat16 differ after the cast" in problem.message


def test_a_cast_to_eight_bits(tmp_path: Path) -> None:
    wide = torch.randn(300, dtype=torch.bfloat16)
    narrow = wide.to(torch.float8_e4m3fn)
    one = write_huggingface(tmp_path / "one", {"w": wide})
    assert verify(one, write_huggingface(tmp_path / "two", {"w": narrow})).is_sound
    narrow.view(torch.uint8)[7] ^= 4
    (problem,) = verify(one, write_huggingface(tmp_path / "three", {"w": narrow})).problems
    assert "differs from [7] on" in problem.message


def test_a_cast_that_is_too_narrow(tmp_path: Path) -> None:
    wide = torch.tensor([1.0, 1e300], dtype=torch.float64)
    one = write_huggingface(tmp_path / "one", {"w": wide})
    (problem,) = verify(one, write_huggingface(tmp_path / "two", {"w": wide.float()})).problems
    assert "differs from [1] on" in problem.message


def test_both_manifests_are_checked_when_two_are_compared(tmp_path: Path) -> None:
    root = converted(tmp_path)
    path = root / "shard-00000-of-00002.safetensors"
    with open(path, "r+b") as file:
        file.seek(-9, 2)
        file.write(b"\x11\x22")
    problems = verify(tmp_path / "source", root).problems
    assert any("is not what was written" in problem.message for problem in problems)
    assert any("differs from" in problem.message for problem in problems)
    with pytest.raises(CheckpointError, match="gone does not exist"):
        verify(root, tmp_path / "gone")


def test_of_many_problems_the_first_are_shown(tmp_path: Path) -> None:
    one = write_huggingface(tmp_path / "one", {f"w{n:02}": torch.zeros(1) for n in range(30)})
    two = write_huggingface(tmp_path / "two", {f"w{n:02}": torch.ones(1) for n in range(30)})
    report = verify(one, two)
    assert len(report.problems) == 30
    assert "... and 10 more problems" in str(report)
    assert len(str(report).splitlines()) == 22
