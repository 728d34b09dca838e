from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from fsdp_shard.checkpoint import conversion as convert_module, transfer
from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.digests import file_digest, read_chunk_digests, record_file, record_tensor
from fsdp_shard.checkpoint.integrity import verify as verification
from fsdp_shard.checkpoint.integrity.scan import scan
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.io import pwrite_all
from fsdp_shard.checkpoint.location import locate, open_checkpoint
from fsdp_shard.checkpoint.model_files import copy_model_files
from fsdp_shard.checkpoint.steps.manifest import Manifest, read_manifest
from fsdp_shard.checkpoint.steps.step_store import StepStore
from fsdp_shard.data import DataConfig
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from fsdp_shard.models import ModelConfig
from fsdp_shard.training import collect_model_files
from fsdp_shard.utils import hold_lock
from tests.checkpoint.files import assert_same, even_edges, random_tensor, uneven, write_huggingface, write_ranks
from tests.support.digests import tensor_digests
from tests.support.tiny import llama, save_adapter, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama as transformers saves it, with files of a tokenizer beside it."""
    root = tmp_path_factory.mktemp("model")
    llama().save_pretrained(root)
    (root / "tokenizer.json").write_text("{}")
    (root / "chat_template.jinja").write_text("{{ messages }}")
    (root / "training_args.bin").write_bytes(b"a pickle")
    return root


def digests(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as index:
        return tensor_digests(index)


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_through_ranks_and_pieces_back_to_one_file(tmp_path: Path, model_dir: Path) -> None:
    report = convert(model_dir, tmp_path / "ranks", format="sharded", ranks=3)
    assert (report.source_format, report.target_format, report.verified) == ("huggingface", "sharded", True)
    convert(tmp_path / "ranks", tmp_path / "pieces", max_shard_size="40KB")
    assert len([name for name in names(tmp_path / "pieces") if name.endswith(".safetensors")]) > 2
    assert all((tmp_path / "pieces" / name).stat().st_size < 41_000 for name in names(tmp_path / "pieces"))
    report = convert(tmp_path / "pieces", tmp_path / "one", verify=False)
    assert not report.verified
    assert names(tmp_path / "one") == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "manifest.json",
    }
    assert report.num_tensors == len(digests(model_dir))
    assert report.num_bytes == os.path.getsize(model_dir / "model.safetensors") - _header_bytes(model_dir)
    assert (
        digests(tmp_path / "ranks") == digests(tmp_path / "pieces") == digests(tmp_path / "one") == digests(model_dir)
    )
    for target in ("ranks", "pieces", "one"):
        assert verify(tmp_path / target).is_sound
    expected = llama().state_dict()
    for target in ("pieces", "one"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / target).state_dict()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")


def test_awkward_tensors_survive(tmp_path: Path) -> None:
    tensors = uneven()
    source = write_ranks(tmp_path / "source", tensors, even_edges(tensors, 4))
    convert(source, tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "ranks", format="sharded", ranks=5)
    for path in (tmp_path / "one", tmp_path / "ranks"):
        with open_checkpoint(path) as index:
            assert_same(index, tensors)


def test_large_tensors_go_in_chunks_to_several_files(tmp_path: Path) -> None:
    tensors = {"w": random_tensor((3, 700_001), torch.bfloat16), "v": random_tensor((9_000_001,), torch.float32)}
    source = write_huggingface(tmp_path / "source", tensors)
    report = convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert digests(tmp_path / "ranks") == digests(source)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64 to float32"])
def test_casts_are_those_of_torch(tmp_path: Path, dtype: str) -> None:
    tensors = {
        "w": torch.randn(3, 400_001) * 100,
        "half": torch.randn(5, 3).bfloat16(),
        "double": torch.randn(600_000, dtype=torch.float64),
        "steps": torch.arange(5),
    }
    name = dtype.split()[-1]
    wanted = getattr(torch, name)
    convert(write_huggingface(tmp_path / "source", tensors), tmp_path / "target", dtype=wanted)
    expected = {key: t.to(wanted) if t.is_floating_point() else t for key, t in tensors.items()}
    with open_checkpoint(tmp_path / "target") as index:
        assert_same(index, expected)
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == {"model_type": "lamma", "dtype": name}
    assert verify(tmp_path / "target").is_sound


def test_config_says_what_was_written_also_in_its_parts(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", {"w": torch.zeros(3, dtype=torch.bfloat16)})
    part = {
        "text_config": {"torch_dtype": "float32"},
        "vision_config": {"depth": 1},
        "quantization_config": {"dtype": "x"},
    }
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float32", **part}))
    convert(source, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == {
        "torch_dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16"},
        "vision_config": {"depth": 1},
        "quantization_config": {"dtype": "x"},
    }


def test_an_unchanged_config_is_copied_byte_for_byte(tmp_path: Path, model_dir: Path) -> None:
    convert(model_dir, tmp_path / "target")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "target" / name).read_bytes() == (model_dir / name).read_bytes()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    tensors = {"embed": random_tensor((4, 3), torch.float32)}
    source = write_huggingface(tmp_path / "source", tensors, head="embed")
    convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    (tmp_path / "ranks" / "manifest.json").unlink()  # the files say it too
    convert(tmp_path / "ranks", tmp_path / "one")
    with open_checkpoint(tmp_path / "one") as index:
        assert (index.names, index.aliases) == (["embed"], {"head": "embed"})


def run_dir(root: Path, model_dir: Path) -> Path:
    """A run with two steps, as training leaves them."""
    store = StepStore(root / "checkpoints")
    for step in (5, 10):
        convert(model_dir, root / "saved", format="sharded", ranks=2, overwrite=True)
        manifest = read_manifest(root / "saved")
        assert manifest is not None
        temporary = store.begin(step)
        for entry in (root / "saved").iterdir():
            (temporary / entry.name).write_bytes(entry.read_bytes())
        (temporary / "trainer.json").write_text("{}")
        (temporary / "optimizer").mkdir()
        store.commit(temporary, step, Manifest(**{**vars(manifest), "step": step}))
    store.set_latest(5)
    return root


def test_a_run_converts_to_a_plain_model_directory(tmp_path: Path, model_dir: Path) -> None:
    run = run_dir(tmp_path / "run", model_dir)
    convert(run, tmp_path / "model")
    assert digests(tmp_path / "model") == digests(model_dir)
    assert not {"trainer.json", "optimizer"} & names(tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as index:
        assert index.step == 10, "the last that is committed, wherever `latest` points"
    with pytest.raises(CheckpointError, match="contains the source"):
        convert(run, run, overwrite=True)
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        convert(model_dir, run, overwrite=True)
    for step in (5, 12):
        with pytest.raises(CheckpointError, match=rf"step-0*{step} would be a step of the run .* another target"):
            convert(model_dir, run / f"checkpoints/step-{step:08}", overwrite=True)


def test_an_existing_target_is_safe(tmp_path: Path, model_dir: Path) -> None:
    target = tmp_path / "target"
    convert(model_dir, target, format="sharded", ranks=2)
    before = names(target)
    with pytest.raises(CheckpointError, match="overwrite=true"):
        convert(model_dir, target)
    assert names(target) == before
    convert(model_dir, target, overwrite=True)
    assert "model.safetensors" in names(target)
    assert not any(name.startswith("shard") for name in names(target))
    convert(target, target, overwrite=True, format="sharded", ranks=4)  # even onto itself
    assert digests(target) == digests(model_dir)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        convert(model_dir, tmp_path / "thesis", overwrite=True)
    (tmp_path / "empty").mkdir()
    convert(model_dir, tmp_path / "empty")
    assert names(tmp_path) == {"target", "thesis", "empty"}


def test_a_failed_conversion_leaves_what_was_there(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    convert(model_dir, target)
    before = {name: (target / name).read_bytes() for name in names(target)}

    def full(descriptor: int, offset: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "pwrite_all", full)
    with pytest.raises(SaveError, match="No space left on device; nothing of it was kept"):
        convert(model_dir, target, overwrite=True)
    with pytest.raises(SaveError):
        convert(model_dir, tmp_path / "new")
    assert names(tmp_path) == {"target"}
    assert {name: (target / name).read_bytes() for name in names(target)} == before


def test_what_was_written_is_compared(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(descriptor: int, offset: int, data: memoryview) -> None:
        pwrite_all(
            descriptor, offset, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])) if data and offset > 10_000 else data
        )

    monkeypatch.setattr(transfer, "pwrite_all", flip)
    with pytest.raises(SaveError, match="was not read back as written"):
        convert(model_dir, tmp_path / "target")
    assert names(tmp_path) == set()


def test_damage_of_the_source_is_not_passed_on(tmp_path: Path, model_dir: Path) -> None:
    convert(model_dir, tmp_path / "source", format="sharded", ranks=2)
    path = tmp_path / "source" / "shard-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    for dtype in (None, "bfloat16"):
        with pytest.raises(CheckpointError, match=r"shard-00001-of-00002\.safetensors .*damaged"):
            convert(tmp_path / "source", tmp_path / "target", dtype=dtype)
    assert names(tmp_path) == {"source"}


def test_free_space_is_checked_first(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(SaveError, match=r"has 0\.98 KiB free, but target takes"):
        convert(model_dir, tmp_path / "target")
    assert names(tmp_path) == set()


def test_only_what_a_killed_conversion_left_is_removed(tmp_path: Path, model_dir: Path) -> None:
    dead, alive, linked = (tmp_path / f".target.partial-{letter * 32}" for letter in "abc")
    alien = tmp_path / f".target.partial-{'d' * 32}"
    outside = tmp_path / "outside"
    for directory in (dead, alive, alien, outside):
        directory.mkdir()
        (directory / "file").touch()
    linked.symlink_to(outside)
    locks = {each: hold_lock(each.with_name(f"{each.name}.lock")) for each in (dead, alive, linked)}
    for each in (dead, linked):
        os.close(locks[each])
    convert(model_dir, tmp_path / "target")
    os.close(locks[alive])
    kept = {alive.name, f"{alive.name}.lock", linked.name, f"{linked.name}.lock", alien.name, "outside"}
    assert names(tmp_path) == {"target", *kept}
    assert (outside / "file").exists()


def test_a_step_that_is_deleted_while_it_is_read(tmp_path: Path, model_dir: Path, monkeypatch: Any) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        convert(model_dir, StepStore(run / "checkpoints").path(step))
    deleted: list[int] = []

    def delete(*arguments: Any, **named: Any) -> list[str]:
        """As the retention of a running training does, at the first of these calls."""
        if not deleted:
            latest = StepStore(run / "checkpoints").latest()
            assert latest is not None
            deleted.append(latest)
            StepStore(run / "checkpoints").delete(latest)
        return copy_model_files(*arguments, **named)

    monkeypatch.setattr(convert_module, "copy_model_files", delete)
    convert(run, tmp_path / "target")  # the latest step at that time
    assert deleted == [2]
    assert verify(tmp_path / "target").is_sound
    deleted.clear()
    with pytest.raises(CheckpointError, match=r"step-00000001 was deleted while it was read.*keep_last.*RUN@latest"):
        convert(f"{run}@step-1", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_step_that_is_deleted_while_it_is_verified(tmp_path: Path, model_dir: Path, monkeypatch: Any) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        convert(model_dir, StepStore(run / "checkpoints").path(step))
    doomed = [2]

    def delete(*arguments: Any) -> Any:
        if doomed:
            StepStore(run / "checkpoints").delete(doomed.pop())
        return scan(*arguments)

    monkeypatch.setattr(verification, "scan", delete)
    assert verify(run).is_sound  # the latest step at that time
    doomed.append(1)
    with pytest.raises(CheckpointError, match=r"step-00000001 was deleted while it was read"):
        verify(f"{run}@step-1")


def test_a_step_that_loses_its_optimizer_while_it_is_verified(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StepStore(tmp_path / "checkpoints")
    for step in (1, 2):
        convert(model_dir, step_directory := store.path(step))
        (step_directory / "optimizer").mkdir()
        (step_directory / "optimizer" / "state").write_text("momentum")
        manifest = read_manifest(step_directory)
        assert manifest is not None
        manifest.files["optimizer/state"] = record_file(step_directory / "optimizer" / "state")
        (step_directory / "manifest.json").write_text(manifest.to_json())

    def drop(path: Path) -> str:
        store.drop_optimizer(1)
        return file_digest(path)

    monkeypatch.setattr(verification, "file_digest", drop)
    assert verify(store.path(1)).is_sound
    assert not (store.path(1) / "optimizer").exists()
    (store.path(2) / "optimizer" / "state").unlink()
    assert not verify(store.path(2)).is_sound


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "sharded"}, "ranks is not set"),
        ({"ranks": 2}, "ranks=2 needs format=sharded"),
        ({"format": "sharded", "ranks": 0}, "ranks=0 is out of range"),
        ({"format": "sharded", "ranks": 2, "max_shard_size": "1GB"}, "max_shard_size is for format=huggingface"),
        ({"format": "shraded"}, "did you mean sharded"),
        ({"max_shard_size": "big"}, "max_shard_size=big is not a size"),
        ({"dtype": "int8"}, "dtype=int8 is not one of"),
    ],
)
def test_wrong_settings(tmp_path: Path, model_dir: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(model_dir, tmp_path / "target", **settings)


def test_all_chat_templates_go_along(tiny_model: Path, tmp_path: Path) -> None:
    templates = {"default": "{{ messages }}", "rag": "{{ documents }}"}
    source = shutil.copytree(tiny_model, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source)
    convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    convert(tmp_path / "ranks", tmp_path / "target")
    assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == templates
    files = collect_model_files(locate(tmp_path / "ranks"), ModelConfig(dtype="float32"), DataConfig())
    assert "additional_chat_templates/rag.jinja" in files
    convert(tmp_path / "ranks", tmp_path / "target", overwrite=True)
    (tmp_path / "target" / "additional_chat_templates" / "mine.jinja").touch()
    with pytest.raises(CheckpointError, match=r"holds additional_chat_templates/mine\.jinja"):
        convert(tiny_model, tmp_path / "target", overwrite=True)


def test_the_tokens_of_tiktoken_go_along(tmp_path: Path, model_dir: Path) -> None:
    source = Path(shutil.copytree(model_dir, tmp_path / "source"))
    (source / "tiktoken.model").write_text("AA== 0\n")  # as Kimi's, which code of the model reads
    convert(source, tmp_path / "target")
    assert (tmp_path / "target" / "tiktoken.model").read_text() == "AA== 0\n"


def test_gguf_becomes_a_model_that_transformers_opens(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.support.gguf_models import load_with_transformers, write_gguf

    path = write_gguf(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q8_0, tied=True)
    report = convert(path, tmp_path / "target")
    assert (report.source_format, report.target_format) == ("gguf", "huggingface")
    expected = load_with_transformers(path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert {"tokenizer_config.json", "generation_config.json"} <= names(tmp_path / "target")
    with open_checkpoint(tmp_path / "target") as index:
        assert "lm_head.weight" not in index.names


def test_moving_bytes_imports_neither_torch_nor_transformers(tmp_path: Path, model_dir: Path) -> None:
    script = f"""
import sys
from fsdp_shard.checkpoint import convert
from fsdp_shard.checkpoint import summarize_checkpoint
convert({str(model_dir)!r}, {str(tmp_path / "ranks")!r}, format="sharded", ranks=2)
convert({str(tmp_path / "ranks")!r}, {str(tmp_path / "one")!r}, max_shard_size="100KB")
summarize_checkpoint({str(tmp_path / "one")!r}).to_text()
print([name for name in ("torch", "transformers", "numpy", "safetensors", "hydra") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("sync", [True, False])
def test_sync_decides_whether_the_weights_are_on_the_disk(
    sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_huggingface(tmp_path / "source", {"a": torch.randn(5, 3)})
    synced: list[str] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    convert(tmp_path / "source", tmp_path / "target", sync=sync)
    assert {"model.safetensors", "manifest.json"} <= set(synced) if sync else synced == []
    assert ("config.json" in synced) == sync


def test_what_is_replaced_is_not_left_to_a_power_cut(tmp_path: Path) -> None:
    for name in ("source", "target"):
        write_huggingface(tmp_path / name, {"a": torch.randn(5, 3)})
    with pytest.raises(ConfigError, match="overwrite=true needs sync=true: a power failure"):
        convert(tmp_path / "source", tmp_path / "target", sync=False, overwrite=True)


def test_a_cast_that_would_make_infinities_is_refused(tmp_path: Path) -> None:
    big = {"w": torch.tensor([1e6, 1.0, torch.inf, torch.nan])}
    write_huggingface(tmp_path / "big", big)
    with pytest.raises(CheckpointError, match=r"tensor w holds values \(1 or more\) that are too large for float16"):
        convert(tmp_path / "big", tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()
    write_huggingface(tmp_path / "half", {"w": big["w"].half()})
    assert not verify(tmp_path / "big", tmp_path / "half").is_sound
    convert(tmp_path / "big", tmp_path / "brain", dtype="bfloat16")
    assert verify(tmp_path / "big", tmp_path / "brain").is_sound


def test_a_directory_that_came_in_the_meantime_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write_huggingface(tmp_path / "source", {"w": torch.ones(2)}), tmp_path / "target"
    write = convert_module._write

    def slow(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        target.mkdir()
        (target / "thesis.txt").write_text("years")

    monkeypatch.setattr(convert_module, "_write", slow)
    with pytest.raises(SaveError, match="nothing of it was kept"):
        convert(source, target)
    assert names(target) == {"thesis.txt"}
    assert names(tmp_path) == {"source", "target"}


def test_overwrite_deletes_nothing_but_a_checkpoint(tmp_path: Path) -> None:
    source, target = (write_huggingface(tmp_path / name, {"w": torch.ones(2)}) for name in ("source", "target"))
    (target / "checkpoint-500").mkdir()
    (target / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds checkpoint-500, notes\.txt besides its weights"):
        convert(source, target, overwrite=True)
    (target / "checkpoint-500").rmdir()
    (target / "notes.txt").unlink()
    convert(source, target, overwrite=True, format="dcp")
    convert(source, target, overwrite=True)
    assert "model.safetensors" in names(target)


def test_overwrite_deletes_no_file_that_it_does_not_write(tmp_path: Path, model_dir: Path) -> None:
    bare, target = write_huggingface(tmp_path / "bare", {"w": torch.ones(2)}), tmp_path / "target"
    convert(model_dir, target)
    (target / "my_experiment.py").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds my_experiment\.py besides its weights"):
        convert(model_dir, target, overwrite=True)
    (target / "my_experiment.py").unlink()
    convert(model_dir, target, overwrite=True)
    with pytest.raises(CheckpointError, match=r"holds chat_template\.jinja, .* besides its weights"):
        convert(bare, target, overwrite=True)
    trained = tmp_path / "trained"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.ones(2)}, "optimizer": {"w": torch.ones(2)}}, checkpoint_id=trained)
    with pytest.raises(CheckpointError, match=r"holds 1 optimizer tensor besides its weights"):
        convert(bare, trained, overwrite=True)


def test_a_target_that_cannot_take_the_name_is_refused_first(tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "source", {"w": torch.ones(2)})
    (tmp_path / "empty").mkdir()
    for name, leads_to in (("link", "empty"), ("dangling", "gone")):
        (tmp_path / name).symlink_to(tmp_path / leads_to)
        with pytest.raises(CheckpointError, match=f"{name} is a link, which a directory cannot replace"):
            convert(source, tmp_path / name)


def test_a_head_that_shares_its_storage_is_written_where_the_config_does_not_tie_it(tmp_path: Path) -> None:
    model = llama(tied=False)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    convert(tmp_path / "source", tmp_path / "target")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(found.lm_head.weight, state["model.embed_tokens.weight"])
    assert verify(tmp_path / "target", tmp_path / "source").is_sound


@pytest.mark.parametrize("settings", [{}, {"format": "sharded", "ranks": 2}, {"format": "dcp"}])
def test_a_damaged_checkpoint_may_be_overwritten(tmp_path: Path, settings: dict[str, Any]) -> None:
    source, target = write_huggingface(tmp_path / "source", {"w": torch.ones(2)}), tmp_path / "target"
    convert(source, target, **settings)
    for file in [*target.glob("*.safetensors"), *target.glob("*.distcp")]:
        os.truncate(file, 20)
    (target / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt besides its weights"):
        convert(source, target, overwrite=True)
    (target / "notes.txt").unlink()
    convert(source, target, overwrite=True)
    assert verify(target).is_sound


def test_a_source_that_changes_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_huggingface(tmp_path / "source", {"w": torch.ones(2)})
    write = convert_module._write

    def slow(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        write_huggingface(source, {"w": torch.zeros(2)})

    monkeypatch.setattr(convert_module, "_write", slow)
    with pytest.raises(CheckpointError, match="was changed while it was converted"):
        convert(source, tmp_path / "target")
    assert names(tmp_path) == {"source"}


def test_an_adapter_that_changes_is_not_converted(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_model)
    write = convert_module._write

    def slow(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        path = adapter / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))

    monkeypatch.setattr(convert_module, "_write", slow)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors was changed while it was converted"):
        convert(adapter, tmp_path / "target")
    assert names(tmp_path) == {"adapter"}


def test_side_files_that_are_not_what_was_sealed_are_not_sealed_anew(tiny_model: Path, tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    convert(tiny_model, sealed)
    changed = json.loads((sealed / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (sealed / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"config\.json is not what was written.*config=PATH and tokenizer=PATH"):
        convert(sealed, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    (wanted := tmp_path / "wanted").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(sealed / name, wanted)
    convert(sealed, tmp_path / "target", config=wanted, tokenizer=wanted)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["rms_norm_eps"] == 0.5


def test_side_files_that_are_missing_from_a_sealed_source(tiny_model: Path, tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    convert(tiny_model, sealed)
    (sealed / "LICENSE").write_text("mine")  # what was added later goes along
    convert(sealed, tmp_path / "more")
    assert "LICENSE" in names(tmp_path / "more")
    (sealed / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"sealed/generation_config\.json is missing, according to the manifest"):
        convert(sealed, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def sealed_adapter(directory: Path, base: Path) -> Path:
    """An adapter with a manifest, as a run saves it."""
    adapter = save_adapter(directory, base)
    with open_checkpoint(adapter) as index:
        tensors = {
            name: record_tensor(entry.spec, dict(enumerate(read_chunk_digests(index, name))))
            for name, entry in index.tensors.items()
        }
    files = {name: record_file(adapter / name) for name in ("adapter_config.json", "adapter_model.safetensors")}
    (adapter / "manifest.json").write_text(Manifest("gathered", files=files, tensors=tensors).to_json())
    return adapter


def flip_a_bit(path: Path, of: bytes) -> None:
    """Change one bit of the bytes `of` in a file."""
    content = bytearray(path.read_bytes())
    assert content.count(of) == 1
    content[content.index(of) + 5] ^= 1
    path.write_bytes(content)


def test_damage_of_an_adapter_or_of_what_it_changes_is_not_passed_on(tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path / "base")
    adapter = sealed_adapter(tmp_path / "adapter", tmp_path / "base")
    convert(adapter, tmp_path / "target")
    for path, name in (
        (adapter / "adapter_model.safetensors", "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"),
        (tmp_path / "base" / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"),
    ):
        sound = path.read_bytes()
        flip_a_bit(path, load_file(path)[name].numpy().tobytes())
        with pytest.raises(CheckpointError, match=rf"tensor {name} is not what was written.*is damaged"):
            convert(adapter, tmp_path / "target", overwrite=True)
        path.write_bytes(sound)


def test_a_sealed_adapter_whose_settings_were_changed(tiny_model: Path, tmp_path: Path) -> None:
    adapter = sealed_adapter(tmp_path / "adapter", tiny_model)
    convert(adapter, tmp_path / "target")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 100}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not what was written"):
        convert(adapter, tmp_path / "target", overwrite=True)


def test_a_named_config_is_of_the_tensors(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    for kind, extra in (("whole", {}), ("value", {"value_head.weight": torch.ones(1, 8)})):
        write_huggingface(tmp_path / kind, weights | extra)
    both = {f"{part}.{name}": tensor for part in ("actor", "critic") for name, tensor in weights.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(both, checkpoint_id=tmp_path / "both")
    with pytest.raises(CheckpointError, match=rf"config={tiny_model} is not the config of .*lacks .*it holds actor\."):
        convert(tmp_path / "both", tmp_path / "target", config=tiny_model)
    assert not (tmp_path / "target").exists()
    report = convert(tmp_path / "value", tmp_path / "value-target", config=tiny_model)
    assert report.notes == (f"not in the model of {tiny_model}/config.json: value_head.weight",)
    assert report.notes[0] in report.describe(str(tmp_path / "value-target"))
    assert convert(tmp_path / "whole", tmp_path / "whole-target", config=tiny_model).notes == ()


@pytest.mark.parametrize("options", [{}, {"format": "sharded", "ranks": 2}])
@pytest.mark.parametrize(("is_tied", "said"), [(True, "lacks lm_head.weight"), (False, "its config.json ties them")])
def test_a_config_that_ties_otherwise_is_said(
    options: dict[str, Any], is_tied: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", tied=is_tied)
    assert convert(source, tmp_path / "right", **options).warnings == ()
    assert "warning" not in capsys.readouterr().err
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": not is_tied}))
    (problem,) = verify(source).problems
    report = convert(source, tmp_path / "target", **options)
    assert said in problem.message
    assert report.warnings == (problem.message,)
    assert f"warning: {problem.message}" in capsys.readouterr().err
    assert verify(tmp_path / "target").problems, "it is written all the same, and still wrong"


def test_yes_and_no_are_no_text(tmp_path: Path) -> None:
    for name in ("overwrite", "verify", "dequantize"):
        with pytest.raises(ConfigError, match=f"{name}='false' is str, expected a bool"):
            convert(tmp_path, tmp_path / "target", **{name: "false"})  # type: ignore[arg-type]  # what people give


def test_settings_that_are_never_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format is null, expected a str"):
        convert(tmp_path, tmp_path / "target", format=None)  # type: ignore[arg-type]  # what people give


def test_the_description_of_torchaos_tensors_is_kept(tmp_path: Path) -> None:
    """As transformers writes it, into every header."""
    described = {"tensor_names": json.dumps(["a.weight", "b.weight"]), "a.weight": '{"_type": "Int8Tensor"}'}
    described["b.weight"] = '{"_type": "Tensor"}'
    tensors = {"a.weight:qdata": torch.ones(4, 4, dtype=torch.int8), "a.weight:scale": torch.ones(4)}
    (tmp_path / "model").mkdir()
    save_file(
        {**tensors, "b.weight": torch.ones(4)}, tmp_path / "model/model.safetensors", described | {"format": "pt"}
    )
    convert(tmp_path / "model", tmp_path / "target", max_shard_size="400B")
    files = sorted((tmp_path / "target").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == described | {"format": "pt"}
    assert verify(tmp_path / "target", tmp_path / "model").is_sound
    with pytest.raises(CheckpointError, match="is quantized by torchao, whose description of each tensor format=dcp"):
        convert(tmp_path / "model", tmp_path / "dcp", format="dcp")


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_a_converted_model_of_torchao_computes_the_same(tiny_model: Path, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="bfloat16", quantization_config=settings)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "target", max_shard_size="40KB")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(converted(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


def test_a_header_entry_of_that_name_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for number, entry in enumerate(("a, b", "{}", "[1, null]", '"x"')):
        save_file({"w": torch.ones(4)}, tmp_path / "model/model.safetensors", {"tensor_names": entry})
        convert(tmp_path / "model", tmp_path / f"target-{number}")
