"""Finds the model of a run: config, tokenizer and weights, and the files for its checkpoints."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.checkpoint import (
    CONFIG,
    Location,
    TensorIndex,
    computed_entry,
    copy_model_files,
    locate,
    set_chat_template,
    set_classes,
)
from fsdp_shard.data import ROWS, DataConfig, Task, with_chat_template
from fsdp_shard.distributed import DistributedContext, run_on_all
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import SEQ2SEQ, ModelConfig, build_on_meta, classifier_name, load_config, load_tokenizer
from fsdp_shard.training.checkpoints.run_lock import RunLock
from fsdp_shard.training.config import ModelSettings
from fsdp_shard.training.peft.lora import Adapter, is_adapter_step
from fsdp_shard.training.seeding import derived_seed
from fsdp_shard.training.stop_signal import StopSignal
from fsdp_shard.utils import check, first_line, read_bounded


@dataclass(frozen=True)
class RunStart:
    """Where a run of `finetune` starts, and its ranks.

    Attributes:
        context: The ranks that train.
        source: The location of config, tokenizer and weights.
        resume_from: The directory of the step to resume from, if any.
        is_finished: Whether the run has already ended, so that nothing is left to do.
        stop: The signals that ask the run to stop.
        lock: The lock of the run directory.
        note: A line if the model that the run began from could not be compared with `model.path`.
        trust_remote_code: Whether code that comes with the model may run.
    """

    context: DistributedContext
    source: Location
    resume_from: Path | None = None
    is_finished: bool = False
    stop: StopSignal = field(default_factory=StopSignal)
    lock: RunLock = field(default_factory=RunLock)
    note: str | None = None
    trust_remote_code: bool = False

    def open_tokenizer(self) -> PreTrainedTokenizerBase:
        """Open the tokenizer of `source`."""
        return load_tokenizer(self.source.tokenizer_directory, self.trust_remote_code)


def model_source(config: ModelSettings, step_directory: Path | None) -> Location:
    """Return the source of config, tokenizer and weights: the step to resume from, or `model.path` if that step holds
    only an adapter or does not exist.
    """
    if step_directory is not None and not is_adapter_step(step_directory):
        return locate(step_directory)
    return config.source


def model_on_meta(settings: ModelConfig, source: Location) -> PreTrainedModel:
    """Build the model on the meta device, with the dtype and attention of `settings`, and without random layer drop."""
    config, trust = origin_config(settings, source), settings.trust_remote_code
    for name in _layer_drop(config):
        setattr(config, name, 0.0)
    return build_on_meta(config, settings.dtype, trust_remote_code=trust, attention=settings.attention)


def origin_config(settings: ModelConfig, source: Location) -> PretrainedConfig:
    """Load the config of a run's model, with the classes of a new head and a padding token if `labels` require one."""
    config = load_config(source.config_directory, settings.trust_remote_code)
    if settings.labels:
        config.architectures = [classifier_name(config)]
        config.id2label = dict(enumerate(settings.labels))
        config.label2id = {name: number for number, name in enumerate(settings.labels)}
        config.problem_type = None  # of the earlier head
        if pad_token(config) is None:
            end = getattr(config.get_text_config(), "eos_token_id", None)
            config.get_text_config().pad_token_id = end[0] if isinstance(end, list) else end
    return config


@dataclass(frozen=True)
class NewHead:
    """A classifier head that is drawn from a seed: normally distributed weights, zero biases.

    Attributes:
        tensors: Its tensors by FQN, on the meta device.
        deviation: Standard deviation of the weights, the `initializer_range` of the model.
        pooler: Those of them that are in the base model, a pooler that the checkpoint lacks.
    """

    tensors: Mapping[str, torch.Tensor]
    deviation: float
    pooler: Sequence[str] = ()

    @classmethod
    def of(cls, model: PreTrainedModel, index: TensorIndex | None = None) -> "NewHead":
        """Return the head of `model`: all parameters outside its base model, and a pooler that `index` lacks.

        A BERT of masked_lm is saved without the pooler that a classifier needs.
        """
        deviation = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
        tensors = model.state_dict(keep_vars=True)
        prefix = f"{model.base_model_prefix}."
        pooler = []
        if index is not None:
            stored = {*index.tensors, *(f"{prefix}{name}" for name in index.tensors)}
            pooler = [name for name in tensors if name.startswith(f"{prefix}pooler.") and name not in stored]
        outside = [name for name in tensors if not name.startswith(prefix)]
        return cls({name: tensors[name] for name in [*pooler, *outside]}, deviation, pooler)

    @property
    def modules(self) -> list[str]:
        """The names of its modules.

        Raises:
            ConfigError: One of them is in the base model, where an adapter does not train it.
        """
        if self.pooler:
            raise ConfigError(
                f"The checkpoint of model.path has no {self.pooler[0]}, which model.labels needs and an adapter does "
                f"not train; give adapter=none, or a checkpoint with a pooler."
            )
        return list(dict.fromkeys(name.partition(".")[0] for name in self.tensors))

    def add_to(self, index: TensorIndex, seed: int) -> None:
        """Add its tensors, drawn from `seed`, to `index`, in place of stored ones."""
        for name, tensor in self.tensors.items():
            index.tensors[name] = computed_entry(index, name, tensor, partial(self._draw, name, tensor, seed))

    def _draw(self, name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
        values = torch.zeros(like.shape)
        if like.ndim > 1:
            values.normal_(
                0.0, self.deviation, generator=torch.Generator().manual_seed(derived_seed("head", seed, name))
            )
        return values.to(like.dtype)

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"new head, drawn from the seed: {shapes}"


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
        ranks: The ranks that build it; all of them raise the error of any one.
        dtype: The name of the parameters' dtype, such as `bfloat16`.
        attention: The attention implementation; `auto` is the best one that the model supports.
        trust_remote_code: Run Python code that comes with the model.

    Returns:
        The model, in eval mode as `from_pretrained` returns it. After `shard`, `load_weights` fills it, and
        `model.module.train()` turns dropout on.

    Raises:
        ConfigError: `dtype`, `attention` or `trust_remote_code` is wrong.
        ModelError, CheckpointError: There is no such model, or it cannot be built.

    Example:
        >>> import fsdp_shard as fs
        >>> fs.build_model(model_directory).device
        device(type='meta')
    """

    def build() -> PreTrainedModel:
        given: dict[str, Any] = {"dtype": dtype, "attention": attention, "trust_remote_code": trust_remote_code}
        settings = ModelConfig(os.fspath(path), **given)
        check(settings)
        return model_on_meta(settings, locate(settings.path))

    return build() if ranks is None else run_on_all(ranks, build)


def layer_drop_notes(settings: ModelConfig, source: Location) -> list[str]:
    """Return a line about layer drop in the model's config, which training does not apply."""
    found = _layer_drop(load_config(source.config_directory, settings.trust_remote_code))
    rates = " and ".join(f"{name}={value}" for name, value in found.items())
    why = "no layer is dropped at random, as ranks would drop different ones"
    return [f"config.json has {rates}, which is not applied: {why}"] if found else []


def _layer_drop(config: PretrainedConfig) -> dict[str, float]:
    """Return the rates with which a model (M2M-100) skips whole layers at random in training."""
    return {name: value for name, value in config.to_dict().items() if name.endswith("layerdrop") and value}


def data_task(settings: ModelConfig, source: Location, samples: str = ROWS) -> Task:
    """Return the task that the data must be prepared for, with the special tokens and labels of the model.

    Args:
        settings: The settings of the model.
        source: The model.
        samples: The shape of the samples that the objective needs.
    """
    config = origin_config(settings, source)
    start = decoder_start(model_on_meta(settings, source)) if settings.task == SEQ2SEQ else 0
    label_ids = dict(getattr(config, "label2id", None) or {})
    num_labels = getattr(config, "num_labels", 0)
    found = getattr(config.get_text_config(), "vocab_size", None)
    vocabulary = found if isinstance(found, int) else None
    return Task(settings.task, start, num_labels, label_ids, pad_token(config) or 0, samples, vocabulary)


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


_SUMMARIZED = frozenset({"flaubert", "xlm", "xlnet"})  # whose classifiers use `summary_type`; GPT-2's does not


def check_classifier(config: PretrainedConfig, *, is_reward_model: bool = False) -> None:
    """Raise ModelError if a classifier has too few classes or several labels per text, or finds no end of a padded one.

    Args:
        config: Its config.
        is_reward_model: Whether it must have a single output instead.
    """
    num_labels = len(config.id2label or {})
    if is_reward_model and num_labels != 1:
        raise ModelError(
            f"objective=reward trains a model with one output, but this one has num_labels={num_labels} in its "
            f"config.json; set model.labels=[reward] for a new head."
        )
    if num_labels < 2 and not is_reward_model:
        raise ModelError(
            f"The model has num_labels={num_labels} in its config.json, and with one class there is nothing to learn; "
            f"set two or more, or model.labels for a new head."
        )
    problem = getattr(config, "problem_type", None)
    if problem not in (None, "single_label_classification") and not is_reward_model:
        raise ModelError(
            f"The model has problem_type={problem} in its config.json, but a text has one class here; set problem_type "
            f"to single_label_classification there if that is intended, or set model.labels of finetune for a new head."
        )
    summary = getattr(config, "summary_type", "first")
    if config.model_type in _SUMMARIZED and summary != "first":
        raise ModelError(
            f"The classifier of {config.model_type} with summary_type={summary} in its config.json reads the padding "
            f"after a text; use another model."
        )
    if pad_token(config) is None:
        raise ModelError(
            "The model has no pad_token_id in its config.json, which a classifier needs to find the end of a text; add "
            "one, such as its end-of-text token."
        )


def pad_token(config: PretrainedConfig) -> int | None:
    """Return the padding token of the model, if it has one."""
    found: int | None = getattr(config.get_text_config(), "pad_token_id", None)
    return found


def collect_model_files(
    source: Location, settings: ModelConfig, data: DataConfig, adapter: Adapter | None = None
) -> dict[str, bytes]:
    """Collect the files that make a directory of weights a model: config, generation config and tokenizer.

    Args:
        source: The model.
        settings: Its settings; the dtype is for the config.
        data: The settings of the data; the chat template that they choose or change becomes the only one.
        adapter: The adapter that is saved instead of the model, with its own files, and with the tokenizer only if
            that has another chat template.

    Returns:
        File name -> content.
    """
    has_own_template = data.chat_template is not None or bool(data.template_variables)
    if adapter is not None and not has_own_template:
        return adapter.files()
    with TemporaryDirectory() as directory:
        # Settings of a quantization are outdated: only plain numbers are trained.
        names = copy_model_files(source.model_files, Path(directory), settings.dtype, is_dequantized=True)
        files = {name: read_bounded(Path(directory) / name, "tokenizer_bytes") for name in names}
    if settings.labels and adapter is None:
        files[CONFIG] = set_classes(files[CONFIG], classifier_entries(settings, model_on_meta(settings, source)))
    if not has_own_template:
        return files
    tokenizer = with_chat_template(load_tokenizer(source.tokenizer_directory, settings.trust_remote_code), data)
    name = data.chat_template if data.template_text is None else None
    files = set_chat_template(files, str(tokenizer.chat_template), name, tokenizer_only=adapter is not None)
    return files if adapter is None else files | adapter.files()


def classifier_entries(settings: ModelConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Return the entries of config.json that a new head changes: the class of the model, its classes and padding."""
    return {
        "architectures": [type(model).__name__],
        "id2label": {str(number): name for number, name in enumerate(settings.labels)},
        "label2id": {name: number for number, name in enumerate(settings.labels)},
        "pad_token_id": pad_token(model.config),
    }
