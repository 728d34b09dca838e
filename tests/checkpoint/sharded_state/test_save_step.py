"""What lies on the disk after a save is what the ranks have in memory, bit for bit, whichever way it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.location import locate, open_checkpoint
from fsdp_shard.checkpoint.sharded_state.load_shards import load_shards
from fsdp_shard.checkpoint.sharded_state.optimizer_state import create_state, optimizer_shards
from fsdp_shard.checkpoint.sharded_state.save_step import StepContent, save_step
from fsdp_shard.checkpoint.steps.step_store import StepStore
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import CheckpointError, SaveError
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import ModelConfig, tied_names
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import collect_model_files
from tests.support.ranks import on_ranks
from tests.support.saved_training import train_and_save
from tests.support.sharded import WRAPPERS, assembled, sharded
from tests.support.tiny import llama, token_batch


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_reader_sees_the_training_state(
    wrapper: str, world_size: int, replicas: int, tiny_model: Path, tmp_path: Path
) -> None:
    config = WRAPPERS[wrapper](param_dtype="float32", replicas=replicas)
    held = on_ranks(world_size, train_and_save, config, tmp_path, tiny_model, replicas=replicas)
    plain = llama()
    plain.load_state_dict(assembled(held, {n: p.shape for n, p in plain.named_parameters()}), strict=False)
    wanted = plain.eval()(token_batch(5)).logits

    directories = {layout: StepStore(tmp_path / layout).path(1) for layout in ("sharded", "gathered")}
    assert len(list(directories["gathered"].glob("model-*.safetensors"))) > 2
    convert(directories["sharded"], tmp_path / "one")
    convert(directories["sharded"], tmp_path / "pieces", max_shard_size="50KB")
    convert(directories["gathered"], tmp_path / "ranks", format="sharded", ranks=5)
    for directory in (*directories.values(), tmp_path / "one", tmp_path / "pieces", tmp_path / "ranks"):
        report = verify(directory)
        assert report.is_sound, report.problems
        assert report.content_checked
        with open_checkpoint(directory) as index:
            assert "lm_head.weight" not in index.names, "tied weights are stored once"
        assert torch.equal(load_dispatched(directory, device_map="disk")(token_batch(5)).logits, wanted)
    for directory in (directories["gathered"], tmp_path / "one", tmp_path / "pieces"):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(token_batch(5)).logits, wanted)


def restore(context: DistributedContext, config: ShardConfig, step: Path) -> dict[str, Any]:
    """This rank's optimizer state, read into fresh memory from a step of any wrapper and number of ranks."""
    model = sharded(config, context)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    before = {name: shard.data.clone() for name, shard in model.local_shards().items()}
    create_state(optimizer)
    shards = model.local_shards()
    assert all(torch.equal(before[name], shards[name].data) for name in before), "making state must not train"
    states = optimizer_shards(optimizer, shards)
    with open_checkpoint(step / "optimizer") as index:
        load_shards(index, states)
    return {"shards": {name: (s.start, s.data.clone(), s.writes) for name, s in states.items() if s.shape}}


@pytest.mark.long
@pytest.mark.parametrize(("wrapper", "to"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_optimizer_state_moves_between_wrappers_and_ranks(
    wrapper: str, to: str, tiny_model: Path, tmp_path: Path
) -> None:
    on_ranks(3, train_and_save, WRAPPERS[wrapper](param_dtype="float32"), tmp_path, tiny_model)
    step = StepStore(tmp_path / "sharded").path(1)
    held = on_ranks(2, restore, WRAPPERS[to](param_dtype="float32"), step)
    with open_checkpoint(step / "optimizer") as index:
        moments = [name for name in index.names if index.shapes[name]]
        assert len(moments) == 2 * 20
        everyone = set().union(*(rank["shards"] for rank in held))
        assert everyone == set(moments)
        for name in moments:
            ranks = [rank for rank in held if name in rank["shards"]]
            whole = assembled(ranks, {name: torch.Size(index.shapes[name])})[name]
            assert torch.equal(whole, index.read(name))
            assert bool(whole.any()), "a moment that is all zero proves nothing"


TEMPLATE = "additional_chat_templates/rag.jinja"


def fail_on_one_rank(context: DistributedContext, root: Path, model_dir: Path) -> list[str]:
    """A save that cannot be written on rank 1: what each rank is told, and what is there afterwards."""
    config = WRAPPERS["fsdp2"](param_dtype="float32")
    model = sharded(config, context)
    beside = collect_model_files(locate(model_dir), ModelConfig(dtype="float32"), DataConfig()) | {
        TEMPLATE: b"{{ messages }}"
    }
    state = StepContent(model.local_shards(), tied_names(llama()), model_files=beside)
    store = StepStore(root)
    save_step(context, store, 1, state, layout="sharded")
    if context.rank == 1:
        real = os.fsync

        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        os.fsync = no_space  # type: ignore[assignment]  # in this rank
    try:
        save_step(context, store, 2, state, layout="sharded")
    except SaveError as error:
        return [str(error), *(f"step {step}" for step in store.steps())]
    finally:
        if context.rank == 1:
            os.fsync = real
    return ["no error"]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(tiny_model: Path, tmp_path: Path) -> None:
    told = on_ranks(2, fail_on_one_rank, tmp_path, tiny_model)
    assert told[0] == told[1]
    assert "Rank 1" in told[0][0]
    assert "No space left on device" in told[0][0]
    assert told[0][1:] == ["step 1"]
    step = StepStore(tmp_path).path(1)
    assert verify(step).is_sound
    assert (step / TEMPLATE).read_bytes() == b"{{ messages }}"
    (step / TEMPLATE).write_bytes(b"{{ message }}")
    assert not verify(step).is_sound, "it is one of the files of the step"


def test_a_missing_optimizer_state_is_named(tiny_model: Path, tmp_path: Path) -> None:
    from fsdp_shard.checkpoint.sharded_state.optimizer_state import check_slots

    on_ranks(1, train_and_save, WRAPPERS["fsdp2"](param_dtype="float32"), tmp_path, tiny_model)
    with open_checkpoint(StepStore(tmp_path / "sharded").path(1) / "optimizer") as index:
        with pytest.raises(CheckpointError, match=r"has model\.norm\.weight\.step, which this optimizer does not keep"):
            check_slots(index, {}, ["model.norm.weight.step"])
        data = torch.zeros(1)
        shard = LocalShard(data, data, 0, (1,), writes=True)
        with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight\.momentum"):
            check_slots(index, {"model.norm.weight.momentum": shard}, [])
