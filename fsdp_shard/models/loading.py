"""Opening a model: where it lies, its config and tokenizer, an empty copy on the meta device, its computed buffers.

Values of parameters are none of this module's business: checkpoints are read through the tensor index, by whoever
knows which part of them this rank or device needs. It knows no wrapper and no device map.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ModelError
from fsdp_shard.models.gguf_config import side_directory
from fsdp_shard.utils import REQUIRED, setting

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# What a snapshot of a hub repository needs for us: no other framework's weights, no pickles where safetensors exist.
_HUB_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.spm", "*.codes", "*.tiktoken", "*.tokenizer")
_HUB_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin", "*.bin.index.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", ".metadata", "global_step*")


# What a run says first that has one of the settings `trust_remote_code` on.
REMOTE_CODE = (
    "Python files that come with the model are run on each rank and can do whatever you can: read your files and "
    "secrets, change them, use the network. Read them first, or leave it off."
)


@dataclass
class ModelConfig:
    """Which model, and how it is held while it trains."""

    path: str = setting(
        REQUIRED, "A directory, a GGUF file, a checkpoint or run of ours, or a hub id such as org/name."
    )
    gguf_file: str | None = setting(None, "Name of a GGUF file inside model.path, when that is a directory or hub id.")
    dtype: str = setting(
        "float32",
        "The dtype of the weights that the optimizer updates (compute has shard.param_dtype).",
        choices=("float32", "bfloat16", "float16"),
    )
    task: str = setting(
        "causal_lm",
        "What the model is trained to do: predict the next token, a target from a source, hidden tokens, or the class "
        "of a text.",
        choices=("causal_lm", "seq2seq", "masked_lm", "sequence_classification"),
    )
    attention: str = setting(
        "sdpa", "The attention implementation, in transformers' words.", choices=("sdpa", "eager", "flash_attention_2")
    )
    chunked_loss: bool | str = setting(
        "auto",
        "Compute the loss from the output head a few tokens at a time, so that the logits are never there as a whole. "
        "auto: for a vocabulary of 65,536 tokens or more, where the model allows it.",
        choices=("auto", True, False),
    )
    kernels: str = setting(
        "none",
        "Fused kernels in the place of the model's own norms, rotary positions and gated layers. liger: those of "
        "liger-kernel, on GPUs (needs the extra `liger`); the loss stays that of model.chunked_loss.",
        choices=("none", "liger"),
    )
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with the model. Only for sources you trust.", warning=REMOTE_CODE
    )


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies: config and tokenizer in `directory`; the weights there too, or in `elsewhere`, and the
    tokenizer in `own_tokenizer` where an adapter has one.
    """

    directory: Path
    elsewhere: Path | None = None
    own_tokenizer: Path | None = None

    @property
    def weights(self) -> Path:
        """What the tensor index opens."""
        return self.elsewhere or self.directory

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer's files."""
        return self.own_tokenizer or self.directory


def resolve(
    path: str | os.PathLike[str],
    gguf_file: str | None = None,
    *,
    need_weights: bool = True,
    fetch_weights: bool = True,
) -> ModelSource:
    """Find the model that `path` means: a directory, a file of weights beside its config, a GGUF file, or a hub id.

    Without `fetch_weights`, of a hub id only config and tokenizer are downloaded (or a GGUF file, which says all in
    one). Raises ModelError when there is none, it has no config, or (with `need_weights`) it has no weights.
    """
    place = Path(path).expanduser()
    if not place.exists():
        place = _download(str(path), gguf_file, fetch_weights)
    if place.is_file() and place.suffix != ".gguf" and (place.parent / "config.json").exists():
        _check_config(place.parent)
        return ModelSource(place.parent, place)
    if place.is_file():
        return _gguf_source(place)
    if gguf_file is not None:
        return _gguf_source(place / gguf_file)
    ggufs = [] if (place / "config.json").exists() else sorted(place.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf_source(ggufs[0])
    _check_config(place)
    if need_weights and not any(_weight_files(place)):
        files = ", ".join(sorted(entry.name for entry in place.iterdir())[:8])
        raise ModelError(
            f"{place} has no weights: it holds {files}, and neither *.safetensors nor another kind of weights; "
            f"give a complete model, or set model.gguf_file when the weights are a GGUF file."
        )
    return ModelSource(place)


def load_config(source: ModelSource, trust_remote_code: bool = False) -> PretrainedConfig:
    """The transformers config of the model."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source.directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(f"The config of {source.weights} cannot be used: {_first_line(error)}") from error
    return config


def check_causal(config: PretrainedConfig) -> None:
    """Raise ModelError unless the model that `config` names predicts the next token from those before it."""
    import transformers

    if config.is_encoder_decoder:
        raise ModelError(
            f"{config.model_type} is an encoder-decoder model; this needs a decoder-only model, which predicts the "
            "next token."
        )
    name = next(iter(config.architectures or ()), "")
    known = getattr(transformers, name, None)
    if known is not None and not known.can_generate():
        raise ModelError(
            f"The model is a {name}, which does not predict the next token; this needs a causal language model."
        )


def check_task(config: PretrainedConfig, task: str) -> None:
    """Raise ModelError unless the model that `config` names is one for `task`."""
    from transformers import (
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    if task == "causal_lm":
        check_causal(config)
        return
    auto = {
        "seq2seq": AutoModelForSeq2SeqLM,
        "masked_lm": AutoModelForMaskedLM,
        "sequence_classification": AutoModelForSequenceClassification,
    }[task]
    name = next(iter(config.architectures or ()), "")
    mapping: Any = auto._model_mapping
    found = mapping.get(type(config), None)
    fitting = [cls.__name__ for cls in (found if isinstance(found, tuple) else (found,)) if cls is not None]
    if name not in fitting:
        make = f"Make one with transformers' {auto.__name__}.from_pretrained(...) and save it, or choose another"
        raise ModelError(
            f"The model is a {name or config.model_type}, but model.task={task} needs a "
            f"{' or '.join(fitting) or f'model of its kind, and there is none of type {config.model_type}'}. "
            f"{make} model.task."
        )


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the model."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.tokenizer, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, OSError, ImportError, TypeError) as error:
        raise ModelError(
            f"There is no usable tokenizer in {source.weights}: {_first_line(error)} "
            f"Copy the tokenizer files of the original model beside the weights."
        ) from error
    return tokenizer


def build_on_meta(
    config: PretrainedConfig,
    dtype: str | torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> PreTrainedModel:
    """The model that `config` describes, on the meta device, with tied weights tied, in eval mode.

    Its class is the one named in `config.architectures`, else the causal LM of its type; its parameters have `dtype`
    (the config's own when None).
    """
    import torch
    import transformers

    kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype or config.dtype}
    if attention is not None:
        kwargs["attn_implementation"] = attention
    named = config.architectures[0] if config.architectures else None
    cls = getattr(transformers, named, None) if named else None
    try:
        with torch.device("meta"):
            if cls is not None:
                model = cls._from_config(config, **kwargs)
            else:
                auto = transformers.AutoModelForCausalLM
                model = auto.from_config(config, trust_remote_code=trust_remote_code, **kwargs)
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise ModelError(f"{named or config.model_type} cannot be built: {_first_line(error)}") from error
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]  # torch leaves eval() untyped here


def rebuild_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, masks) on `device`.

    transformers computes them in its models' `_init_weights`, which is what `from_pretrained` calls for them too, so
    the values are bit-equal to its own. Parameters are left alone: those modules hold none, or theirs stay on meta.
    """
    import torch

    with torch.no_grad():
        for module, owner in _with_owner(model, None):
            names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
            if not names:
                continue
            if owner is None:
                raise ModelError(
                    f"{type(module).__name__} computes its buffers {', '.join(names)} itself and no transformers model "
                    f"around it can rebuild them on {device}."
                )
            for name in names:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)  # type: ignore[arg-type]
            owner._init_weights(module)


def _with_owner(module: nn.Module, owner: PreTrainedModel | None) -> Iterator[tuple[nn.Module, PreTrainedModel | None]]:
    """Every module with the innermost transformers model that it belongs to."""
    if hasattr(module, "_init_weights"):
        owner = module  # type: ignore[assignment]  # is a PreTrainedModel, as tested
    yield module, owner
    for child in module.children():
        yield from _with_owner(child, owner)


def _download(name: str, gguf_file: str | None, fetch_weights: bool) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(".gguf"):
        raise ModelError(
            f"model path {name} does not exist; expected a model directory, a .gguf file or a hub id org/name."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch_weights = fetch_weights and gguf_file is None
    patterns = [*_HUB_FILES, *(_HUB_WEIGHTS if fetch_weights else ()), *([gguf_file] if gguf_file else [])]
    try:
        snapshot = Path(snapshot_download(name, allow_patterns=patterns))
        if fetch_weights and not any(_weight_files(snapshot)):
            snapshot = Path(snapshot_download(name, allow_patterns=[*patterns, *_PICKLES]))
        return snapshot
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{name} is neither a local directory nor a hub model that could be fetched: {_first_line(error)}"
        ) from error


def _gguf_source(file: Path) -> ModelSource:
    if not file.is_file():
        raise ModelError(f"There is no GGUF file {file}.")
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{file} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'; give a model directory."
        )
    return ModelSource(side_directory(file), file)


def _check_config(directory: Path) -> None:
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{directory} is no model: it has no config.json; expected a Hugging Face model directory. If these are "
            "weights only, put config.json and the tokenizer of their base model beside them."
        )
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{config} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise ModelError(f"{config} names no model_type, so it does not say which architecture this is.")


def _weight_files(directory: Path) -> Iterator[Path]:
    return (file for pattern in _WEIGHTS for file in directory.glob(pattern))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
