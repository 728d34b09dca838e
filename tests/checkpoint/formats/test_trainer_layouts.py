"""From what training stacks leave around a checkpoint to its weights and config; never out of what was named."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.formats.registry import recognize
from fsdp_shard.checkpoint.formats.trainer_layouts import find_checkpoint
from fsdp_shard.checkpoint.location import locate, open_checkpoint
from fsdp_shard.checkpoint.model_files import list_model_files
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import write_huggingface
from tests.support.digests import digest_tensor
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, save_model


def found_at(path: Path) -> tuple[Path, Path | None, int | None]:
    """Where `locate` finds what `path` leads to."""
    found = locate(path)
    return found.weights, found.side, found.step


def is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").is_file() or path.suffix == ".bin" or recognize(path) is not None


def weights(root: Path, step: int = 0, *, config: bool = False) -> Path:
    write_huggingface(root, {"w": torch.full((3,), float(step))})
    if not config:
        (root / "config.json").unlink()
    return root


def config(root: Path, name: str = "llama") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": name, "dtype": "float32"}))
    (root / "tokenizer.json").write_text("{}")
    return root


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def save_with_accelerate(context: DistributedContext, root: Path, kind: str) -> None:
    """What `save_state` does for a model under FSDP2 (on CPU, `prepare` itself would run DDP instead)."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # asked for, but not used: the ranks have met
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = llama()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4, dtype=torch.long)).logits.sum().backward()
        optimizer.step()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        accelerator = Accelerator(cpu=True)
        save_fsdp_model(plugin, accelerator, model, str(root))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(root))
    if context.rank == 0:
        touch(root, "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUTPUT/checkpoint-7/ by accelerate, with the config of the model where Trainer puts it."""
    output = tmp_path_factory.mktemp("output")
    on_ranks(2, save_with_accelerate, output / "checkpoint-7", "SHARDED_STATE_DICT")
    on_ranks(2, save_with_accelerate, output / "full" / "checkpoint-9", "FULL_STATE_DICT")
    save_model(output / "source")
    for name in list_model_files(output / "source"):
        shutil.copy(output / "source" / name, output / name)
    shutil.rmtree(output / "source")
    return output


def test_what_accelerate_leaves(state: Path) -> None:
    inner = state / "checkpoint-7" / "pytorch_model_fsdp_0"
    assert inner.is_dir()
    assert (state / "checkpoint-7" / "optimizer_0" / ".metadata").is_file()
    assert find_checkpoint(state, is_checkpoint) == (inner, state, 7)
    assert find_checkpoint(state / "checkpoint-7", is_checkpoint) == (inner, state, 7)
    assert find_checkpoint(inner, is_checkpoint) == (inner, None, None), "nothing two levels up is looked at"
    full = state / "full" / "checkpoint-9"
    assert find_checkpoint(state / "full", is_checkpoint)[0] in (full, full / "pytorch_model_fsdp.bin")


def test_an_optimizer_is_never_taken_for_weights(state: Path, tmp_path: Path) -> None:
    shutil.copytree(state / "checkpoint-7" / "optimizer_0", tmp_path / "checkpoint-7" / "optimizer_0")
    assert find_checkpoint(tmp_path, is_checkpoint) == (tmp_path, None, None)
    assert find_checkpoint(tmp_path / "checkpoint-7", is_checkpoint)[0] == tmp_path / "checkpoint-7"


def test_accelerate_to_a_model_directory(state: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    report = convert(state, tmp_path / "model")
    assert report.source_format == "dcp"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    with open_checkpoint(state / "checkpoint-7") as index:
        assert index.step == 7
        assert all(torch.equal(index.read(name), loaded[name]) for name in index.names)
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_newest_step_by_number(tmp_path: Path) -> None:
    for step in (90, 500, 1000):
        weights(tmp_path / "outputs" / "checkpoint" / f"step-{step}", step)
    newest = tmp_path / "outputs" / "checkpoint" / "step-1000"
    for path in (tmp_path / "outputs", tmp_path / "outputs" / "checkpoint", newest):
        assert found_at(path) == (newest, None, 1000)
    (newest / "model.safetensors").unlink()  # as an interrupted save leaves it
    with open_checkpoint(tmp_path / "outputs") as index:
        assert (index.step, index.read("w").tolist()) == (500, [500.0] * 3)


@pytest.mark.parametrize("family", ["checkpoint-", "checkpoint_", "step_", "epoch_", "global_step_", "step-"])
def test_every_family_of_names(tmp_path: Path, family: str) -> None:
    for number in (2, 10, 9):
        weights(tmp_path / f"{family}{number}", number)
    with open_checkpoint(tmp_path) as index:
        assert index.step == (None if family == "epoch_" else 10)
        assert index.read("w")[0] == 10


def test_a_dcp_directory_by_torch(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (9, 10):
            dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "checkpoint" / f"step-{step}", no_dist=True)
    assert find_checkpoint(tmp_path, is_checkpoint) == (tmp_path / "checkpoint" / "step-10", None, 10)
    touch(tmp_path / "checkpoint" / "step-11", "__0_0.distcp")  # no .metadata: the save did not end
    assert find_checkpoint(tmp_path, is_checkpoint)[2] == 10


def test_verl(tmp_path: Path) -> None:
    for step in (100, 200):
        actor = tmp_path / f"global_step_{step}" / "actor"
        weights(actor, step)
        weights(tmp_path / f"global_step_{step}" / "critic", -step)
        config(actor / "huggingface")
    touch(tmp_path, "latest_checkpointed_iteration.txt")
    actor = tmp_path / "global_step_200" / "actor"
    for path in (tmp_path, actor.parent, actor):
        place = locate(path)
        assert (place.weights, place.side) == (actor, actor / "huggingface")
    convert(tmp_path, tmp_path / "model")
    assert {"config.json", "tokenizer.json"} <= {entry.name for entry in (tmp_path / "model").iterdir()}


@pytest.mark.parametrize("file", ["data.pt", "rng.pt", "ref_model.pt"])
def test_a_file_beside_the_actor_of_verl_is_not_its_model(file: str, tmp_path: Path) -> None:
    """`data.pt` is the state of its data loader, in every step."""
    step = tmp_path / "global_step_3"
    weights(step / "actor", 3)
    config(step / "actor" / "huggingface")
    torch.save({"generator": torch.zeros(16, dtype=torch.uint8)}, step / file)
    for path in (tmp_path, step):
        assert found_at(path) == (step / "actor", step / "actor" / "huggingface", 3)


@pytest.mark.parametrize("file", ["dl_state_dict.bin", "value_head.bin"])
def test_a_file_beside_the_model_of_accelerate_is_not_it(state: Path, file: str, tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-7"
    shutil.copytree(state / "checkpoint-7", step)
    torch.save({"state": torch.zeros(16)}, step / file)
    for path in (tmp_path, step):
        assert found_at(path)[0] == step / "pytorch_model_fsdp_0"


def test_a_file_beside_steps_is_a_model_if_it_is_named_so(tmp_path: Path) -> None:
    weights(tmp_path / "step-4", 4)
    torch.save({"state": torch.zeros(16)}, tmp_path / "train_state.pt")
    assert found_at(tmp_path) == (tmp_path / "step-4", None, 4)
    for before, name in (("train_state.pt", "model.pt"), ("model.pt", "final.ckpt")):
        (tmp_path / before).rename(tmp_path / name)
        assert found_at(tmp_path)[0] == tmp_path


def train(context: DistributedContext, root: Path) -> None:
    """Two steps of transformers' Trainer, which keeps both."""
    from transformers import Trainer, TrainingArguments

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # asked for, but not used: the ranks have met
    settings: dict[str, Any] = {
        "max_steps": 2,
        "save_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(llama(), TrainingArguments(output_dir=str(root), **settings), train_dataset=rows).train()


def test_what_trainer_leaves(tmp_path: Path) -> None:
    on_ranks(1, train, tmp_path)
    assert {"checkpoint-1", "checkpoint-2"} <= {entry.name for entry in tmp_path.iterdir()}
    assert {"optimizer.pt", "trainer_state.json"} <= {entry.name for entry in (tmp_path / "checkpoint-2").iterdir()}
    with open_checkpoint(tmp_path) as index, open_checkpoint(tmp_path / "checkpoint-1") as before:
        assert (index.root, index.step, before.step) == (tmp_path / "checkpoint-2", 2, 1)
        assert "lm_head.weight" not in index.names
        assert any(digest_tensor(index, name) != digest_tensor(before, name) for name in index.names)
    convert(tmp_path, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    assert not (tmp_path / "model" / "optimizer.pt").exists()


def test_trainer_directory_itself_comes_first(tmp_path: Path) -> None:
    weights(tmp_path, 1, config=True)
    weights(tmp_path / "checkpoint-500", 500, config=True)
    with open_checkpoint(tmp_path) as index:
        assert index.read("w")[0] == 1


def test_parts_left_over_by_an_interrupted_consolidation(tmp_path: Path) -> None:
    config(tmp_path / "step-5")
    weights(tmp_path / "step-5" / "sharded", 5)
    assert found_at(tmp_path) == (tmp_path / "step-5" / "sharded", tmp_path / "step-5", 5)


def test_config_one_level_up_only_of_known_layouts(tmp_path: Path) -> None:
    config(tmp_path / "out")
    inner = weights(tmp_path / "out" / "checkpoint-3")
    assert locate(inner).side == (tmp_path / "out").resolve()
    assert locate(weights(tmp_path / "out" / "mine")).side is None
    config(inner, "own")
    assert locate(inner).side is None, "what lies beside the weights counts first"
    convert(inner, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "own"


def test_a_tokenizer_beside_the_weights_does_not_hide_a_config_above(tmp_path: Path) -> None:
    config(tmp_path)
    touch(weights(tmp_path / "checkpoint-3"), "tokenizer.json")
    assert locate(tmp_path).side == tmp_path


def several_models(root: Path) -> None:
    weights(root / "pytorch_model_fsdp_0")
    weights(root / "pytorch_model_fsdp_1")


def steps_and_epochs(root: Path) -> None:
    weights(root / "step_100")
    weights(root / "epoch_0")


def unknown_names(root: Path) -> None:
    for name in ("unet", "vae", "optimizer_0"):
        weights(root / name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (several_models, "several checkpoints, .* give one of .*pytorch_model_fsdp_0, .*pytorch_model_fsdp_1"),
        (steps_and_epochs, "several checkpoints, .* give one of .*epoch_0, .*step_100"),
        (unknown_names, r"several checkpoints, .* give one of [^ ]*unet, [^ ]*vae\."),
        (lambda root: weights(root / "final"), "not itself a checkpoint, but .*final in it is; give that path"),
        (lambda root: (root / "checkpoints").mkdir(), "no finished checkpoint yet"),
        (
            lambda root: touch(root, "step-5/notes.txt"),
            "not a checkpoint that fsdp-shard can read: the directory holds step-5",
        ),
    ],
)
def test_where_no_rule_tells_the_user_chooses(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_links_out_of_the_named_directory_are_not_followed(tmp_path: Path) -> None:
    elsewhere = weights(tmp_path / "elsewhere")
    config(elsewhere / "configs")
    root = tmp_path / "root"
    root.mkdir()
    (root / "step-5").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"step-5 is a link to .*elsewhere, outside"):
        open_checkpoint(root)
    (root / "step-5").unlink()
    weights(root / "step-5")
    (root / "step-5" / "huggingface").symlink_to(elsewhere / "configs")
    assert locate(root).side is None
    config(root)
    (root / "config.json").unlink()
    (root / "config.json").symlink_to(elsewhere / "configs" / "config.json")
    with pytest.raises(CheckpointError, match="outside the directory"):
        convert(root, tmp_path / "model")


def test_runs_of_our_own_are_led_as_before(tmp_path: Path) -> None:
    weights(tmp_path / "checkpoints" / "checkpoint_0")
    weights(tmp_path / "checkpoints" / "checkpoint_10")
    assert locate(tmp_path).weights == tmp_path / "checkpoints" / "checkpoint_10", "accelerate's own numbering"
    weights(tmp_path / "steps" / "step-10000000")
    assert locate(tmp_path / "steps").weights == tmp_path / "steps" / "step-10000000", "a name that could be ours"


@pytest.mark.timeout(20)
def test_links_in_circles_end(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for number in range(200):
        (tmp_path / f"step-{number}").symlink_to(".")
        (tmp_path / "checkpoint" / f"step-{number}").symlink_to("..")
    with pytest.raises(CheckpointError, match="not a checkpoint that fsdp-shard can read"):
        open_checkpoint(tmp_path)
    weights(tmp_path / "checkpoint" / "step-300")
    assert locate(tmp_path).step == 300
