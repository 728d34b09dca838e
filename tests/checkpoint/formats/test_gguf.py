from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fsdp_shard.checkpoint.location import locate, open_checkpoint
from fsdp_shard.errors import CheckpointError, ModelError
from fsdp_shard.models import gguf_model_files
from tests.checkpoint.files import raw_bytes
from tests.support.commands import run
from tests.support.gguf_models import HEADS, HIDDEN, VOCABULARY, load_with_transformers, write_gguf
from tests.support.tiny import byte_tokenizer

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(
    ("architecture", "kind", "tied"),
    [("llama", "Q8_0", False), ("llama", "Q4_1", True), ("qwen2", "F16", False), ("qwen3", "BF16", True)],
)
def test_names_and_values_are_those_of_transformers(tmp_path: Path, architecture: str, kind: str, tied: bool) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture, gguf.GGMLQuantizationType[kind], tied=tied)
    expected = dict(load_with_transformers(path).named_parameters())
    with open_checkpoint(path) as index:
        assert index.format == "gguf"
        assert set(index.names) == set(expected)
        assert index.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
        for name, parameter in expected.items():
            assert index.dtypes[name] == "F32"
            assert torch.equal(index.read(name), parameter), name


def test_a_config_beside_the_file_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories of GGUF files often have one that only names the model type. transformers reads the file's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    path = write_gguf(tmp_path / "model" / "model.gguf", "llama", gguf.GGMLQuantizationType.F16)
    (path.parent / "config.json").write_text('{"model_type": "llama", "rope_theta": 5}')
    found = AutoConfig.from_pretrained(locate(path.parent).config_directory)
    expected = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    assert (found.hidden_size, found.num_hidden_layers, found.rope_parameters) == (
        expected.hidden_size, expected.num_hidden_layers, expected.rope_parameters,
    )  # fmt: skip


def test_parts_are_decoded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_shard.checkpoint.formats.gguf._DECODE_ELEMENTS", 128)
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q4_0)
    with open_checkpoint(tmp_path) as index:  # a directory with one .gguf file
        assert index.root / index.metadata["file"] == path
        for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"):
            whole = index.read(name)
            assert torch.equal(index.read(name, (slice(5, 21), slice(3, 50))), whole[5:21, 3:50])
            for start, stop in ((0, 1), (70, 71), (63, 65), (31, 2011), (2000, 2048)):
                out = bytearray(4 * (stop - start))
                index.read_into(name, start, out)
                assert out == raw_bytes(whole.reshape(-1)[start:stop])


def test_computed_tensors_are_left_out_and_unknown_ones_refused(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / "a.gguf", "llama", kind, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    with open_checkpoint(path) as index:
        assert not [name for name in index.names if "rope" in name]
    path = write_gguf(tmp_path / "b.gguf", "llama", kind, extra={"blk.0.ffn_gate_exps.weight": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"b\.gguf has a tensor blk\.0\.ffn_gate_exps\.weight, which no llama"):
        open_checkpoint(path)
    path = write_gguf(tmp_path / "c.gguf", "mamba", kind)
    with pytest.raises(CheckpointError, match="architecture 'mamba'; GGUF files of llama, qwen2, qwen3"):
        open_checkpoint(path)


def test_long_rotary_frequencies_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers computes them from the config that a conversion has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kind, u32, f32, text = (
        gguf.GGMLQuantizationType.F16,
        *(getattr(gguf.GGUFValueType, name) for name in ("UINT32", "FLOAT32", "STRING")),
    )
    of: dict[str, Any] = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    of |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    llama3 = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HIDDEN // HEADS, rope_parameters=of)
    plain = AutoConfig.for_model(
        "llama", hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HIDDEN // HEADS, rope_theta=500000.0
    )
    assert isinstance(plain, LlamaConfig)
    wanted = LlamaRotaryEmbedding(llama3).inv_freq
    factors = (LlamaRotaryEmbedding(plain).inv_freq / wanted).numpy()
    assert factors.max() == pytest.approx(8)
    base = {"llama.rope.freq_base": (500000.0, f32)}
    path = write_gguf(tmp_path / "a.gguf", "llama", kind, extra={"rope_freqs.weight": factors}, values=base)
    found = LlamaConfig.from_pretrained(gguf_model_files(path))
    assert torch.allclose(LlamaRotaryEmbedding(found).inv_freq, wanted)
    path = write_gguf(tmp_path / "b.gguf", "llama", kind, extra={"rope_freqs.weight": factors[::-1]}, values=base)
    with pytest.raises(ModelError, match=r"b\.gguf divides its rotary frequencies by factors"):
        gguf_model_files(path)
    scaled = {"llama.rope.scaling.type": ("yarn", text), "llama.rope.scaling.factor": (4.0, f32)}
    scaled |= {"llama.rope.scaling.original_context_length": (16, u32)}
    path = write_gguf(tmp_path / "c.gguf", "llama", kind, values=scaled)
    found = LlamaConfig.from_pretrained(gguf_model_files(path))
    rope: Any = found.rope_parameters
    assert rope["rope_type"] == "yarn"
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (4.0, 16)
    one = {"llama.rope.scaling.type": ("linear", text), "llama.rope.scaling.factor": (0.0, f32)}
    found = LlamaConfig.from_pretrained(gguf_model_files(write_gguf(tmp_path / "d.gguf", "llama", kind, values=one)))
    rope = found.rope_parameters
    assert rope["rope_type"] == "default"
    for number, key in enumerate(("rope.scaling.factor", "rope.scale_linear")):  # llama.cpp's default type
        path = write_gguf(tmp_path / f"{number}.gguf", "llama", kind, values={f"llama.{key}": (4.0, f32)})
        rope = LlamaConfig.from_pretrained(gguf_model_files(path)).rope_parameters
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    both = {"llama.rope.scaling.factor": (2.0, f32), "llama.rope.scale_linear": (4.0, f32)}
    path = write_gguf(tmp_path / "both.gguf", "llama", kind, values=both)
    rope = LlamaConfig.from_pretrained(gguf_model_files(path)).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 2.0)
    none = {"llama.rope.scaling.type": ("none", text), "llama.rope.scale_linear": (4.0, f32)}
    path = write_gguf(tmp_path / "none.gguf", "llama", kind, values=none)
    rope = LlamaConfig.from_pretrained(gguf_model_files(path)).rope_parameters
    assert rope["rope_type"] == "default"
    path = write_gguf(
        tmp_path / "e.gguf", "llama", kind, values=scaled | {"llama.rope.scaling.attn_factor": (0.5, f32)}
    )
    with pytest.raises(ModelError, match=r"not supported \(type yarn, llama\.rope\.scaling\.attn_factor\)"):
        gguf_model_files(path)


def test_neither_a_part_nor_a_neighbor_is_taken_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kind, u16 = gguf.GGMLQuantizationType.F16, gguf.GGUFValueType.UINT16
    part = write_gguf(tmp_path / "m-00001-of-00002.gguf", "llama", kind, values={"split.count": (2, u16)})
    with pytest.raises(CheckpointError, match="is one of 2 files that hold a model together; join them"):
        open_checkpoint(part)
    path = write_gguf(tmp_path / "model.gguf", "llama", kind)
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(gguf_model_files(path))) == VOCABULARY


@pytest.mark.long
def test_imports_take_nothing_of_the_time(tmp_path: Path) -> None:
    """A small file is granted little time, and the first process to read one imports much of transformers for it."""
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F16)
    program = "import sys, pathlib, fsdp_shard.models as m; m.gguf_model_files(pathlib.Path(sys.argv[1]))"
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "FSDP_SHARD_LIMITS": "build_seconds=0.6"}
    done = run([sys.executable, "-c", program, str(path)], tmp_path, **environment)
    assert done.status == 0, done.err
    assert list((tmp_path / "cache").rglob("tokenizer.json"))


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_heads_of_contradicting_widths_are_refused(tmp_path: Path, architecture: str, is_rotated: bool) -> None:
    """The rows of llama's heads are put in order by their number; of qwen2 they are stored so."""
    kind, u32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFValueType.UINT32
    values = {f"{architecture}.rope.dimension_count": (HIDDEN // HEADS, u32)} if is_rotated else {}
    path = write_gguf(tmp_path / "model.gguf", architecture, kind, values=values)
    open_checkpoint(path).close()
    key = f"{architecture}.attention.head_count".encode() + struct.pack("<I", u32)
    path.write_bytes(path.read_bytes().replace(key + struct.pack("<I", HEADS), key + struct.pack("<I", HEADS // 2)))
    if architecture == "qwen2":
        open_checkpoint(path).close()
    else:
        with pytest.raises(CheckpointError, match=r"model\.gguf contradicts itself: .* 32 by blk\.0\.attn_q\.weight, "):
            open_checkpoint(path)


def test_damage_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)
    content = path.read_bytes()
    for length in (10, 30, 300, 2000, len(content) - 100_000, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf .*cut short"):
            open_checkpoint(path)
    changes = {
        content.replace(struct.pack("<I", 3), struct.pack("<I", 9), 1): "version 9",
        content.replace(b"token_embd.weight", b"output.weight\0\0\0\0", 1): "which no llama|twice",
        content.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"): "blk.0.attn_k.weight twice",
        content.replace(b"llama.attention.head_count\x04\0\0\0", b"llama.attention.head_kount\x04\0\0\0"): "heads",
        content[:8] + struct.pack("<Q", 2**60) + content[16:]: "cut short|unknown|dimensions",
        content[:16] + struct.pack("<Q", 2**60) + content[24:]: "cut short|unknown|UTF-8|twice",
    }
    for changed, message in changes.items():
        if changed == content:
            continue
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)
