"""Loads a model's files except its weights: config, tokenizer, the model on the meta device, and its buffers."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.import_utils import is_kernels_available

from fsdp_shard.errors import ModelError, deleted_meanwhile
from fsdp_shard.models.config import CAUSAL, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION
from fsdp_shard.models.file_errors import config_file, model_errors
from fsdp_shard.models.model_directory import check_model_files
from fsdp_shard.models.offline import without_requests
from fsdp_shard.models.transformers_private import (
    attention_implementation,
    build_from_config,
    dtypes_to_keep,
    forget_implementations,
    initialize,
    model_classes,
    model_types,
)
from fsdp_shard.models.trials import refuse_large_buffers, try_config, try_tokenizer
from fsdp_shard.utils import non_persistent_buffers, set_environment

_ATTENTION = re.compile(r"Attention|MLA$")  # in class names
_AUTO_CLASSES: dict[str, Any] = {
    SEQ2SEQ: transformers.AutoModelForSeq2SeqLM,
    MASKED_LM: transformers.AutoModelForMaskedLM,
    SEQUENCE_CLASSIFICATION: transformers.AutoModelForSequenceClassification,
}
_CONTEXT_TOKENS = 16  # of a text that is continued
_TOKENIZER_FILES = re.compile(r"tokeniz|vocab|merges|spm|spiece|sentencepiece|codes")  # in file names
# Their code in transformers downloads native code if the package `kernels` is installed.
_DOWNLOADING = frozenset({"rwkv", "yoso", "mra", "sam3_video"})


def load_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the transformers config of a model, ignoring the attention or kernels that it names: users choose those.

    Args:
        directory: The directory of config.json.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ModelError: The config is missing, transformers cannot use it, it requires a download, or building the model
            takes too much time or memory, even without weights; or the directory was deleted meanwhile.
    """
    try:
        _check_files(directory, trust_remote_code)
        with model_errors(f"The config in {directory} cannot be used"):
            config = _read_config(directory, trust_remote_code)
    except ModelError:
        if directory.exists():
            raise
        raise ModelError(deleted_meanwhile(directory)) from None
    _check_values(config)
    return config


def _check_files(directory: Path, trust_remote_code: bool) -> None:
    check_model_files(directory)
    if not trust_remote_code:
        try_config(directory, lambda: build_on_meta(_read_config(directory, trust_remote_code)))


def _read_config(directory: Path, trust_remote_code: bool) -> PretrainedConfig:
    with without_requests(unless=trust_remote_code):
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    forget_implementations(config)
    return config


def _check_values(config: PretrainedConfig) -> None:
    """Raise ModelError for values that transformers accepts, but that would cause misleading errors later."""
    names = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"{config_file(config)}: architectures is {names!r}; expected a list of names of classes.")
    for name in ("text_config", "decoder", "generator", "text_encoder"):  # what `get_text_config` may return
        if isinstance(value := getattr(config, name, None), (str, int, float, list)):
            raise ModelError(f"{config_file(config)}: {name} is {value!r}; expected an object.")
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 0:
        raise ModelError(f"{config_file(config)}: num_hidden_layers is {layers}; expected a count.")
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary < 1:
        raise ModelError(
            f"{config_file(config)}: vocab_size is {vocabulary}; expected the number of tokens, at least 1."
        )


def named_class(config: PretrainedConfig) -> tuple[str, Any]:
    """Return the name of the class that a config names, or else of its type; and the class, if transformers has it.

    For an encoder-decoder model whose class transformers has removed (T5WithLMHeadModel), it is the class of its type.
    """
    name = next(iter(config.architectures or ()), "")
    found = getattr(transformers, name, None)
    if is_model_class(found):
        return name, found
    if config.is_encoder_decoder and not hasattr(config, "auto_map"):
        for cls in model_classes(_AUTO_CLASSES[SEQ2SEQ], config):
            return cls.__name__, cls
    return name or config.model_type, None


def is_model_class(value: Any) -> bool:
    """Whether an attribute of transformers, which also has functions and modules, is a model class."""
    return isinstance(value, type) and issubclass(value, PreTrainedModel)


def check_causal(config: PretrainedConfig) -> None:
    """Raise ModelError unless `config` names a causal language model."""
    if config.is_encoder_decoder:
        raise ModelError(
            f"{config_file(config)}: {config.model_type} is an encoder-decoder model; a decoder-only model, which "
            "predicts the next token, is required."
        )
    name, cls = named_class(config)
    if cls is not None and not cls.can_generate():
        raise ModelError(
            f"{config_file(config)} is of a {name}, which does not predict the next token; a causal language model is "
            "required."
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
    if task == CAUSAL:
        try:
            check_causal(config)
        except ModelError as error:
            raise ModelError(f"{error}{_fitting_tasks(config)}") from error
        return
    auto = _AUTO_CLASSES[task]
    fitting = [cls.__name__ for cls in model_classes(auto, config)]
    if name not in fitting:
        new_head = "set model.labels for a new head, " if task == SEQUENCE_CLASSIFICATION and fitting else ""
        needed = " or ".join(fitting) or f"model of its kind, and transformers has none of type {config.model_type}"
        raise ModelError(
            f"The model is a {name}, but model.task={task} needs a {needed}. Convert it with transformers' "
            f"{auto.__name__}.from_pretrained(...) and save it, {new_head}or choose another task."
            f"{_fitting_tasks(config)}"
        )


def classifier_name(config: PretrainedConfig) -> str:
    """Return the classifier class for the type of `config`; raise ModelError if transformers has none."""
    if found := model_classes(_AUTO_CLASSES[SEQUENCE_CLASSIFICATION], config):
        return found[0].__name__
    raise ModelError(
        f"transformers has no classifier of type {config.model_type}, so model.labels cannot give this model a new "
        f"head; use another model."
    )


def _fitting_tasks(config: PretrainedConfig) -> str:
    """Return ` Set model.task=X, which fits a Y.`, or an empty string if no task fits."""
    name, cls = named_class(config)
    fitting = [
        task
        for task, auto in _AUTO_CLASSES.items()
        if (classes := [found.__name__ for found in model_classes(auto, config)])
        and (name in classes or (not config.architectures and config.is_encoder_decoder == (task == SEQ2SEQ)))
    ]
    if not config.is_encoder_decoder and cls is not None and cls.can_generate():
        fitting.insert(0, CAUSAL)
    return f" Set model.task={' or '.join(fitting)}, which fits a {name}." if fitting else ""


def load_tokenizer(
    directory: Path, trust_remote_code: bool = False, *, can_be_named: bool = True
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        directory: The directory of the tokenizer files.
        trust_remote_code: Run Python code that comes with the model.
        can_be_named: Whether the command accepts another directory with tokenizer=PATH.

    Raises:
        ModelError: The tokenizer files are missing, transformers cannot use them, or the tokenizer or its chat template
            takes too much time or memory for a few words.
    """
    _check_files(directory, trust_remote_code)  # transformers reads the tokenizer class from the config
    advice = "Copy the tokenizer files of the original model into that directory"
    if can_be_named:
        advice += ", or name them with tokenizer=PATH (generate, evaluate, convert; --tokenizer in diff)"
    with model_errors(f"There is no usable tokenizer in {directory}", f"{advice}."):
        with without_requests(unless=trust_remote_code):
            try:
                tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
            except (ValueError, OSError) as error:
                if any(_TOKENIZER_FILES.search(path.name) for path in directory.iterdir()):
                    raise
                raise OSError("it has no tokenizer files.") from error  # transformers explains how to convert them
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"its class {type(tokenizer).__name__} is that of no tokenizer.")
        try_tokenizer(tokenizer, directory)
        # Some settings of a wrong type fail only then. A process forked later would miss threads of this one.
        with set_environment({"TOKENIZERS_PARALLELISM": "false"}):
            tokenizer("a")
    return tokenizer


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: those of the model's generation config, and the one used in training.

    Args:
        model: The model; its generation config may name one token, several or none.
        tokenizer: Its tokenizer; `finetune` appends its end-of-text token to each answer.
    """
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    given = [*own] if isinstance(own, (list, tuple)) else [own]
    return list(dict.fromkeys(token for token in (*given, tokenizer.eos_token_id) if isinstance(token, int)))


def until_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return the tokens of an answer up to and including the first end token."""
    stop = next((position for position, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: stop + 1])


def continued_text(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Return the text that the tokens of `answer` add to that of `prompt`, without special tokens.

    SentencePiece decoders leave out the space before a token unless it follows another one.
    """

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    length = _CONTEXT_TOKENS
    # The last tokens of the prompt suffice, unless they begin within a character.
    while "\ufffd" in (before := decode(prompt[-length:])) and length < len(prompt):
        length *= 2
    text = decode([*prompt[-length:], *answer])
    return text[len(before) :] if text.startswith(before) else decode(answer)


def check_vocabulary(ids: Any, config: PretrainedConfig) -> None:
    """Raise ModelError unless a model's vocabulary has all of these tokens; errors of a GPU would hide the cause.

    Args:
        ids: Token ids in an array, a tensor or a list.
        config: The config of the model.
    """
    num_tokens = getattr(config.get_text_config(), "vocab_size", None)
    largest = int(max(ids, default=0)) if isinstance(ids, list) else int(ids.max()) if len(ids) else 0
    if isinstance(num_tokens, int) and largest >= num_tokens:
        raise ModelError(
            f"{config_file(config)} has a vocabulary of {num_tokens} tokens, but the tokenizer makes token {largest}: "
            f"it belongs to another model. Copy the tokenizer files of this one."
        )


def build_on_meta(
    config: PretrainedConfig,
    dtype: str | torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> PreTrainedModel:
    """Build a model on the meta device, with tied weights tied and in eval mode.

    Buffers that its class keeps in float32, such as those of DeepSeek's routers, have that dtype, as in
    `from_pretrained`.

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
    if not trust_remote_code and is_kernels_available() and (types := _DOWNLOADING & model_types(config)):
        raise ModelError(
            f"transformers downloads native code for models of type {min(types)}, as the package kernels is installed; "
            "uninstall it, or allow that with trust_remote_code=true."
        )
    # For a requested flash attention without its package, transformers downloads kernels.
    is_asked_for = trust_remote_code or "attn_implementation" in kwargs
    with (
        model_errors(f"{name} cannot be built from {config_file(config)}"),
        without_requests(unless=is_asked_for),
        torch.device("meta"),
    ):
        if cls is not None:
            model = build_from_config(cls, config, **kwargs)
        else:
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, trust_remote_code=trust_remote_code, **kwargs)
        if getattr(model.config, "rescale_every", 0):
            # In eval mode, RWKV divides weights in place, against overflow in float16: a run would save the divided
            # weights, and those of a block on disk are read again.
            model.config.rescale_every = 0
        model.tie_weights()
        keep_dtypes(model, kwargs["dtype"], model.named_buffers(remove_duplicate=False))
        return model.eval()  # type: ignore[no-any-return]  # torch leaves eval() untyped here


def build_class_on_meta(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of exactly `model_class` on the meta device, to look at its modules; `config` stays as it is."""
    with without_requests(unless=False), torch.device("meta"):
        return build_from_config(model_class, copy.deepcopy(config), attn_implementation="eager")


def keep_dtypes(model: PreTrainedModel, dtype: torch.dtype, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Convert `tensors`, by name, of a model in `dtype` to the dtype in which `from_pretrained` would keep them."""
    kept = kept_dtype(model, dtype)
    for name, tensor in tensors:
        if (own := kept(name)) is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(own)


def kept_dtype(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Return a function from a name to the dtype in which `from_pretrained`, loading in `dtype`, keeps the tensor.

    The function returns None for tensors that are loaded in `dtype`.
    """
    kept = [(re.compile(glob.replace("*", ".*")), own) for glob, own in dtypes_to_keep(model, dtype).items()]
    return lambda name: next((own for pattern, own in kept if pattern.search(name)), None)


def attention_implementations(model: nn.Module) -> list[str]:
    """Return the attention implementations of a model, such as `sdpa`; its parts may differ.

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
    """Compute the non-persistent buffers of a model (rotary frequencies, masks), which checkpoints do not store.

    transformers computes them in `_init_weights`, which `from_pretrained` also calls, so the values are bit-equal.
    Parameters do not change: modules with such buffers have none, or they stay on the meta device.

    Args:
        model: A model whose buffers may be on the meta device.
        device: The device for the buffers.

    Raises:
        ModelError: A module outside of any transformers model has such buffers, or they take too much memory.
    """
    refuse_large_buffers(model)
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
        for model_around in dict.fromkeys(owners.values()):  # some compute the buffers of their submodules (Falcon-H1)
            if all(param.is_meta for param in model_around.parameters()):
                initialize(model_around, model_around)


def computed_tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    """Return the values of a parameter or buffer that `from_pretrained` computes if no checkpoint stores it.

    Args:
        model: A model, possibly on the meta device; it is not changed.
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
            values.fill_(seed)  # remains if nothing is computed
            initialize(_owners(model)[module], copied)
        found.append(getattr(copied, leaf).detach())
    return found[0] if torch.equal(*found) else None


def _owners(model: nn.Module) -> dict[nn.Module, PreTrainedModel]:
    """Map each module to the innermost transformers model that contains it."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return {module: owner for owner in inner for module in owner.modules()}  # the innermost comes last
