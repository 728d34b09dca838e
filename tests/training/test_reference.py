"""The pass of the reference before training: dispatched, it gives what the sharded model gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, DataError, ModelError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import RunStart, add_reference, open_data
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.finetune_checks import check_finetune
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.dpo import DpoConfig
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.training.objectives.objective_checks import check_objective
from fsdp_shard.training.peft.config import LoraConfig
from tests.support.ranks import on_ranks
from tests.support.tiny import byte_tokenizer, llama_config


def settings(model: Path, directory: Path, cache: str = "cache", **objective: Any) -> FinetuneConfig:
    rows = [{"prompt": f"{n} green ", "chosen": f"bottles {n}", "rejected": f"cans {n * n}"} for n in range(7)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FinetuneConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            path=f"{directory}/pairs.jsonl", kind="preference", sequence_length=48, cache_dir=f"{directory}/{cache}"
        ),
        shard=WRAPPERS["fsdp2"](param_dtype="float32"),
        objective=DpoConfig(**objective),
        train=TrainConfig(steps=1, global_batch_size=4, micro_batch_size=2),
    )


def computed(context: DistributedContext, configs: list[FinetuneConfig]) -> list[list[str]]:
    """What the passes say, one after the other."""
    starts = [RunStart(context, config.source) for config in configs]
    return [
        list(add_reference(config, start, open_data(config, start)).notes)
        for config, start in zip(configs, starts, strict=True)
    ]


@pytest.mark.parametrize("objective", [DpoConfig(), DistillConfig(top_k=5)])
def test_tokens_of_another_model_are_named(
    objective: ObjectiveConfig, alone: DistributedContext, tmp_path: Path
) -> None:
    """As in training: on a GPU, the embedding would name no cause."""
    config = settings(tmp_path / "model", tmp_path)
    small = llama_config()
    small.vocab_size = 100
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    config.objective = objective
    if isinstance(objective, DistillConfig):
        objective.teacher, config.data.kind = str(tmp_path / "model"), "text"
        config.data.path = str(tmp_path / "text.txt")
        (tmp_path / "text.txt").write_text("the quick brown fox " * 30)
    start = RunStart(alone, config.source)
    with pytest.raises(ModelError, match="has a vocabulary of 100 tokens, but the tokenizer makes token 2"):
        add_reference(config, start, open_data(config, start))


def test_answers_with_a_label_are_no_pairs_before_any_rank_starts(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tiny_model, tmp_path)
    config.run_dir = str(tmp_path / "run")
    rows = [{"prompt": "a", "completion": f" {n}", "label": n % 2 == 0} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"4 answers of the data have a label.*objective=kto"):
        check_finetune(config)


@pytest.mark.parametrize("packing", [False, True])
def test_dispatched_and_sharded_agree(
    packing: bool, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Streamed from the disk on two ranks, the pass has the keys and the values of the one that is sharded."""
    sharded = settings(tiny_model, tmp_path, "sharded")
    streamed = settings(tiny_model, tmp_path, "streamed", reference="dispatched", reference_max_memory={"cpu": "100KB"})
    sharded.data.packing = streamed.data.packing = packing
    found = on_ranks(2, computed, [sharded, streamed, streamed])[0]
    assert " disk " in next(line for line in capfd.readouterr().err.splitlines() if line.startswith("reference: "))
    assert ["computed" in notes[-1] for notes in found] == [True, True, False]
    (one,), (other,) = (list((tmp_path / name).glob("reference-*")) for name in ("sharded", "streamed"))
    assert one.name == other.name
    values, same = (load_file(file)["reference_log_probs"] for file in (one, other))
    assert values.shape == (7, 2)
    torch.testing.assert_close(same, values, rtol=0, atol=1e-5)


def check(config: FinetuneConfig) -> None:
    sections = (config.objective, config.model, config.shard, config.adapter)
    check_objective(*sections, is_packed=config.data.packing, is_streamed=config.data.streaming)


def test_mistakes(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tiny_model, tmp_path, reference="dispatched")
    check(config)
    config.model.dtype = "float16"
    with pytest.raises(ConfigError, match=r"model\.dtype=float16 would round them before"):
        check(config)
    config.model.dtype, config.adapter = "float32", LoraConfig(quantize="nf4")
    with pytest.raises(ConfigError, match=r"reference=dispatched cannot be combined with adapter\.quantize=nf4"):
        check(config)
    with pytest.raises(ConfigError, match=r"reference_max_memory is for objective\.reference=dispatched, and that is"):
        check(settings(tiny_model, tmp_path, reference_max_memory={"cpu": "1GB"}))
    with pytest.raises(ConfigError, match=r"objective\.reference_max_memory\.cpu=lots is not a size"):
        settings(tiny_model, tmp_path, reference="dispatched", reference_max_memory={"cpu": "lots"}).check("")
