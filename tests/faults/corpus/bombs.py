"""Small files that ask for all time or memory: holes, views, nesting, numbers, loops, links, FIFOs, directories."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_GIB = 1 << 30
_MODEL, _INDEX, _BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_CONFIG, _TOKENIZER, _TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
_ADAPTER = "adapter_config.json"


def _hole(file: str, num_bytes: int, start: bytes = b"") -> Damage:
    """A file of this size that takes no space but for its start."""

    def apply(root: Path) -> None:
        (root / file).write_bytes(start)
        os.truncate(root / file, num_bytes)

    return apply


# Headers and pickles.


def _made(file: str, make: Callable[[], bytes | str]) -> Damage:
    """The file with a content that takes seconds to make, so it is made where the case is."""
    return lambda root: edits.content(file, make())(root)


def _header(make: Callable[[], Any], data: bytes = b"") -> Damage:
    def content() -> bytes:
        header = json.dumps(make(), separators=(",", ":")).encode()
        return struct.pack("<Q", len(header)) + header + data

    return _made(_MODEL, content)


def _tensor(shape: list[int], start: int = 0, num_bytes: int = 0) -> dict[str, Any]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [start, start + num_bytes]}


def _saved(make: Callable[[], Any]) -> Damage:
    """What `make` returns, as torch.save writes it."""
    return lambda root: torch.save(make(), root / _BIN)


def _pickle(data: bytes) -> Damage:
    """A zip archive of torch.save with this pickle."""

    def apply(root: Path) -> None:
        with zipfile.ZipFile(root / _BIN, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3")

    return apply


def _many_members(root: Path) -> None:
    with zipfile.ZipFile(root / _BIN, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        for number in range(30_000):
            archive.writestr(f"archive/data/{number}", b"")


def _compressed(root: Path) -> None:
    with zipfile.ZipFile(root / _BIN, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100 << 20))


def _doubled_lists() -> bytes:
    """Each of 40 lists has the one before it twice."""
    steps = [b"]r" + struct.pack("<I", n) + b"(" + 2 * (b"j" + struct.pack("<I", n - 1)) + b"e" for n in range(1, 40)]
    return b"\x80\x02]r\0\0\0\0" + b"".join(steps) + b"0" * 39 + b"j" + struct.pack("<I", 39) + b"."


def _views(count: int, *shape: int) -> dict[str, torch.Tensor]:
    zero = torch.zeros(1)
    return {f"w{number}": zero.expand(*shape, number + 1) for number in range(count)}


def _overlapping() -> dict[str, torch.Tensor]:
    whole = torch.zeros(100_000)
    return {f"w{number}": whole[number : 90_000 + number] for number in range(1000)}


def _rank_files(change: Callable[[bytes], bytes]) -> Damage:
    """Rank files of DTensors, the pickle of each changed by `change`."""

    def apply(root: Path) -> None:
        for file in root.glob("model_world_size_*.pt"):
            with zipfile.ZipFile(file) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
            name = next(name for name in members if name.endswith("/data.pkl"))
            members[name] = change(members[name])
            with zipfile.ZipFile(file, "w") as archive:
                for member, content in members.items():
                    archive.writestr(member, content)

    return apply


def _strided_shards(data: bytes) -> bytes:
    """Each Shard(dim=0) as a _StridedShard(dim=0) whose tensor was cut into 2^40 parts before."""
    old, new = b"Shard\n", b"_StridedShard\n"
    assert old in data
    data = data.replace(b"placement_types\n" + old, b"placement_types\n" + new, 1)
    dim = b"X\x03\x00\x00\x00dim"
    at = data.index(dim)
    return data[:at] + b"X\x0c\x00\x00\x00split_factor\x8a\x06" + (1 << 40).to_bytes(6, "little") + data[at:]


def _chunks(count: int, *, same: bool) -> Damage:
    """DCP's .metadata of one tensor in so many pieces, of which one is in a file."""

    def apply(root: Path) -> None:
        piece = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
        pieces = [piece if same else ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(count)]
        tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([count]), pieces)
        stored = {MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 10)}
        (root / ".metadata").write_bytes(pickle.dumps(Metadata({"w": tensor}, None, stored)))

    return apply


def _staircase(root: Path) -> None:
    """DCP pieces that are a partition, of which half are open wherever one looks for overlaps."""
    size = 4000
    columns = [piece for n in range(size) for piece in (((0, n), (n, 1)), ((n, n), (size - n, 1))) if piece[1][0]]
    pieces = [ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at, shape in columns]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([size, size]), pieces)
    stored = {MetadataIndex("w", piece.offsets): _StorageInfo("__0_0.distcp", 0, 10) for piece in pieces}
    (root / ".metadata").write_bytes(pickle.dumps(Metadata({"w": tensor}, None, stored)))


_HEADERS: list[tuple[str, str, Damage]] = [
    ("a header of 10^6 tensors", "model", _header(lambda: {f"w{n}": _tensor([0]) for n in range(10**6)})),
    ("a header that is a hole", "model", _hole(_MODEL, 90 << 20, struct.pack("<Q", (90 << 20) - 8))),
    ("a shape of 10^5 dimensions", "model", _header(lambda: {"w": _tensor([2**62] * 100_000, 0, 1)}, b"\0")),
    ("a shape of 65 dimensions", "model", _header(lambda: {"w": _tensor([1] * 65, 0, 1)}, b"\0")),
    (
        "a name of a megabyte of prefixes",
        "model",
        _header(lambda: {"module." * 150_000 + "w": _tensor([1], 0, 1)}, b"\0"),
    ),
    ("a name of 5,000 modules", "model", _header(lambda: {"a." * 5000 + "w": _tensor([1], 0, 1)}, b"\0")),
    ("a nested header", "model", edits.content(_MODEL, struct.pack("<Q", 200_000) + edits.DEEP.encode())),
    ("a header of empty lists", "model", _header(lambda: {"__metadata__": [[]] * 2_000_000})),
    ("an index of 3 GiB", "indexed", _hole(_INDEX, 3 * _GIB)),
    ("an index of 900 MiB", "indexed", _hole(_INDEX, 900 << 20)),
    ("an index that begins right", "indexed", _hole(_INDEX, 900 << 20, b'{"weight_map": {')),
    ("an index of empty lists", "indexed", _made(_INDEX, lambda: json.dumps({"weight_map": [[]] * 2_000_000}))),
    (
        "an index of 10^6 tensors",
        "indexed",
        _made(_INDEX, lambda: json.dumps({"weight_map": {f"w{n}": _MODEL for n in range(10**6)}})),
    ),
    ("an index that is nested", "indexed", edits.literal(_INDEX, "metadata", edits.DEEP)),
    ("a manifest of 3 GiB", "sealed", _hole("manifest.json", 3 * _GIB)),
    ("a manifest of 900 MiB", "sealed", _hole("manifest.json", 900 << 20)),
    ("a manifest that is nested", "sealed", edits.literal("manifest.json", "mesh", edits.DEEP)),
    (
        "a manifest of 300,000 chunks",
        "sealed",
        edits.sealed_manifest(
            lambda document: document["tensors"]["model.norm.weight"].update(chunks=["0" * 32] * 300_000)
        ),
    ),
    ("terabytes of one number", "pytorch", _saved(lambda: _views(1, 10**6, 10**6))),
    ("many large views of one number", "pytorch", _saved(lambda: _views(200, 10**4, 10**4))),
    (
        "strides of one",
        "pytorch",
        _saved(lambda: {"w": torch.as_strided(torch.zeros(1000), (100,) * 6, (1,) * 6)}),
    ),
    ("a thousand overlapping views", "pytorch", _saved(_overlapping)),
    ("terabytes in the old stream", "legacy", lambda root: _old_stream(root)),
    ("lists that double", "pytorch", _pickle(_doubled_lists())),
    ("a list of itself", "pytorch", _pickle(b"\x80\x02]q\x00h\x00a.")),
    ("a million sets", "pytorch", _pickle(b"\x80\x04" + b"\x8f" * 3_000_000 + b".")),
    ("a million notes of one object", "pytorch", _pickle(b"\x80\x04N" + b"\x94" * 3_000_000 + b".")),
    ("a million nested tuples", "pytorch", _pickle(b"\x80\x02N" + b"\x85" * 3_000_000 + b".")),
    ("a million marks", "pytorch", _pickle(b"\x80\x02" + b"(" * 3_000_000 + b".")),
    ("a text of 4 GB", "pytorch", _pickle(b"\x80\x04\x8d" + struct.pack("<Q", 4 * 10**9) + b".")),
    ("a note of number 2^32", "pytorch", _pickle(b"\x80\x02Nr\xff\xff\xff\xff.")),
    ("an archive of 30,000 members", "pytorch", _many_members),
    ("a compressed archive", "pytorch", _compressed),
    ("a stream that is a hole", "legacy", _hole(_BIN, 3 * _GIB, b"\x80\x02B" + struct.pack("<I", 2 * 10**9))),
    ("strided shards in 2^40 parts", "torch-ranks", _rank_files(_strided_shards)),
    ("DCP: a hole of 3 GiB", "dcp", _hole(".metadata", 3 * _GIB)),
    ("DCP: a hole of 900 MiB", "dcp", _hole(".metadata", 900 << 20, b"\x80\x04B" + struct.pack("<I", 850 << 20))),
    ("DCP: one piece a million times", "dcp", _chunks(10**6, same=True)),
    ("DCP: 30,000 pieces", "dcp", _chunks(30_000, same=False)),
    ("DCP: a staircase of pieces", "dcp", _staircase),
]


def _old_stream(root: Path) -> None:
    torch.save(_views(1, 10**6, 10**6), root / _BIN, _use_new_zipfile_serialization=False)


# GGUF.


def _gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf_header(values: bytes, num_values: int = 1, num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + values


def _gguf_array(kind: int, count: int) -> bytes:
    return _gguf_header(_gguf_string(b"a") + struct.pack("<IIQ", 9, kind, count))


_GGUF: list[tuple[str, Damage]] = [
    ("an array of 10^12 numbers", edits.content("model.gguf", _gguf_array(4, 10**12))),
    ("an array of 10^12 texts", edits.content("model.gguf", _gguf_array(8, 10**12) + bytes(1 << 20))),
    ("an array of texts in a hole", _hole("model.gguf", 4 * _GIB, _gguf_array(8, 500_000_000))),
    (
        "a text of 3 GiB in a hole",
        _hole("model.gguf", 4 * _GIB, _gguf_header(_gguf_string(b"a") + struct.pack("<IQ", 8, 3 * _GIB))),
    ),
    ("10^15 values", edits.content("model.gguf", _gguf_header(b"", 10**15, 10**15))),
]


# Config, adapter.


def _config(**values: Any) -> Damage:
    return edits.fields(_CONFIG, **values)


_CONFIGS: dict[str, Damage] = {
    "10^9 layers": _config(num_hidden_layers=10**9),
    "10^5 layers": _config(num_hidden_layers=10**5),
    "10^9 layers with a list of their kinds": _config(model_type="qwen2", num_hidden_layers=10**9),
    "10^9 labels": _config(num_labels=10**9),
    "10^5 experts": _config(
        model_type="nllb-moe", architectures=["NllbMoeForConditionalGeneration"], num_experts=10**5
    ),
    "a hidden size of 10^12": _config(hidden_size=10**12),
    "10^12 heads": _config(num_attention_heads=10**12),
    "a hole of 3 GiB": _hole(_CONFIG, 3 * _GIB),
    "a hole of 900 MiB": _hole(_CONFIG, 900 << 20, b'{"model_type": "llama", "a": "'),
    "40 MB of blanks": _made(_CONFIG, lambda: b" " * (40 << 20) + b"{}"),
    "millions of empty lists": edits.literal(_CONFIG, "comment", "[" + "[]," * 3_000_000 + "[]]"),
    "nested 900 times": edits.literal(_CONFIG, "comment", "[" * 900 + "]" * 900),
    "a generation config of 3 GiB": _hole("generation_config.json", 3 * _GIB),
}
_HARMLESS: dict[str, Damage] = {  # to some commands
    "the origin of a config in a hole of 3 GiB": _hole("made_from.txt", 3 * _GIB),
    "a vocabulary of 10^15": _config(vocab_size=10**15),
    "10^9 positions": _config(max_position_embeddings=10**9),
    "a head_dim of 10^12": _config(head_dim=10**12),
    "rope of 10^12": _config(head_dim=10**12, partial_rotary_factor=10.0),
}


def _pattern(**values: Any) -> Damage:
    return edits.fields(_ADAPTER, **values)


_ENDLESS = r"(([a-z_.0-9])+)+!"
_ADAPTERS: dict[str, Damage] = {
    "an alpha_pattern that never ends": _pattern(alpha_pattern={_ENDLESS: 3}),
    "a rank_pattern that never ends": _pattern(rank_pattern={_ENDLESS: 3}),
    "target_modules that never end": _pattern(target_modules=_ENDLESS),
    "exclude_modules that never end": _pattern(exclude_modules=_ENDLESS),
    "modules_to_save that never end": _pattern(modules_to_save=[_ENDLESS]),
    "layers_pattern that never ends": _pattern(layers_pattern=[_ENDLESS], layers_to_transform=[0]),
    "an adapter_config.json of 3 GiB": _hole(_ADAPTER, 3 * _GIB),
    "an adapter_config.json that is nested": edits.literal(_ADAPTER, "r", edits.DEEP),
}


# Tokenizers and templates.


def _normalizer(*steps: dict[str, Any]) -> Damage:
    return edits.fields(_TOKENIZER, normalizer={"type": "Sequence", "normalizers": list(steps)})


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _decoder(count: int) -> Damage:
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return edits.fields(
        _TOKENIZER, decoder={"type": "Sequence", "decoders": [{"type": "ByteLevel"}] + [doubling] * count}
    )


_TOKENIZERS: dict[str, Damage] = {
    "a normalizer that doubles 40 times": _normalizer(*[_replace({"String": "a"}, "aa")] * 40),
    "a normalizer that doubles any letter": _normalizer(*[_replace({"Regex": "[a-z]"}, "aa")] * 40),
    "a normalizer that begins with megabytes": _normalizer(*[{"type": "Prepend", "prepend": "a" * 500_000}] * 8),
    "a decoder that doubles 40 times": _decoder(40),
    "tokenizer.json of 3 GiB": _hole(_TOKENIZER, 3 * _GIB),
    "tokenizer_config.json of 3 GiB": _hole(_TOKENIZER_CONFIG, 3 * _GIB),
    "a tokenizer_config.json of empty lists": edits.literal(_TOKENIZER_CONFIG, "a", "[" + "[]," * 3_000_000 + "[]]"),
    "tokens up to 10^12": edits.fields(_TOKENIZER_CONFIG, added_tokens_decoder={str(10**12): {"content": "a"}}),
    "10^9 extra ids": edits.fields(_TOKENIZER_CONFIG, tokenizer_class="T5Tokenizer", extra_ids=10**9),
    "another chat template of 3 GiB": edits.both(
        lambda root: (root / "additional_chat_templates").mkdir(),
        _hole("additional_chat_templates/tools.jinja", 3 * _GIB),
    ),
}
_FIFOS = {
    f"a FIFO as {file}": edits.fifo(file)
    for file in (_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
}
_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
_LOOP += "{% endfor %}"
_TEMPLATES: dict[str, str] = {
    "loops in loops": _LOOP,
    "a range of 10^9": "{% for a in range(10**9) %}{% endfor %}",
    "a text of 10^10": "{{ 'a' * 10**10 }}",
    "a text that doubles": "{% set t = namespace(a='a') %}{% for _ in range(40) %}{% set t.a = t.a * 2 %}{% endfor %}",
    "a number of 10^10 bits": "{{ 2 ** (10**10) }}",
    "a width of 10^10": "{{ 'a' | center(10**10) }}",
    "an indent of 10^10": "{{ 'a\nb' | indent(10**10) }}",
    "a list of 10^9": "{{ ([1] * 10**9) | length }}",
    "an endless loop for some messages": "{% if messages[0]['content'].startswith('Hello') %}" + _LOOP + "{% endif %}",
    "macros that call each other": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{{ a() }}"
    "{% endmacro %}{{ a() }}",
}


# Runs and directories.

_STEP = "checkpoints/step-00000001"
_LAUGHS = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))


def _settings(text: str) -> Damage:
    """A step with these settings, which its manifest has the digest of."""
    return lambda root: edits.sealed(edits.content("run_config.yaml", text))(root / _STEP)


_RUNS: dict[str, Damage] = {
    "metrics.jsonl a FIFO": edits.fifo("metrics.jsonl"),
    "metrics.jsonl of 3 GiB": _hole("metrics.jsonl", 3 * _GIB),
    "trainer.json of 3 GiB": _hole(f"{_STEP}/trainer.json", 3 * _GIB),
    "run_config.yaml of 3 GiB": _hole(f"{_STEP}/run_config.yaml", 3 * _GIB),
    "run_config.yaml that repeats itself": _settings(f"defaults: []\na0: &a0 [x, x]\n{_LAUGHS}\n"),
    "run_config.yaml that is nested": _settings("defaults: " + "[" * 60_000),
    "the manifest of a step of 3 GiB": _hole(f"{_STEP}/manifest.json", 3 * _GIB),
}


def _nested(count: int, *names: str) -> Damage:
    """Directories in each other."""

    def apply(root: Path) -> None:
        before = os.getcwd()
        try:
            os.chdir(root)
            for number in range(count):
                os.mkdir(names[number % len(names)])
                os.chdir(names[number % len(names)])
        finally:
            os.chdir(before)

    return apply


def _build(*damages: Damage) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        root.mkdir()
        edits.both(*damages)(root)

    return build


def _many_directories(root: Path) -> None:
    for number in range(2500):
        (root / f"step-{number}").mkdir()


def _links(root: Path) -> None:
    for name in ("checkpoints", "checkpoint", "step-1", "huggingface"):
        (root / name).symlink_to(".")


def _loop(root: Path) -> None:
    (root / _MODEL).unlink()
    (root / _MODEL).symlink_to(_MODEL)


_DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "200 directories of steps": _build(_nested(200, "step-1", "checkpoints")),
    "640 directories of actors": _build(_nested(640, "actor")),
    "640 directories of any name": _build(_nested(640, "d")),
    "links to themselves": _build(_links),
    "2,500 steps of nothing": _build(_many_directories),
    "a file that is a link to itself": damaged("model", _loop),
    "weights that are a FIFO": damaged("model", edits.fifo(_MODEL)),
    "an index that is a FIFO": damaged("indexed", edits.fifo(_INDEX)),
    "a metadata that is a FIFO": damaged("dcp", edits.fifo(".metadata")),
}


def _cases(kind: str, found: dict[str, Damage], *, base: str = "model", expect: str = "error") -> list[Case]:
    return [Case(f"{kind}: {name}", damaged(base, damage), expect, kind) for name, damage in found.items()]


CASES = [
    *(Case(name, damaged(base, damage)) for name, base, damage in _HEADERS),
    *(Case(f"GGUF: {name}", damaged("gguf", damage)) for name, damage in _GGUF),
    *(Case(name, build) for name, build in _DIRECTORIES.items()),
    *_cases("config", _CONFIGS),
    *_cases("config", _HARMLESS, expect="any"),
    *_cases("adapter", _ADAPTERS, base="adapter"),
    *_cases("tokenizer", _TOKENIZERS),
    *_cases("tokenizer", _FIFOS, expect="any"),
    *_cases("chat", {name: edits.content("chat_template.jinja", text) for name, text in _TEMPLATES.items()}),
    *_cases("training", _RUNS, base="run"),
]
