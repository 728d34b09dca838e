"""What tests of perplexity share: a measurement without a command, and the same by transformers and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdp_shard.checkpoint import Location
from fsdp_shard.data import DataConfig
from fsdp_shard.evaluation.config import EvaluateSettings, PerplexityConfig
from fsdp_shard.evaluation.evaluation_base import EvaluationBase
from fsdp_shard.evaluation.perplexity_task.perplexity import PerplexityEvaluation, open_perplexity
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import load_tokenizer


def evaluation(model: Path, data: DataConfig, run_dir: Path, *, by: str = "windows", **settings: Any) -> Any:
    """The evaluation of `model` on `data`, ready to be measured."""
    given = EvaluateSettings(checkpoint=str(model), data=data, perplexity=PerplexityConfig(by=by), **settings)
    return open_perplexity(EvaluationBase(given, run_dir, 0, load_tokenizer(given.source.tokenizer_directory)))


def measure(
    model: Path,
    data: DataConfig,
    run_dir: Path,
    load: Callable[[Path], PreTrainedModel] = load_dispatched,
    **given: Any,
) -> dict[str, Any]:
    """The row of result.json of `model` on `data`."""
    opened: PerplexityEvaluation = evaluation(model, data, run_dir, **given)

    def load_source(source: Location, *planned: object, **plans: object) -> PreTrainedModel:
        return load(Path(source.path))

    return dict(opened.measure(load_source).row)


def token_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The loss of each token of `ids` [num_tokens] but the first, in float64."""
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[1:], reduction="none").double()


def guide_losses(path: Path, ids: list[int], length: int, stride: int) -> torch.Tensor:
    """The losses of the scored tokens by the loop of transformers' guide."""
    model, tokens, before, found = AutoModelForCausalLM.from_pretrained(path), torch.tensor(ids), 0, []
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        new = end - before
        found.append(token_losses(model, tokens[begin:end])[-new:])
        before = end
        if end == len(ids):
            break
    return torch.cat(found)


def training_losses(path: Path, ids: list[int], length: int) -> torch.Tensor:
    """The losses of all tokens but the first, each in the window of `length` tokens before it, as in training."""
    model, tokens = AutoModelForCausalLM.from_pretrained(path), torch.tensor(ids)
    return torch.cat([token_losses(model, tokens[at : at + length + 1]) for at in range(0, len(ids) - 1, length)])
