"""A model from its files, without its weights: config, tokenizer, the model on the meta device, and its buffers."""

import copy
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.errors import ModelError
from fsdp_shard.models.transformers_private import (
    attention_implementation,
    build_from_config,
    initialize,
    model_classes,
)
from fsdp_shard.utils import first_line, non_persistent_buffers

_ATTENTION = re.compile(r"Attention|MLA$")  # in names of classes
_AUTO_CLASSES: dict[str, Any] = {
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
}


def load_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the transformers config of a model.

    Args:
        directory: The directory of config.json.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ModelError: The config is missing or transformers cannot use it.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(f"The config in {directory} cannot be used: {first_line(error)}") from error
    return config


def named_class(config: PretrainedConfig) -> tuple[str, Any]:
    """Return the name of the class that a config names, or else of its type; and the class, if transformers has it."""
    name = next(iter(config.architectures or ()), "")
    return name or config.model_type, getattr(transformers, name, None)


def check_causal(config: PretrainedConfig) -> None:
    """Raise ModelError unless `config` names a causal language model."""
    if config.is_encoder_decoder:
        raise ModelError(
            f"{config.model_type} is an encoder-decoder model; a decoder-only model, which predicts the next token, is "
            "required."
        )
    name, cls = named_class(config)
    if cls is not None and not cls.can_generate():
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
    name, _ = named_class(config)
    if task == "causal_lm":
        try:
            check_causal(config)
        except ModelError as error:
            raise ModelError(f"{error}{_fitting_tasks(config)}") from error
        return
    auto = _AUTO_CLASSES[task]
    fitting = [cls.__name__ for cls in model_classes(auto, config)]
    if name not in fitting:
        needed = " or ".join(fitting) or f"model of its kind, and transformers has none of type {config.model_type}"
        raise ModelError(
            f"The model is a {name}, but model.task={task} needs a {needed}. Convert it with transformers' "
            f"{auto.__name__}.from_pretrained(...) and save it, or choose another task.{_fitting_tasks(config)}"
        )


def _fitting_tasks(config: PretrainedConfig) -> str:
    """` Set model.task=X, which fits a Y.`, or an empty string if no task does."""
    name, cls = named_class(config)
    fitting = [
        task
        for task, auto in _AUTO_CLASSES.items()
        if (classes := [found.__name__ for found in model_classes(auto, config)])
        and (name in classes or (not config.architectures and config.is_encoder_decoder == (task == "seq2seq")))
    ]
    if not config.is_encoder_decoder and cls is not None and cls.can_generate():
        fitting.insert(0, "causal_lm")
    return f" Set model.task={' or '.join(fitting)}, which fits a {name}." if fitting else ""


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        directory: The directory of the tokenizer files.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ModelError: The tokenizer files are missing or transformers cannot use them.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, OSError, ImportError, TypeError) as error:
        raise ModelError(
            f"There is no usable tokenizer in {directory}: {first_line(error)} "
            f"Copy the tokenizer files of the original model into that directory, or name them with tokenizer=PATH "
            f"(generate, evaluate, convert; --tokenizer in diff)."
        ) from error
    return tokenizer


def build_on_meta(
    config: PretrainedConfig,
    dtype: str | torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> PreTrainedModel:
    """Build a model on the meta device, with tied weights tied and in eval mode.

    Args:
        config: The config of the model. The class is the first of its `architectures`, or the causal LM of its type.
        dtype: Dtype of the parameters; None uses that of the config.
        trust_remote_code: Whether code that comes with the model may run.
        attention: Attention implementation, as named by transformers; None or `auto` is its choice: sdpa, or eager.

    Returns:
        The model; its parameters and buffers take no memory.

    Raises:
        ModelError: transformers cannot build the model.
    """
    kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype or config.dtype}
    if attention not in (None, "auto"):
        kwargs["attn_implementation"] = attention
    name, cls = named_class(config)
    try:
        with torch.device("meta"):
            if cls is not None:
                model = build_from_config(cls, config, **kwargs)
            else:
                auto = transformers.AutoModelForCausalLM
                model = auto.from_config(config, trust_remote_code=trust_remote_code, **kwargs)
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise ModelError(f"{name} cannot be built: {first_line(error)}") from error
    if getattr(model.config, "rescale_every", 0):
        # In eval mode, RWKV divides weights in place, against overflow in float16: a run would save them so, and those
        # of a block on disk are read again.
        model.config.rescale_every = 0
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]  # torch leaves eval() untyped here


def attention_implementations(model: nn.Module) -> list[str]:
    """Return what the attention of a model is computed with, such as `sdpa`; its parts may differ.

    Args:
        model: A transformers model, or one in a wrapper.

    Returns:
        The names, each once, in module order; empty if the model has no attention.
    """
    owners = _owners(model).items()
    found = (
        attention_implementation(owner.config) for module, owner in owners if _ATTENTION.search(type(module).__name__)
    )
    return list(dict.fromkeys(found))


def rebuild_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the non-persistent buffers of a model (rotary frequencies, masks), which no checkpoint holds.

    transformers computes them in `_init_weights`, which `from_pretrained` calls too, so the values are bit-equal to
    its own. Parameters do not change: modules with such buffers have none, or they stay on the meta device.

    Args:
        model: A model whose buffers may be on the meta device.
        device: The device for the buffers.

    Raises:
        ModelError: A module outside of any transformers model has such buffers.
    """
    owners = _owners(model)
    with torch.no_grad():
        for module in model.modules():
            buffers = dict(non_persistent_buffers(module))
            if not buffers:
                continue
            if (owner := owners.get(module)) is None:
                raise ModelError(
                    f"The non-persistent buffers {', '.join(buffers)} of {type(module).__name__} cannot be computed on "
                    f"{device}: it is not part of a transformers model."
                )
            for name, buffer in buffers.items():
                setattr(module, name, torch.empty_like(buffer, device=device))
            initialize(owner, module)
        for model_around in dict.fromkeys(
            owners.values()
        ):  # some compute the buffers of modules inside of them (Falcon-H1)
            if all(param.is_meta for param in model_around.parameters()):
                initialize(model_around, model_around)


def computed_tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    """The values of a parameter or buffer that `from_pretrained` computes where no checkpoint holds it.

    Args:
        model: A model that may be on the meta device, and does not change.
        name: FQN of the tensor.

    Returns:
        The values on the CPU, in the tensor's dtype; None if they would be random, or are not computed.
    """
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    found: list[torch.Tensor] = []
    for seed in (0, 1):
        copied = copy.deepcopy(module, {id(child): None for child in module.children()}).to_empty(device="cpu")
        values: torch.Tensor = getattr(copied, leaf)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            values.fill_(seed)  # which remains where nothing is computed
            initialize(_owners(model)[module], copied)
        found.append(getattr(copied, leaf).detach())
    return found[0] if torch.equal(*found) else None


def _owners(model: nn.Module) -> dict[nn.Module, PreTrainedModel]:
    """Each module -> the innermost transformers model that it is in."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return {module: owner for owner in inner for module in owner.modules()}  # the innermost comes last
