"""Where a run takes its model from: config, tokenizer and weights, and the files for its checkpoints."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.checkpoint import Location, copy_model_files, locate, set_chat_template
from fsdp_shard.data import SEQ2SEQ, DataConfig, Task, with_chat_template
from fsdp_shard.distributed import DistributedContext, run_on_all
from fsdp_shard.errors import ModelError
from fsdp_shard.models import ModelConfig, build_on_meta, load_config, load_tokenizer
from fsdp_shard.training.config import ModelSettings
from fsdp_shard.training.peft.lora import Adapter, is_adapter_step
from fsdp_shard.utils import check, first_line, read_bounded


def model_source(config: ModelSettings, step_directory: Path | None) -> Location:
    """Return the source of config, tokenizer and weights: the step to resume from, unless it holds only an adapter, or
    `model.path`.
    """
    if step_directory is not None and not is_adapter_step(step_directory):
        return locate(step_directory)
    return config.source


def empty_model(config: ModelConfig, source: Location) -> PreTrainedModel:
    """Build the model on the meta device, with the dtype and attention of `config`; it drops no layers at random."""
    model, trust = load_config(source.directory, config.trust_remote_code), config.trust_remote_code
    for name in _dropped_layers(model):
        setattr(model, name, 0.0)
    return build_on_meta(model, config.dtype, trust_remote_code=trust, attention=config.attention)


def build_model(
    path: str | os.PathLike[str],
    ranks: DistributedContext | None = None,
    *,
    dtype: str = "float32",
    attention: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build a model of transformers on the meta device, where it takes no memory, to be sharded and then filled.

    Args:
        path: A model directory, a run, a step or any checkpoint with a config.json, or a hub id.
        ranks: The ranks that build it, which then all raise what one of them finds.
        dtype: The dtype of the parameters.
        attention: The implementation of attention; `auto` is the best that the model supports.
        trust_remote_code: Run Python code that comes with the model.

    Returns:
        The model. After `shard`, `load_weights` fills it.

    Raises:
        ModelError, CheckpointError: There is no such model, or it cannot be built.

    Example:
        >>> import fsdp_shard as fs
        >>> fs.build_model(model_directory).device
        device(type='meta')
    """

    def build() -> PreTrainedModel:
        settings: dict[str, Any] = {"dtype": dtype, "attention": attention, "trust_remote_code": trust_remote_code}
        config = ModelConfig(os.fspath(path), **settings)
        check(config)
        return empty_model(config, locate(config.path))

    return build() if ranks is None else run_on_all(ranks, build)


def layer_drop_notes(config: ModelConfig, source: Location) -> list[str]:
    """Return a line about layers that the model is not trained to drop, if its config asks for that."""
    found = _dropped_layers(load_config(source.directory, config.trust_remote_code))
    settings = " and ".join(f"{name}={value}" for name, value in found.items())
    why = "no layer is dropped at random, as ranks would drop different ones"
    return [f"config.json has {settings}, which is not applied: {why}"] if found else []


def _dropped_layers(model: PretrainedConfig) -> dict[str, float]:
    """The settings by which a model (M2M-100) skips whole layers at random when it trains."""
    return {name: value for name, value in model.to_dict().items() if name.endswith("layerdrop") and value}


def data_task(config: ModelConfig, source: Location) -> Task:
    """Return what the data must be prepared for: the task, and the special tokens and labels of the model."""
    model = load_config(source.directory, config.trust_remote_code)
    start = decoder_start(empty_model(config, source)) if config.task == SEQ2SEQ else 0
    label_ids = dict(getattr(model, "label2id", None) or {})
    return Task(config.task, start, getattr(model, "num_labels", 0), label_ids, pad_token(model) or 0)


def decoder_start(model: PreTrainedModel) -> int:
    """Return the token that the decoder's input starts with, as the model itself prepends it to a target.

    mBART prepends the last token of the target, which names its language; its config must name one for the run.

    Raises:
        ModelError: The model has no such token.
    """
    name, config = type(model).__name__, model.config
    configured: int | None = getattr(config, "decoder_start_token_id", None)
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    found = {configured}
    try:
        if shift is not None:
            found = {int(shift(labels=torch.tensor([[first, first + 1]]))[0, 0]) for first in (5, 7)}
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{name} cannot make the decoder's input from a target: {first_line(error)}") from error
    start = found.pop() if len(found) == 1 else configured
    if start is None:
        raise ModelError(
            f"{name} has no decoder_start_token_id in its config.json, the token that a target starts with; add it "
            f"there: for a multilingual model, the token of the target language."
        )
    return start


def check_classifier(model: PretrainedConfig) -> None:
    """Raise ModelError if a classifier has fewer than two classes, or cannot find the end of a padded text."""
    if (num_labels := len(model.id2label or {})) < 2:
        raise ModelError(
            f"The model has num_labels={num_labels} in its config.json, and with one class there is nothing to learn; "
            f"set two or more."
        )
    if pad_token(model) is None:
        raise ModelError(
            "The model has no pad_token_id in its config.json, which a classifier needs to find the end of a text; add "
            "one, such as its end-of-text token."
        )


def pad_token(model: PretrainedConfig) -> int | None:
    """Return the padding token of the model, if it has one."""
    found: int | None = getattr(model.get_text_config(), "pad_token_id", None)
    return found


def collect_model_files(
    source: Location, model: ModelConfig, data: DataConfig, adapter: Adapter | None = None
) -> dict[str, bytes]:
    """Collect the files that make a directory of weights a model: config, generation config and tokenizer.

    Args:
        source: The model.
        model: Its settings; the dtype is for the config.
        data: The settings of the data; `data.chat_template` becomes the only chat template.
        adapter: The adapter that is saved instead of the model, with files of its own, and with the tokenizer only if
            that has another chat template.

    Returns:
        File name -> content.
    """
    if adapter is not None and data.chat_template is None:
        return adapter.files()
    with TemporaryDirectory() as directory:
        names = copy_model_files(source.model_files, Path(directory), model.dtype)
        files = {name: read_bounded(Path(directory) / name, "tokenizer_bytes") for name in names}
    if data.chat_template is None:
        return files
    tokenizer = with_chat_template(load_tokenizer(source.tokenizer, model.trust_remote_code), data)
    name = data.chat_template if data.template_text is None else None
    files = set_chat_template(files, str(tokenizer.chat_template), name, tokenizer_only=adapter is not None)
    return files if adapter is None else files | adapter.files()
