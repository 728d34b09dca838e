"""EVA under every wrapper: the values that peft finds in one process. `test_adapter_kinds.py` trains and resumes it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import IGNORE_INDEX, DataConfig, ShuffledDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, Interrupted
from fsdp_shard.models import ModelConfig, build_on_meta
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import RunStart, build_optimizer, build_unfilled, open_data, open_run, train
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.load_model import check_adapter_mesh
from fsdp_shard.training.optim.torch_optim import AdamWConfig
from fsdp_shard.training.peft import eva
from fsdp_shard.training.peft.config import LoraConfig
from fsdp_shard.training.peft.lora import inject_lora
from tests.support.ranks import on_ranks
from tests.support.tiny import llama_config

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TARGETS = ["q_proj", "k_proj", "o_proj", "down_proj"]


def settings(model: Path, texts: Path, directory: Path, wrapper: str, **shard: Any) -> FinetuneConfig:
    return FinetuneConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(path=f"{texts}/train.txt", sequence_length=32, cache_dir=f"{directory}/cache"),
        shard=WRAPPERS[wrapper](param_dtype="float32", **shard),
        adapter=LoraConfig(rank=3, init="eva", target_modules=TARGETS),
        optim=AdamWConfig(lr=1e-2),
        train=TrainConfig(steps=2, global_batch_size=4, micro_batch_size=2, schedule="constant"),
        seed=7,
    )


def begin(context: DistributedContext, config: FinetuneConfig) -> tuple[dict[str, torch.Tensor], str, list[float]]:
    """The A matrices of a new adapter, what is said of them, and the losses of the run."""
    start = RunStart(context, config.source)
    data = open_data(config, start)
    with build_unfilled(config, start) as unfilled:
        loaded = unfilled.load(config.shard.shard(unfilled.module, context), config.seed)
    optimizer = build_optimizer(config.optim, loaded.model, context, loaded.adapter)
    run = open_run(config, start, loaded, optimizer, data.train)
    found = {}
    for name, shard in loaded.model.local_shards().items():
        if "lora_A" in name:
            whole = torch.zeros(shard.shape)
            if shard.writes:
                whole.view(-1)[shard.start : shard.start + len(shard.data)] = shard.data
            context.all_reduce_(whole)
            found[name] = whole
    return found, loaded.notes[-1], [report.loss for report in train(run)]


@pytest.fixture(scope="module")
def of_peft(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What peft finds, in the micro-batches of the run one after the other."""
    config = settings(tiny_model, texts, tmp_path_factory.mktemp("peft"), "fsdp2")
    (batches,) = on_ranks(1, micro_batches, config)
    lora = peft.LoraConfig(
        r=3, target_modules=TARGETS, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora, low_cpu_mem_usage=True)
    peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    return {
        name.removeprefix("base_model.model."): param.detach()
        for name, param in model.named_parameters()
        if "lora_A" in name
    }


def micro_batches(context: DistributedContext, config: FinetuneConfig) -> list[dict[str, torch.Tensor]]:
    data = open_data(config, RunStart(context, config.source)).train
    batches = [data.batch([2 * number, 2 * number + 1]) for number in range(eva.MAX_STEPS // 4)]
    return [{name: torch.from_numpy(getattr(b, name)) for name in ("input_ids", "labels")} for b in batches]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
@pytest.mark.parametrize(("wrapper", "num_ranks", "shard"), [
    ("fsdp1", 2, {"reshard_after_forward": False}),
    ("ddp", 1, {}),
    pytest.param("fsdp2", 2, {"activation_checkpointing": True, "compile": "aot_eager"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_begins_as_with_peft(
    wrapper: str,
    num_ranks: int,
    shard: dict[str, Any],
    of_peft: dict[str, torch.Tensor],
    tiny_model: Path,
    texts: Path,
    tmp_path: Path,
) -> None:
    config = settings(tiny_model, texts, tmp_path, wrapper, **shard)
    for found, note, losses in on_ranks(num_ranks, begin, config):
        assert found.keys() == of_peft.keys()
        for name, expected in of_peft.items():
            assert float(expected.norm()) == pytest.approx(3**0.5, rel=1e-4), "three directions"
            signs = (found[name] * expected).sum(1, keepdim=True).sign()
            torch.testing.assert_close(found[name] * signs, expected, rtol=1e-3, atol=1e-4, msg=name)
        assert "have not converged" not in note
        assert note.startswith("EVA: principal directions of the inputs of 8 layers, from ")
        assert losses[1] < losses[0]


def test_the_first_micro_batches_are_taken_in_the_order_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eva, "MAX_STEPS", 5)
    monkeypatch.setattr(eva, "SIMILARITY", 2.0)  # no direction stands still
    alone = eva.new_pca(2)
    for number in (0, 2, 3, 4):
        alone.partial_fit(_inputs(number)[: _num_counted(number)])
    for taken, first, second in on_ranks(3, _directions):
        assert taken == [3, 2], "of six micro-batches, five"
        assert torch.equal(first, alone.components_.float())
        assert torch.equal(first, second)


def _inputs(number: int) -> torch.Tensor:
    """The inputs of a micro-batch, [num_tokens, num_features]."""
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(number))


def _num_counted(number: int) -> int:
    """The tokens that count, at the beginning; in the second micro-batch fewer than two directions."""
    return 1 if number == 1 else 9 + number


def _directions(context: DistributedContext) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """How many micro-batches are taken at a time, and the directions of two layers with the same inputs."""
    found, taken = eva._Directions({"first": 2, "second": 2}, context), []
    for number in (context.rank, context.world_size + context.rank):
        found.begin(torch.arange(_num_counted(number)))
        for fqn in ("first", "second"):
            found.step(fqn, _inputs(number).view(2, 8, 6))
        taken.append(found.end())
    return taken, found.everywhere("first"), found.everywhere("second")


def test_a_stop_and_too_few_tokens_end_the_search(
    alone: DistributedContext, tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eva, "MAX_STEPS", 3)
    config = settings(tiny_model, texts, tmp_path, "ddp")
    start = RunStart(alone, config.source)
    start.stop.number = signal.SIGTERM
    data = open_data(config, start)
    with build_unfilled(config, start) as unfilled:
        loaded = unfilled.load(config.shard.shard(unfilled.module, alone), config.seed)
    optimizer = build_optimizer(config.optim, loaded.model, alone, loaded.adapter)
    with pytest.raises(Interrupted, match=r"Stopped by SIGTERM before training, in .*adapter\.init=eva"):
        open_run(config, start, loaded, optimizer, data.train)
    start.stop.number = 0
    assert loaded.adapter is not None
    with pytest.raises(ConfigError, match=r"at least adapter\.rank=3 tokens to predict"):
        eva.fill_eva(config, loaded.model, loaded.adapter.eva, _FewLabels(data.train), alone, start.stop)


class _FewLabels(ShuffledDataset):
    """The same samples with two labels each."""

    def __init__(self, whole: Any) -> None:
        super().__init__(whole.dataset, 0)

    def batch(self, positions: Any) -> Any:
        batch = super().batch(positions)
        batch.labels[:, 1:] = IGNORE_INDEX
        return batch


def test_mistakes() -> None:
    for adapter, task, said in (
        (
            LoraConfig(init="eva", rank=99),
            "causal_lm",
            "at least adapter.rank=99 inputs, and model.layers.0.self_attn.q_proj has ",
        ),
        (LoraConfig(init="eva"), "masked_lm", "is for model.task=causal_lm, not masked_lm"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            inject_lora(build_on_meta(llama_config(), "float32"), adapter, "base", {}, task)
    with pytest.raises(ConfigError, match=r"adapter\.init=eva cannot be combined with shard\.context_parallel=2"):
        check_adapter_mesh(LoraConfig(init="eva"), WRAPPERS["fsdp2"](context_parallel=2))
