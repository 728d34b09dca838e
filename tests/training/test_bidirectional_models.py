"""A model that attends to later tokens is refused wherever it would predict the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import fsdp_shard as fs
from fsdp_shard.checkpoint import locate
from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ModelError
from fsdp_shard.training.finetune_checks import check_model
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.teachers.teacher_checks import check_teacher
from tests.support.tiny import byte_tokenizer, save_model

WORDS = r"both/config\.json is of a RobertaForCausalLM that attends to later tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "both"
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.RobertaConfig(**sizes, vocab_size=257, pad_token_id=1, max_position_embeddings=130)
    transformers.RobertaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "data.txt").write_text("some text\n" * 100)
    return DataConfig(path=str(tmp_path / "data.txt"), sequence_length=16)


def test_as_the_model_that_is_trained(model: Path, data: DataConfig) -> None:
    run = fs.FinetuneConfig(data=data)
    run.model.path = str(model)
    with pytest.raises(ModelError, match=WORDS):
        check_model(run, locate(run.model.path))


def test_as_a_teacher(model: Path, data: DataConfig, tmp_path: Path) -> None:
    run = fs.FinetuneConfig(data=data)
    run.model.path = str(save_model(tmp_path / "student"))
    run.objective = DistillConfig(teacher=str(model))
    with pytest.raises(ModelError, match=rf"objective\.teacher=.*{WORDS}"):
        check_teacher(run, locate(run.model.path))


def test_as_a_model_whose_perplexity_is_measured(model: Path, data: DataConfig, tmp_path: Path) -> None:
    evaluation = fs.EvaluateConfig(checkpoint=str(model), data=data)
    fs.check_evaluation(evaluation)
    with pytest.raises(ModelError, match=WORDS):
        fs.run_evaluation(evaluation, str(tmp_path / "run"))
