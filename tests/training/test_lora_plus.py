"""LoRA+: learning rates by the kind of parameter, as peft's own optimizer has them, with any optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import peft
import pytest
import torch
import torch.nn.functional as F
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_shard.checkpoint import locate, open_checkpoint
from fsdp_shard.data import DataConfig, ShuffledDataset
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.load_model import LoadedModel, load_sharded
from fsdp_shard.training.optim.build import build_optimizer, check_rates
from fsdp_shard.training.optim.registry import OPTIMIZERS
from fsdp_shard.training.peft.config import LoraConfig
from fsdp_shard.training.peft.initial_values import fill_new
from tests.support.digests import tensor_digests
from tests.support.prepared_data import in_order, prepare_data
from tests.support.ranks import on_ranks
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import save_model

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 4
LR, RATIO, OF_EMBEDDINGS = 1e-3, 16.0, 2e-3
SETTINGS = [
    f"train.steps={STEPS}",
    f"checkpoint.every={STEPS // 2}",
    "train.global_batch_size=4",
    "train.schedule=linear",
    "optim.weight_decay=0.0",
    f"optim.lr={LR}",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "seed=7",
    "adapter=lora",
    "adapter.rank=3",
    "adapter.target_modules=[q_proj,down_proj,embed_tokens]",
    "adapter.modules_to_save=[model.norm]",
    f"adapter.lora_plus_ratio={RATIO}",
    f"adapter.lora_plus_embedding_lr={OF_EMBEDDINGS}",
]
RUNS = [("fsdp2", "adamw", 2), ("fsdp1", "adamw", 2), ("ddp", "adamw", 1), ("fsdp2", "muon", 2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="module")
def settings(base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={base}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


@pytest.fixture(scope="module")
def runs(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Ended]:
    done = {}
    for run in RUNS:
        done[run] = run_recipe("finetune", tmp_path_factory.mktemp("runs") / "run", *settings, *overrides(*run))
        assert done[run].status == 0, done[run].err
    return done


def overrides(wrapper: str, optimizer: str, ranks: int) -> list[str]:
    return [f"shard={wrapper}", f"optim={optimizer}", f"launch.ranks={ranks}"]


@pytest.fixture(scope="module")
def plain(base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of peft in one process, with the optimizer that it makes."""
    config = DataConfig(path=f"{texts}/train.txt", sequence_length=32, cache_dir=str(tmp_path_factory.mktemp("plain")))
    samples = ShuffledDataset(in_order(prepare_data(config, AutoTokenizer.from_pretrained(base)).train), 7)
    targets = ["q_proj", "down_proj", "embed_tokens"]
    adapter = peft.LoraConfig(r=3, lora_alpha=32, target_modules=targets, modules_to_save=["model.norm"])
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter)
    for name, param in model.named_parameters():
        if "lora_" in name:
            shard = LocalShard(param, param.detach().view(-1), 0, tuple(param.shape), writes=True)
            fill_new({name.removeprefix("base_model.model."): shard}, {}, 7, {"init_lora_weights": True})
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=LR, loraplus_lr_ratio=RATIO, loraplus_lr_embedding=OF_EMBEDDINGS
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    losses = []
    for step in range(STEPS):
        batch = samples.batch(range(4 * step, 4 * step + 4))
        logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS[:3], ids=lambda run: " ".join(map(str, run)))
def test_losses_are_those_of_peft(run: tuple[str, str, int], runs: Any, plain: list[float]) -> None:
    assert runs[run].losses == pytest.approx(plain, rel=1e-4)
    rates = [row["learning_rate"] for row in runs[run].metrics]
    assert rates[0] == LR, "the rate of the A matrices is reported"


@pytest.mark.long
def test_it_changes_training(runs: Any, settings: list[str], tmp_path: Path) -> None:
    without = [setting for setting in settings if "lora_plus" not in setting]
    ended = run_recipe("finetune", tmp_path, *without, *overrides(*RUNS[0]))
    assert abs(ended.losses[-1] - runs[RUNS[0]].losses[-1]) > 5e-3  # ten times what the comparison with peft allows


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(map(str, run)))
def test_resume_is_bit_equal(run: tuple[str, str, int], runs: Any, settings: list[str], tmp_path: Path) -> None:
    step = f"resume={runs[run].run_dir}/checkpoints/step-{STEPS // 2:08d}"
    rest = run_recipe("finetune", tmp_path, *settings, *overrides(*run), step)
    assert rest.status == 0, rest.err
    assert rest.losses == runs[run].losses[STEPS // 2 :]
    for part in ("", "optimizer"):
        with open_checkpoint(rest.checkpoint / part) as one, open_checkpoint(runs[run].checkpoint / part) as other:
            assert tensor_digests(one) == tensor_digests(other)


def _rates(context: DistributedContext, directory: Path) -> dict[tuple[str, str], dict[str, float]]:
    """By wrapper and optimizer: the learning rate of each trained parameter."""
    found = {}
    adapter = LoraConfig(
        target_modules=["q_proj", "embed_tokens"], modules_to_save=["model.norm"], dora=True, lora_plus_ratio=4.0
    )
    for wrapper in ("fsdp2", "fsdp1"):
        for name in ("adamw", "sgd", "adafactor", "muon"):
            loaded = _load(context, directory, wrapper, adapter)
            optimizer = build_optimizer(OPTIMIZERS[name](lr=0.5), loaded.model, context, loaded.adapter)
            check_rates(optimizer, has_rates=True)
            names = {id(shard.tensor): name for name, shard in loaded.model.local_shards().items()}
            groups = optimizer.param_groups
            found[wrapper, name] = {names[id(p)]: float(group["lr"]) for group in groups for p in group["params"]}
            assert optimizer.param_groups[0]["lr"] == 0.5
    return found


def _load(context: DistributedContext, directory: Path, wrapper: str, adapter: LoraConfig) -> LoadedModel:
    shard = WRAPPERS[wrapper](param_dtype="float32")
    return load_sharded(ModelConfig(path=str(directory)), shard, locate(directory), context, adapter)


@pytest.mark.long
def test_every_optimizer_has_the_rates(base: Path) -> None:
    for rates in on_ranks(2, _rates, base)[0].values():
        assert len(rates) == 2 * 3 + 3 + 1
        for name, rate in rates.items():
            is_vector = "magnitude" in name or "norm" in name
            assert rate == (1e-6 if "embedding" in name else 2.0 if "lora_B" in name or is_vector else 0.5), name


def test_what_has_no_effect_is_said(settings: list[str], tmp_path: Path) -> None:
    plain = [setting for setting in settings if "target_modules" not in setting]
    ended = run_recipe("finetune", tmp_path / "0", *plain)
    assert ended.status == 2
    assert "adapter.lora_plus_embedding_lr=0.002 has no effect, as no embedding" in ended.err
    ended = run_recipe("finetune", tmp_path / "1", *settings, "adapter.lora_plus_ratio=null")
    assert ended.status == 2
    assert "adapter.lora_plus_embedding_lr=0.002 has no effect without adapter.lora_plus_ratio" in ended.err
    groups = [{"lr": 0.1, "params": []}, {"lr": 0.1, "params": []}]
    with pytest.raises(ConfigError, match=r"lora_plus_ratio is set, but .* give build_optimizer the adapter"):
        check_rates(cast("Any", SimpleNamespace(param_groups=groups)), has_rates=True)
