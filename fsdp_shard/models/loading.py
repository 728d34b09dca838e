"""Config and tokenizer of a model, and the check that its class fits the task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.errors import ModelError
from fsdp_shard.models.transformers_private import model_classes
from fsdp_shard.utils import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def load_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the transformers config of a model.

    Args:
        directory: The directory of config.json.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ModelError: The config is missing or transformers cannot use it.
    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(f"The config in {directory} cannot be used: {first_line(error)}") from error
    return config


def check_model_config(directory: Path) -> None:
    """Raise ModelError unless a directory has a config.json that names a model type. Imports no transformers."""
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{directory} is not a model: it has no config.json; expected a Hugging Face model directory. If it has "
            "only weights, copy config.json and the tokenizer of their base model into it."
        )
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise ModelError(f"{config} has no model_type, so the architecture is unknown.")


def check_causal(config: PretrainedConfig) -> None:
    """Raise ModelError unless `config` names a causal language model."""
    import transformers

    if config.is_encoder_decoder:
        raise ModelError(
            f"{config.model_type} is an encoder-decoder model; a decoder-only model, which predicts the next token, is "
            "required."
        )
    name = next(iter(config.architectures or ()), "")
    known = getattr(transformers, name, None)
    if known is not None and not known.can_generate():
        raise ModelError(
            f"The model is a {name}, which does not predict the next token; a causal language model is required."
        )


def check_model_task(config: PretrainedConfig, task: str) -> None:
    """Check that the model class named by `config` fits the task.

    Args:
        config: The config of the model.
        task: The value of `model.task`.

    Raises:
        ModelError: The class is for another task.
    """
    import transformers

    if task == "causal_lm":
        check_causal(config)
        return
    auto = {
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "masked_lm": transformers.AutoModelForMaskedLM,
        "sequence_classification": transformers.AutoModelForSequenceClassification,
    }[task]
    name = next(iter(config.architectures or ()), "")
    fitting = [cls.__name__ for cls in model_classes(auto, config)]
    if name not in fitting:
        needed = " or ".join(fitting) or f"model of its kind, and transformers has none of type {config.model_type}"
        raise ModelError(
            f"The model is a {name or config.model_type}, but model.task={task} needs a {needed}. Convert it with "
            f"transformers' {auto.__name__}.from_pretrained(...) and save it, or choose another model.task."
        )


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        directory: The directory of the tokenizer files.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ModelError: The tokenizer files are missing or transformers cannot use them.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, OSError, ImportError, TypeError) as error:
        raise ModelError(
            f"There is no usable tokenizer in {directory}: {first_line(error)} "
            f"Copy the tokenizer files of the original model into that directory."
        ) from error
    return tokenizer
