"""NEFTune: the noise of transformers' Trainer, in training only, the same after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration
from transformers.integrations.neftune import activate_neftune

from fsdp_shard.data import DataConfig, ShuffledDataset
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.neftune import noisy_embeddings
from fsdp_shard.training.seeding import derived_seed
from tests.support.prepared_data import in_order, prepare_data
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import llama, token_batch

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS, ALPHA = 4, 40.0  # so much that it shows
SETTINGS = [
    f"train.steps={STEPS}",
    f"checkpoint.every={STEPS // 2}",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.schedule=constant",
    "optim.lr=1e-2",
    "optim.weight_decay=0.0",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "seed=7",
]
NOISE = f"train.neftune_alpha={ALPHA}"


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    data = [f"data.path={texts}/train.txt", "data.eval_fraction=0.02", f"data.cache_dir={cache}"]
    return [*SETTINGS, f"model.path={tiny_model}", *data]


RUNS = [("fsdp2", 1), ("fsdp2", 2), ("fsdp1", 2), ("ddp", 2)]


class Runs(dict[tuple[str, int], Ended]):
    """A run with noise by wrapper and number of ranks; each is trained when a test first asks for it."""

    def __init__(self, settings: list[str], root: Path) -> None:
        self._settings, self._root = settings, root

    def __missing__(self, key: tuple[str, int]) -> Ended:
        wrapper, ranks = key
        overrides = [*self._settings, NOISE, f"shard={wrapper}", f"launch.ranks={ranks}"]
        self[key] = run_recipe("finetune", self._root / f"{wrapper}-{ranks}", *overrides)
        assert self[key].status == 0, self[key].err
        return self[key]


@pytest.fixture(scope="module")
def runs(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(settings, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def without(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_recipe("finetune", tmp_path_factory.mktemp("runs") / "without", *settings)


@pytest.mark.long
def test_losses_are_those_of_transformers_noise(runs: Runs, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    data = DataConfig(
        path=f"{texts}/train.txt", sequence_length=32, eval_fraction=0.02, cache_dir=str(tmp_path / "cache")
    )
    samples = ShuffledDataset(in_order(prepare_data(data, AutoTokenizer.from_pretrained(tiny_model)).train), 7)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model).train()
    activate_neftune(model, ALPHA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(derived_seed(7, step, 0))
        total = 0.0
        for first in (0, 2):
            batch = samples.batch(range(4 * step + first, 4 * step + first + 2))
            logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
            loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten()) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert runs["fsdp2", 1].losses == pytest.approx(losses, rel=1e-5)


def test_noise_is_in_training_only(runs: Runs, without: Ended) -> None:
    first = [json.loads((ended.run_dir / "evaluations.jsonl").read_text().splitlines()[0]) for ended in (
        runs["fsdp2", 1], without
    )]  # fmt: skip
    assert first[0]["step"] == 0
    assert first[0]["loss"] == first[1]["loss"]
    assert runs["fsdp2", 1].losses[0] != pytest.approx(without.losses[0], rel=1e-4)


@pytest.mark.long
def test_wrappers_have_the_same_noise(runs: Runs) -> None:
    for wrapper in ("fsdp1", "ddp"):
        assert runs[wrapper, 2].losses == pytest.approx(runs["fsdp2", 2].losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(map(str, run)))
def test_resume_is_bit_equal(run: tuple[str, int], runs: Runs, settings: list[str], tmp_path: Path) -> None:
    step = f"resume={runs[run].run_dir}/checkpoints/step-{STEPS // 2:08d}"
    rest = run_recipe("finetune", tmp_path, *settings, NOISE, f"shard={run[0]}", f"launch.ranks={run[1]}", step)
    assert rest.status == 0, rest.err
    assert rest.losses == runs[run].losses[STEPS // 2 :]


@pytest.mark.long
def test_models_with_adapters_get_it_too(settings: list[str], tmp_path: Path) -> None:
    adapter = ["adapter=lora", "adapter.target_modules=[q_proj]"]
    losses = [run_recipe("finetune", tmp_path / str(len(n)), *settings, *adapter, *n).losses for n in ([NOISE], [])]
    assert losses[0][0] != pytest.approx(losses[1][0], rel=1e-4)


def test_is_bit_equal_to_the_hook_of_transformers_and_gone_after() -> None:
    tokens, model, other = token_batch(0), llama().train(), llama().train()
    activate_neftune(other, 5.0)
    seen = []
    with noisy_embeddings(model, 5.0) as noise:
        assert noise is not None
        with pytest.raises(ConfigError, match="does not call its input embeddings"):
            noise.check_used()
        for each in (model, other):
            torch.manual_seed(3)
            seen.append(each(input_ids=tokens).logits)
        noise.check_used()
        assert torch.equal(*seen)
        with torch.no_grad():  # as a reference model computes
            clean = model(input_ids=tokens).logits
        assert torch.equal(clean, model.eval()(input_ids=tokens).logits)
    assert torch.equal(model.train()(input_ids=tokens).logits, clean)
    assert not torch.equal(seen[0], clean)


def test_encoders_have_embeddings_of_their_own() -> None:
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config).train()
    tokens = torch.arange(8)[None]
    clean = model(input_ids=tokens, decoder_input_ids=tokens).logits
    with noisy_embeddings(model, 5.0) as noise:
        assert noise is not None
        assert not torch.equal(model(input_ids=tokens, decoder_input_ids=tokens).logits, clean)
        noise.check_used()
    with pytest.raises(ConfigError, match=r"needs a model of transformers"), noisy_embeddings(nn.Linear(2, 2), 5.0):
        pass
