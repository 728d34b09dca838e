"""The provenance of an evaluation's figures, for result.json: weights, tokenizer, settings and versions."""

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fsdp_shard import __version__
from fsdp_shard.checkpoint import Location, config_digest, describe_model, has_file
from fsdp_shard.data import tokenizer_state
from fsdp_shard.evaluation.config import GENERATION, LM_EVAL, SPEED
from fsdp_shard.evaluation.evaluation_base import EvaluationBase
from fsdp_shard.utils import json_digest

_PACKAGES = ("transformers", "tokenizers", "numpy")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the xxh3_128 of everything that determines the tokens of a text or a conversation."""
    return json_digest([tokenizer_state(tokenizer), tokenizer.chat_template])


def versions_of_figures() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute the figures."""
    # The metadata of torch's wheels on PyPI lacks the build, such as +cu130; fsdp-shard need not be installed.
    imported = {"python": platform.python_version(), "fsdp-shard": __version__, "torch": str(torch.__version__)}
    return imported | {name: importlib.metadata.version(name) for name in _PACKAGES}


def provenance(
    evaluation: EvaluationBase, settled: Mapping[str, Any], data_digest: str | None = None
) -> dict[str, Any]:
    """Return everything that the figures of an evaluation depend on, as JSON; reads all weights.

    Args:
        evaluation: The evaluation, or what every task is given.
        settled: Settings that belong to the task.
        data_digest: Digest of the data, of a task that has any; its figures also depend on the seed.
    """
    settings = evaluation.settings
    dispatch = asdict(settings.dispatch)
    batch_size = {"batch_size": settings.batch_size}
    if settings.task == SPEED:  # the task sets its own batch sizes
        batch_size = {}
    else:  # affects only the speed
        del dispatch["prefetch_blocks"], dispatch["schedule"]
    found: dict[str, Any] = {"weights": describe_model(settings.source)}
    if settings.task in (LM_EVAL, GENERATION):  # this file determines how answers are chosen and end
        found["generation_config"] = _generation_config(settings.source)
    if data_digest is not None:
        path = settings.data.eval_path or settings.data.path
        found |= {"data": {"path": path, "kind": settings.data.kind, "digest": data_digest}, "seed": evaluation.seed}
    return found | {
        "tokenizer": {"digest": tokenizer_digest(evaluation.tokenizer)},
        "settings": {"task": settings.task, **settled, **batch_size, "dispatch": dispatch},
        "versions": versions_of_figures(),
    }


def _generation_config(source: Location) -> dict[str, str] | None:
    """The digest of generation_config.json; without the file, the model's config applies."""
    name = "generation_config.json"
    return {"digest": config_digest(source.config_directory, name)} if has_file(source.config_directory, name) else None
