from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.inspect_report import summarize_checkpoint
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.tensor_entry import Extra
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import even_edges, write_huggingface, write_ranks


def layers(count: int) -> dict[str, torch.Tensor]:
    tensors = {"embed.weight": torch.zeros(9, 4), "norm": torch.zeros(())}
    for layer in range(count):
        tensors[f"layers.{layer}.mlp.weight"] = torch.zeros(4, 4 if layer < count - 1 else 8, dtype=torch.bfloat16)
        tensors[f"layers.{layer}.norm.bias"] = torch.zeros(4)
    return tensors


def test_what_is_in_a_checkpoint(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", layers(12), head="embed.weight")
    convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    found = summarize_checkpoint(tmp_path / "ranks")
    assert (found.format, found.layout, found.world_size, found.integrity) == ("sharded", "sharded", 2, "digests")
    assert found.num_tensors == 26
    assert found.num_parameters == 36 + 1 + 12 * 4 + 11 * 16 + 32
    assert found.bytes_by_dtype == {"bfloat16": 416, "float32": 340}
    assert found.num_bytes == 756
    assert [file.name for file in found.files] == [f"shard-0000{r}-of-00002.safetensors" for r in range(2)]
    assert 1 <= found.balance < 1.5
    assert found.tied == {"head": "embed.weight"}


def test_the_tree_is_folded_by_layer(tmp_path: Path) -> None:
    with open_checkpoint(write_huggingface(tmp_path, layers(12))) as index:
        text = summarize_checkpoint(index).to_text()
    assert "layers\n  0..10 (11 alike)\n" in text
    assert "    mlp.weight  BF16  4 x 4  352 B in 11\n" in text
    assert "    norm.bias  F32  4  176 B in 11\n" in text
    assert "    mlp.weight  BF16  4 x 8  64 B\n" in text
    assert "embed.weight  F32  9 x 4  144 B\n" in text
    assert "norm  F32  scalar  4 B" in text
    assert "no manifest" in text


def test_json_and_chosen_tensors(tmp_path: Path) -> None:
    document = json.loads(summarize_checkpoint(write_huggingface(tmp_path, layers(2)), "*.mlp.*").to_json())
    assert [tensor["name"] for tensor in document["tensors"]] == ["layers.0.mlp.weight", "layers.1.mlp.weight"]
    assert document["num_tensors"] == 6
    assert document["tensors"][0] == {
        "name": "layers.0.mlp.weight",
        "dtype": "BF16",
        "shape": [4, 4],
        "num_bytes": 32,
        "files": ["model.safetensors"],
    }


def test_a_part_of_a_name_is_a_pattern_too(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", layers(2), head="embed.weight")
    convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    found = summarize_checkpoint(tmp_path / "ranks", "head")
    assert [tensor.name for tensor in found.tensors] == ["embed.weight"]  # what it is tied to
    assert found.tensors[0].files == ("shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors")
    lines = summarize_checkpoint(source, "mlp").to_list().splitlines()
    assert lines == [
        f"layers.{n}.mlp.weight  BF16  4 x {4 * (n + 1)}  {32 * (n + 1)} B  model.safetensors" for n in range(2)
    ]
    with pytest.raises(CheckpointError, match=r"no tensor that layers\.0\.mpl\.weight fits \(did you mean layers"):
        summarize_checkpoint(source, "layers.0.mpl.weight")
    with pytest.raises(CheckpointError, match=r"that attention fits; it has embed\.weight, .* and 3 more"):
        summarize_checkpoint(source, "attention")


def test_integrity_at_a_glance_reads_no_data(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", layers(1))
    assert "no manifest" in summarize_checkpoint(source).to_text()
    convert(source, tmp_path / "model")
    assert "all files are there" in summarize_checkpoint(tmp_path / "model").to_text()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = summarize_checkpoint(tmp_path / "model")
    assert found.manifest_problems == (f"{tmp_path / 'model' / 'config.json'} has 2 bytes, but 43 were written.",)
    assert "DAMAGED: " in found.to_text()
    (tmp_path / "model" / "config.json").unlink()
    assert "is missing" in summarize_checkpoint(tmp_path / "model").to_text()


def test_a_file_is_not_judged_by_the_manifest_of_its_directory(tmp_path: Path) -> None:
    convert(write_huggingface(tmp_path / "source", layers(1)), tmp_path / "model")
    other = {name: tensor + 1 for name, tensor in layers(1).items()}
    file = (
        write_huggingface(tmp_path / "other", other)
        .joinpath("model.safetensors")
        .rename(tmp_path / "model" / "ema.safetensors")
    )
    assert "no manifest" in summarize_checkpoint(file).to_text()
    convert(file, tmp_path / "converted")
    with open_checkpoint(tmp_path / "converted") as index:
        assert all(torch.equal(index.read(name), other[name]) for name in other)
    part = file.rename(file.with_name("model-00001-of-00002.safetensors"))
    assert summarize_checkpoint(part).num_tensors == len(other)
    with pytest.raises(CheckpointError, match="is one of 2 files of a model; give their directory"):
        convert(part, tmp_path / "part")
    (part.parent / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors, one of 2 files of a model, without"):
        convert(part.parent, tmp_path / "part")


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    root = write_huggingface(tmp_path / "step", layers(1))
    states = {"embed.weight.exp_avg": torch.zeros(9, 4), "embed.weight.step": torch.zeros(())}
    write_ranks(root / "optimizer", states, even_edges(states, 2))
    found = summarize_checkpoint(root)
    assert found.extras == {"optimizer": Extra(2, 148)}
    assert "optimizer:   2 tensors, 148 B" in found.to_text()
    with open_checkpoint(root) as index:
        index.extras = {"adapter": Extra(1, 8), "optimizer": Extra(3, 10)}
        assert summarize_checkpoint(index).extras == {"adapter": Extra(1, 8), "optimizer": Extra(5, 158)}


def test_many_files_are_folded(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", {"w": torch.zeros(80)})
    convert(source, tmp_path / "ranks", format="sharded", ranks=20)
    assert "  ... and 4 more (--json lists all)" in summarize_checkpoint(tmp_path / "ranks").to_text().splitlines()


def test_names_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    write_huggingface(tmp_path, {"a\x1b[31m\nWEIGHT": torch.ones(2)})
    found = summarize_checkpoint(tmp_path)
    assert "a\\x1b[31m\\nWEIGHT" in found.to_text()
    assert "\x1b" not in found.to_text() + found.to_list()
    assert found.tensors[0].name == "a\x1b[31m\nWEIGHT"


def test_a_checkpoint_without_tensors_has_an_empty_list(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert summarize_checkpoint(tmp_path / "model.safetensors").to_list() == ""
