"""The average of the weights: as its formula says, saved in rank files, restored on any ranks, opened as a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import adapter_to_push, convert, locate, open_checkpoint, verify
from fsdp_shard.data import ShuffledDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.load_model import load_sharded
from fsdp_shard.training.loop import TrainingRun, train
from fsdp_shard.training.optim.ema import WeightAverage, open_average
from fsdp_shard.training.peft.config import LoraConfig
from fsdp_shard.training.trainer_state import TrainerState
from tests.support.digests import tensor_digests
from tests.support.ranks import on_ranks
from tests.support.runs import Ended, run_recipe
from tests.training.conftest import stream

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS, DECAY = 4, 0.7
SETTINGS = [
    f"train.steps={STEPS}",
    "checkpoint.every=1",
    "train.global_batch_size=4",
    "train.schedule=constant",
    "optim.lr=1e-2",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "seed=7",
    f"train.ema_decay={DECAY}",
]
LORA = ["adapter=lora", "adapter.rank=3", "adapter.modules_to_save=[model.norm]"]
RUNS: dict[str, list[str]] = {
    "fsdp2": ["shard=fsdp2", "launch.ranks=2"],
    "fsdp1 gathered": ["shard=fsdp1", "launch.ranks=2", "checkpoint.layout=gathered", "checkpoint.asynchronous=false"],
    "ddp": ["shard=ddp", "launch.ranks=2"],
    "one rank": ["shard=fsdp2", "launch.ranks=1"],
    "muon": ["shard=fsdp2", "launch.ranks=2", "optim=muon"],
    "lora fsdp2": ["shard=fsdp2", "launch.ranks=2", *LORA],
    "lora fsdp1": ["shard=fsdp1", "launch.ranks=2", *LORA],
}


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={tiny_model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


class Runs(dict[str, Ended]):
    """The runs of `RUNS`; each is trained when a test first asks for it."""

    def __init__(self, settings: list[str], root: Path) -> None:
        self._settings, self._root = settings, root

    def __missing__(self, name: str) -> Ended:
        self[name] = run_recipe("finetune", self._root / name, *self._settings, *RUNS[name])
        assert self[name].status == 0, self[name].err
        return self[name]


@pytest.fixture(scope="module")
def runs(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(settings, tmp_path_factory.mktemp("runs"))


def step_of(ended: Ended, step: int) -> Path:
    return ended.run_dir / f"checkpoints/step-{step:08d}"


def read(directory: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(directory) as index:
        return {name: index.read(name) for name in index.names}


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_is_the_average_of_the_weights_of_all_steps(name: str, runs: Runs, tiny_model: Path) -> None:
    average = read(step_of(runs[name], 1) / "ema")  # after one update; before it the weights are those of the model
    if "lora" not in name:
        first, model = read(step_of(runs[name], 1)), read(tiny_model)
        for key, values in average.items():
            assert torch.equal(values, model[key].clone().mul_(DECAY).add_(first[key], alpha=1.0 - DECAY)), key
    for step in range(2, STEPS + 1):
        weights, found = read(step_of(runs[name], step)), read(step_of(runs[name], step) / "ema")
        assert weights.keys() == found.keys()
        for key in found:
            average[key].mul_(DECAY).add_(weights[key], alpha=1.0 - DECAY)
            assert torch.equal(found[key], average[key]), key
    assert any(not torch.equal(weights[key], found[key]) for key in found)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_resume_is_bit_equal(name: str, runs: Runs, settings: list[str], tmp_path: Path) -> None:
    step = f"resume={step_of(runs[name], STEPS // 2)}"
    rest = run_recipe("finetune", tmp_path, *settings, *RUNS[name], step)
    assert rest.status == 0, rest.err
    assert rest.losses == runs[name].losses[STEPS // 2 :]
    for part in ("", "ema"):
        with open_checkpoint(rest.checkpoint / part) as one, open_checkpoint(runs[name].checkpoint / part) as other:
            assert tensor_digests(one) == tensor_digests(other)


def _restored(context: DistributedContext, base: Path, step: Path, wrapper: str, adapter: LoraConfig | None) -> bool:
    """Whether each shard of the average of a step is that of the file, on these ranks."""
    shard = WRAPPERS[wrapper](param_dtype="float32")
    source = locate(base) if adapter else locate(step)
    loaded = load_sharded(ModelConfig(path=str(base)), shard, source, context, adapter, 7, step if adapter else None)
    shards = loaded.model.local_shards()
    names = loaded.adapter.names if loaded.adapter else {}
    average = open_average(DECAY, shards, names, step, context)
    assert average is not None
    with open_checkpoint(step / "ema") as index:
        for name, part in average.trained().items():
            whole = index.read(names.get(name, name)).view(-1)
            assert torch.equal(part.data, whole[part.start : part.start + len(part.data)]), name
    return bool(average.trained())


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "wrapper"), [(1, "ddp"), (3, "fsdp2"), (3, "fsdp1")])
def test_is_restored_on_any_number_of_ranks(ranks: int, wrapper: str, runs: Runs, tiny_model: Path) -> None:
    step = runs["fsdp2"].checkpoint
    assert all(on_ranks(ranks, _restored, tiny_model, step, wrapper, None))
    adapter = LoraConfig(rank=3, modules_to_save=["model.norm"])
    assert all(on_ranks(ranks, _restored, tiny_model, runs["lora fsdp1"].checkpoint, wrapper, adapter))


@pytest.mark.long
def test_is_opened_as_a_model(runs: Runs, texts: Path, tmp_path: Path) -> None:
    """By convert, generate and evaluate, of a model and of an adapter; the run itself leads to its weights."""
    losses = {}
    for name in ("fsdp2", "fsdp1 gathered", "lora fsdp2"):
        ema = runs[name].checkpoint / "ema"
        convert(ema, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        if "lora" not in name:
            with open_checkpoint(ema) as index:
                assert all(torch.equal(index.read(key), param) for key, param in model.named_parameters())
        data = [f"data.path={texts}/held_out.txt", "data.sequence_length=32"]
        for of, checkpoint in (("average", ema), ("converted", tmp_path / name), ("weights", runs[name].run_dir)):
            ended = run_recipe("evaluate", tmp_path / f"{name} {of}", f"checkpoint={checkpoint}", *data)
            assert ended.status == 0, ended.err
            losses[of] = ended.result["loss"]
        assert losses["average"] == pytest.approx(losses["converted"], rel=1e-6)
        assert losses["average"] != pytest.approx(losses["weights"], rel=1e-5)
        arguments = (f"checkpoint={ema}", "prompt=hello", "generation.max_new_tokens=2")
        ended = run_recipe("generate", tmp_path / f"{name} g", *arguments)
        assert ended.status == 0, ended.err
        convert(f"{runs[name].run_dir}@latest", tmp_path / f"{name} latest")
        with open_checkpoint(tmp_path / f"{name} latest") as one, locate(runs[name].checkpoint).model_index as two:
            assert tensor_digests(one) == tensor_digests(two)


@pytest.mark.long
def test_damage_is_found(runs: Runs, settings: list[str], tmp_path: Path) -> None:
    assert verify(runs["fsdp2"].checkpoint).is_sound
    step = shutil.copytree(step_of(runs["fsdp2"], 2), tmp_path / "checkpoints/step-00000002")
    path = next(step.glob("ema/shard-00001*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not verify(step).is_sound
    ended = run_recipe("finetune", tmp_path, *settings, *RUNS["fsdp2"])
    assert ended.status == 2
    assert "ema/shard-00001-of-00002.safetensors is not what was written" in ended.err


def test_an_average_of_another_step_is_found(runs: Runs, tmp_path: Path) -> None:
    """By the digests of the step that it lies in; `convert` recognizes the save from headers."""
    other, ema = (
        step_of(runs["fsdp2"], 3) / "ema",
        shutil.copytree(step_of(runs["fsdp2"], 2), tmp_path / "step") / "ema",
    )
    assert verify(ema).is_sound
    assert verify(ema).content_checked
    for file in other.glob("shard-*"):
        shutil.copy(file, ema)
    report = verify(ema)
    assert "ema/shard-00000-of-00002.safetensors does not have the content that was written" in str(report)
    assert "there is no manifest" not in str(report)
    with pytest.raises(CheckpointError, match=r"the header of .*/ema/shard-00000-of-00002\.safetensors is not the one"):
        convert(ema, tmp_path / "target")
    shutil.copy(other / "shards.index.json", ema)
    assert not verify(ema).is_sound
    with pytest.raises(CheckpointError, match=r"ema/shards\.index\.json is not what was written"):
        convert(ema, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    shutil.copytree(ema, tmp_path / "alone")
    convert(tmp_path / "alone", tmp_path / "target")


@pytest.mark.long
def test_a_run_goes_on_with_or_without_it(runs: Runs, settings: list[str], tmp_path: Path) -> None:
    step = f"resume={step_of(runs['one rank'], 2)}"
    without = [setting for setting in settings if "ema_decay" not in setting]
    ended = run_recipe("finetune", tmp_path / "0", *without, step)
    assert ended.status == 2
    assert "was saved with an average of the weights (ema/)" in ended.err
    plain = run_recipe("finetune", tmp_path / "1", *without)
    assert plain.losses == runs["one rank"].losses, "averaging changes nothing else"
    ended = run_recipe("finetune", tmp_path / "2", *settings, f"resume={plain.run_dir}", "train.steps=6")
    assert ended.status == 2
    assert "was saved without an average of the weights (ema/)" in ended.err
    ended = run_recipe("finetune", tmp_path / "3", *settings, "train.ema_decay=1.0")
    assert ended.status == 2
    assert "train.ema_decay=1.0 would never change the average" in ended.err


def _skips(context: DistributedContext, directory: Path) -> None:
    loaded = load_sharded(
        ModelConfig(path=str(directory)), WRAPPERS["fsdp2"](param_dtype="float32"), locate(directory), context
    )
    data = ShuffledDataset(stream(), 7)
    optimizer = torch.optim.SGD(loaded.model.module.parameters(), lr=0.1)
    config = TrainConfig(steps=3, global_batch_size=2, non_finite="skip", schedule="constant")
    run = TrainingRun(loaded.model, optimizer, data, config, context, TrainerState(7, data.identity))
    run.average = WeightAverage(DECAY, loaded.model.local_shards())
    seen = []
    for report in train(run):
        seen.append({name: part.data.clone() for name, part in run.average.trained().items()})
        if report.step == 1:
            run.functions.loss = lambda output, batch: (output.logits.sum() * float("nan"), 1)
        elif report.step == 2:
            assert report.skipped == 1
            run.functions.loss = None
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
    assert any(not torch.equal(seen[1][name], seen[2][name]) for name in seen[0])


def test_a_skipped_step_does_not_count(tiny_model: Path) -> None:
    on_ranks(1, _skips, tiny_model)


@pytest.mark.long
def test_an_average_of_other_parameters_is_refused(runs: Runs, tiny_model: Path) -> None:
    step = runs["lora fsdp2"].checkpoint

    def other(context: DistributedContext) -> Any:
        adapter = LoraConfig(rank=4)
        shard = WRAPPERS["fsdp2"](param_dtype="float32")
        loaded = load_sharded(ModelConfig(path=str(tiny_model)), shard, locate(tiny_model), context, adapter)
        assert loaded.adapter is not None
        with pytest.raises(CheckpointError, match=r"holds no average of base_model\..* with shape"):
            open_average(DECAY, loaded.model.local_shards(), loaded.adapter.names, step, context)

    on_ranks(1, other)


def test_rank_files_of_an_adapter_are_not_pushed_as_they_are(runs: Runs) -> None:
    with pytest.raises(CheckpointError, match="is an adapter in rank files, which peft does not read"):
        adapter_to_push(locate(runs["lora fsdp2"].checkpoint / "ema"), "org/base")
