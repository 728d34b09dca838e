"""What is changed of which format: a sound checkpoint, the files in it, and the grammar of each."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.faults.corpus import bases, edits
from tests.faults.corpus.case import Case
from tests.faults.fuzz import binary_grammar, json_grammar, pickle_grammar

Ops = list[tuple[Any, ...]]
_GRAMMARS: dict[str, Any] = {"json": json_grammar, "pickle": pickle_grammar, "binary": binary_grammar}
_LOADING = ("generate", "load", "convert-huggingface", "convert-dcp", "diff")


@dataclass(frozen=True)
class Part:
    """A part of a file that has a grammar.

    Attributes:
        file: Its name in the checkpoint.
        grammar: `json`, `pickle` or `binary`.
        inside: Where in the file it is: `header` of safetensors, a member of a zip, a key of the header's metadata.
        is_sealed: Whether the manifest is sealed again around it; of the manifest itself, its own seal.
    """

    file: str
    grammar: str
    inside: str = ""
    is_sealed: bool = False


@dataclass(frozen=True)
class Format:
    """A sound checkpoint, what can be changed in it, and the commands that read that."""

    base: str
    parts: tuple[Part, ...]
    commands: tuple[str, ...] = _LOADING


_STEP = "checkpoints/step-00000001"
_RANK = "model_world_size_2_rank_1.pt"
_ZERO = "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
_MODEL_STATES = "global_step1/mp_rank_00_model_states.pt"
_HF = "shard-00002-model-00001-of-00001.safetensors"
FORMATS: dict[str, Format] = {
    "safetensors": Format(
        "model", (Part("model.safetensors", "json", "header"), Part("model.safetensors", "binary")), _LOADING
    ),
    "index": Format("indexed", (Part("model.safetensors.index.json", "json"),)),
    "manifest": Format("sealed", (Part("manifest.json", "json", is_sealed=True), Part("manifest.json", "json"))),
    "sharded": Format(
        "sharded",
        (
            Part("shard-00001-of-00002.safetensors", "json", "header"),
            Part("shard-00001-of-00002.safetensors", "json", "metadata:fsdp_shard"),
            Part("manifest.json", "json", is_sealed=True),
        ),
    ),
    "torch zip": Format(
        "pytorch", (Part("pytorch_model.bin", "pickle", "zip:data.pkl"), Part("pytorch_model.bin", "binary"))
    ),
    "torch stream": Format(
        "legacy", (Part("pytorch_model.bin", "pickle", "stream"), Part("pytorch_model.bin", "binary"))
    ),
    "dcp": Format("dcp", (Part(".metadata", "pickle"), Part("__0_0.distcp", "binary"))),
    "torch ranks": Format("torch-ranks", (Part(_RANK, "pickle", "zip:data.pkl"), Part(_RANK, "binary"))),
    "torch checkpointing": Format(
        "torch-checkpointing",
        (
            Part("metadata.pkl", "pickle"),
            Part("part-1.safetensors", "json", "header"),
            Part("optimizer_1.pt", "pickle", "zip:data.pkl"),
        ),
    ),
    "torch huggingface": Format(
        "torch-huggingface", (Part(_HF, "json", "header"), Part(_HF, "json", "metadata:DCP_SHARDING_INFO"))
    ),
    "deepspeed": Format(
        "deepspeed",
        (Part(_ZERO, "pickle", "zip:data.pkl"), Part(_MODEL_STATES, "pickle", "zip:data.pkl"), Part(_ZERO, "binary")),
    ),
    "gguf": Format(
        "gguf", (Part("model.gguf", "binary"),), ("generate", "chat", "load", "convert-huggingface", "plan")
    ),
    "adapter": Format(
        "adapter", (Part("adapter_config.json", "json"), Part("adapter_model.safetensors", "json", "header"))
    ),
    "config": Format(
        "model",
        (Part("config.json", "json"), Part("generation_config.json", "json")),
        ("generate", "evaluate", "load", "logits", "plan", "finetune", "convert-huggingface", "doctor"),
    ),
    "tokenizer": Format(
        "model",
        (Part("tokenizer.json", "json"), Part("tokenizer_config.json", "json")),
        ("generate", "chat", "evaluate", "logits", "finetune", "train-chat"),
    ),
    "training": Format(
        "run",
        (Part(f"{_STEP}/trainer.json", "json", is_sealed=True), Part("metrics.jsonl", "json")),
        ("resume", "resume"),
    ),
}


@st.composite
def examples(draw: st.DrawFn, name: str) -> tuple[int, Ops, str]:
    """(which part, the changes of it, a command besides those that every example goes through)."""
    chosen = FORMATS[name]
    number = draw(st.integers(0, len(chosen.parts) - 1))
    ops = draw(_GRAMMARS[chosen.parts[number].grammar].changes())
    return number, ops, draw(st.sampled_from(chosen.commands))


def encode(name: str, number: int, ops: Ops) -> str:
    """An example as the name of a case, which another process can build."""
    return base64.b64encode(pickle.dumps((name, number, ops))).decode()


def case(encoded: str) -> Case:
    """The case of such a name: nothing is known of it, so both an error and none are right."""
    name, number, ops = pickle.loads(base64.b64decode(encoded))
    return Case(encoded, bases.damaged(FORMATS[name].base, damage(FORMATS[name].parts[number], ops)), expect="any")


def damage(part: Part, ops: Ops) -> edits.Damage:
    """The damage that an example found, for the corpus: `damaged(BASE, damage(Part(...), [...]))`."""

    def apply(root: Path) -> None:
        file = root / part.file
        file.write_bytes(_changed(part, file.read_bytes(), ops))
        if part.is_sealed and part.file != "manifest.json":
            edits.sealed()(file.parent)

    return apply


def _changed(part: Part, data: bytes, ops: Ops) -> bytes:
    kind, _, name = part.inside.partition(":")
    if kind == "header":
        return _with_header(data, lambda header: json_grammar.changed(header, ops))
    if kind == "metadata":
        return _with_header(data, lambda header: _with_note(header, name, ops))
    if kind == "zip":
        return _with_member(data, name, ops)
    if kind == "stream":  # three pickles precede the one with the tensors
        start = _third_pickle(data)
        end = start + _pickle_length(data[start:])
        return data[:start] + pickle_grammar.changed(data[start:end], ops) + data[end:]
    if part.grammar == "json":
        text = json_grammar.changed(data.decode(), ops)
        return _sealed(text) if part.is_sealed and part.file == "manifest.json" else text.encode("utf-8", "replace")
    return bytes(_GRAMMARS[part.grammar].changed(data, ops))


def _with_header(data: bytes, change: Callable[[str], str]) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    text = change(data[8 : 8 + length].decode()).encode("utf-8", "replace")
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _with_note(header: str, key: str, ops: Ops) -> str:
    document = json.loads(header)
    document["__metadata__"][key] = json_grammar.changed(document["__metadata__"][key], ops)
    return json.dumps(document)


def _with_member(data: bytes, name: str, ops: Ops) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(written, "w") as out:
        for member in archive.namelist():
            content = archive.read(member)
            is_wanted = member.endswith(f"/{name}")
            out.writestr(member, pickle_grammar.changed(content, ops) if is_wanted else content)
    return written.getvalue()


def _third_pickle(data: bytes) -> int:
    start = 0
    for _ in range(3):
        start += _pickle_length(data[start:])
    return start


def _pickle_length(data: bytes) -> int:
    import pickletools

    (stop,) = (position for opcode, _, position in pickletools.genops(data) if opcode.name == "STOP")
    assert stop is not None
    return stop + 1


def _sealed(text: str) -> bytes:
    import xxhash

    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text.encode("utf-8", "replace")
    if not isinstance(document, dict):
        return text.encode("utf-8", "replace")
    document.pop("digest", None)
    start = json.dumps(document)[:-1] + ("," if document else "")
    return f'{start}"digest": "{xxhash.xxh3_128_hexdigest(start.encode())}"\n}}\n'.encode()
