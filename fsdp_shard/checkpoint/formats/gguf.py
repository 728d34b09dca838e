"""Format `gguf`: GGUF files of decoder-only models, with Hugging Face names, decoded to float32 on read.

Names and values equal those of transformers' `from_pretrained(gguf_file=)` (`modeling_gguf_pytorch_utils`) bit by bit.
A slice is decoded without the rest of its tensor, and neither torch nor transformers is imported.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats.gguf_header import GGUFHeader, GGUFTensor, is_gguf, read_gguf_header
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import page_aligned
from fsdp_shard.checkpoint.tensor_entry import Codec, Piece, Read, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import GGUF_FORMAT as NAME
from fsdp_shard.utils import require_package

_F32 = 0
# Elements decoded at a time, so that the temporaries of gguf's decoders (about 5 floats each) fit in the cache.
_DECODE_ELEMENTS = 1 << 15

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Architectures with exactly these tensors. llama.cpp interleaves the rows of q and k for llama's kind of rotary
# embedding, which transformers undoes; the others are stored unchanged.
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
_COMPUTED = frozenset({"rope_freqs.weight"})  # not weights: `models` derives them from the config


def recognize(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a directory with exactly one `.gguf` file."""
    return is_gguf(path) or (path.is_dir() and _only_file(path) is not None)


def read(path: Path) -> TensorIndex:
    """Return the index of a GGUF file: every tensor is F32, in one piece, with a codec unless it is stored as F32."""
    file = path if path.is_file() else path / str(_only_file(path))
    if path.is_file():
        file = file.resolve()  # the user named this file, so a link is followed
    header = read_gguf_header(file, _block_of(file))
    if (count := header.values.get("split.count", 1)) != 1:
        raise CheckpointError(
            f"{file} is one of {count} files that hold a model together; join them with `llama-gguf-split --merge`."
        )
    architecture = header.values.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(
            f"{file} holds a model of the architecture {architecture!r}; GGUF files of {known} can be read."
        )
    if not header.tensors:
        raise CheckpointError(f"{file} has no tensors.")
    tensors = {}
    for stored, tensor in header.tensors.items():
        if stored in _COMPUTED:
            continue
        name = _name(stored)
        if name is None:
            raise CheckpointError(f"{file} has a tensor {stored}, which no {architecture} model in transformers has.")
        codec = _codec(file, stored, tensor, header)
        piece = Piece(file.name, tensor.start, (0,) * len(tensor.shape), tensor.shape, codec)
        tensors[name] = TensorEntry(name, "F32", tensor.shape, (piece,))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    aliases = {head: embedding} if embedding in tensors and head not in tensors else {}
    return TensorIndex(file.parent, NAME, tensors, aliases, {"file": file.name, "architecture": architecture})


def _only_file(path: Path) -> str | None:
    found = [entry.name for entry in path.iterdir() if entry.suffix == ".gguf"]
    return found[0] if len(found) == 1 else None


def _name(stored: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None if there is no such parameter."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    if match is None:
        return None
    layer, kind, suffix = match.groups()
    name = (_TOP if layer is None else _IN_LAYER).get(kind)
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{name}.{suffix}" if name else None


def _block_of(file: Path) -> Any:
    require_package("gguf", "gguf", f"{file} is a GGUF file: reading it")
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    def block_of(kind: int) -> tuple[int, int] | None:
        try:
            known = GGMLQuantizationType(kind)
            elements, num_bytes = GGML_QUANT_SIZES[known]
            dequantize(np.zeros((1, num_bytes), np.uint8), known)
        except (ValueError, KeyError, NotImplementedError):  # gguf knows sizes of more types than it decodes
            return None
        return int(elements), int(num_bytes)

    return block_of


def _codec(file: Path, stored: str, tensor: GGUFTensor, header: GGUFHeader) -> Codec | None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    blocks = BlockCodec(tensor.kind, int(elements), int(block_bytes), tensor.num_bytes)
    if _ARCHITECTURES[header.values["general.architecture"]] and _heads_setting(stored):
        row = tensor.shape[1] if len(tensor.shape) > 1 else 1
        return InterleavedCodec(blocks, _head_rows(file, stored, header), row)
    return None if tensor.kind == _F32 else blocks


def _heads_setting(stored: str) -> str | None:
    return {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(stored.split(".")[-2])


def _head_rows(file: Path, stored: str, header: GGUFHeader) -> int:
    """The rows per attention head of a tensor, which must equal those of the other tensor and the rotated ones.

    transformers assumes that llama's heads are fully rotated. Heads of another width would be reordered wrongly.
    """
    architecture, found = header.values["general.architecture"], dict[str, int]()
    for name in (stored, stored.replace("attn_q", "attn_k"), stored.replace("attn_k", "attn_q")):
        if name in header.tensors:
            every = header.values.get(f"{architecture}.attention.head_count")
            num_heads = header.values.get(f"{architecture}.attention.{_heads_setting(name)}", every)
            rows = header.tensors[name].shape[0]
            if type(num_heads) is not int or num_heads < 1 or rows % (2 * num_heads):
                raise CheckpointError(f"{file} gives {num_heads!r} heads for the {rows} rows of tensor {name}.")
            found[name] = rows // num_heads
    if (rotated := header.values.get(f"{architecture}.rope.dimension_count")) is not None:
        found["rope.dimension_count"] = rotated
    if set(found.values()) != {found[stored]}:
        widths = ", ".join(f"{value} by {name}" for name, value in found.items())
        raise CheckpointError(f"{file} contradicts itself: the rows of each attention head are {widths}.")
    return found[stored]


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Decodes contiguous ggml blocks to float32; `elements` and `block_bytes` are those of one block."""

    kind: int
    elements: int
    block_bytes: int
    num_bytes: int

    def decode_into(self, read: Read, start: int, out: memoryview) -> None:
        import numpy as np
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(self.kind)
        target = np.frombuffer(out, np.float32)
        stop = start + len(target)
        step = _DECODE_ELEMENTS // self.elements
        stored = np.frombuffer(page_aligned(step * self.block_bytes), np.uint8).reshape(1, -1)
        first, last = start // self.elements, -(-stop // self.elements)
        for block in range(first, last, step):
            part = stored[:, : min(step, last - block) * self.block_bytes]
            read(block * self.block_bytes, memoryview(part[0]))
            values = dequantize(part, kind).reshape(-1)
            _copy_overlap(target, start, values, block * self.elements)


def _copy_overlap(target: Any, start: int, values: Any, at: int) -> None:
    """Copy the overlap of `values`, which begin at element `at`, into `target`, which begins at element `start`."""
    low, high = max(at, start), min(at + len(values), start + len(target))
    target[low - start : high - start] = values[low - at : high - at]


@dataclass(frozen=True, slots=True)
class InterleavedCodec:
    """Restores transformers' order of the rows in each attention head: (pairs, 2) becomes (2, pairs).

    Source: `LlamaTensorProcessor._reverse_permute_weights`. One head at a time is decoded.
    """

    inner: BlockCodec
    head_rows: int
    row: int

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    def decode_into(self, read: Read, start: int, out: memoryview) -> None:
        import numpy as np

        target = np.frombuffer(out, np.float32)
        stop, size = start + len(target), self.head_rows * self.row
        head: Any = np.empty(size, np.float32)
        for at in range(start // size * size, stop, size):
            self.inner.decode_into(read, at, memoryview(head).cast("B"))
            values = head.reshape(self.head_rows // 2, 2, self.row).swapaxes(0, 1).reshape(-1)
            _copy_overlap(target, start, values, at)
