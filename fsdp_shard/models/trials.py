"""Tries a config and a tokenizer in a separate process, which is ended if they need too many resources.

A config can request any number of layers, labels or positions, under hundreds of names; a chat template is a program; a
tokenizer can double its text repeatedly. None of that can be detected without running it.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedTokenizerBase

from fsdp_shard.errors import CheckpointError, ModelError
from fsdp_shard.utils import (
    LimitedProcess,
    format_size,
    is_out_of_memory,
    non_persistent_buffers,
    only_errors_of,
    read_json,
    refuse_excess,
    run_limited,
)

_TEXTS = ("a", "The quick brown fox,\n jumps over 13 lazy dogs: \u00e9\u4e16\U0001f600!", " " * 64 + "a" * 64)
_USER, _ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": ""}],  # rendered first by data.kind=chat
    [_USER],
    [_USER, _ANSWER, _USER],
    [{"role": "system", "content": "Be brief."}, _USER, _ANSWER],
)
_DECODED = 4096  # evenly spaced tokens

_Use = Callable[[Any], None]
_tried: dict[tuple[object, ...], ModelError | None] = {}  # results, by config path and state of the file


def try_config(directory: Path, build: Callable[[], object]) -> None:
    """Build a model from its config, without weights, by calling `build`; once per file.

    Args:
        directory: The directory of config.json.
        build: Builds the model. Its exceptions are ignored here, as the actual build raises them again.

    Raises:
        ModelError: It exceeds its limits of time or memory.
    """
    path = directory / "config.json"
    if not path.is_file():
        return
    state = path.stat()
    key = (str(path.resolve()), state.st_ino, state.st_size, state.st_mtime_ns)
    if key not in _tried:
        _import_classes(read_json(path))
        try:
            run_limited(lambda: _try_silently(build), f"building the model of {path}", kind="build", error=ModelError)
            _tried[key] = None
        except ModelError as error:
            _tried[key] = error
    if (known := _tried[key]) is not None:
        raise known


def try_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Tokenize, decode and render short texts with a loaded tokenizer.

    Args:
        tokenizer: The tokenizer.
        directory: Its directory, for errors.

    Raises:
        ModelError: It exceeds its limits of time or memory.
    """
    import jinja2  # noqa: F401  # once, rather than in each forked process

    what = f"using the tokenizer or the chat template in {directory}"
    with LimitedProcess[_Use, None](lambda use: use(tokenizer), what, error=ModelError) as process:
        process(_tokenize)
        process(_render)


def refuse_large_buffers(model: nn.Module) -> None:
    """Raise ModelError if the buffers that checkpoints do not store, such as masks, exceed their limit."""
    num_bytes = sum(buffer.nbytes for module in model.modules() for _, buffer in non_persistent_buffers(module))
    what = f"The model of this config.json computes {format_size(num_bytes)} of masks and positions when it is loaded"
    try:
        refuse_excess(num_bytes, "buffer_bytes", what)
    except CheckpointError as error:
        raise ModelError(str(error)) from None


def _import_classes(document: Any) -> None:
    """Import the classes of the models that a config names, which takes longer than building them."""
    if isinstance(document, dict):
        with suppress(Exception):  # reported when the model is built
            MODEL_MAPPING[CONFIG_MAPPING[document["model_type"]]]
        for value in document.values():
            _import_classes(value)


def _try(use: Callable[[], object]) -> None:
    """Call `use` and ignore its exceptions, except for lack of memory."""
    try:
        use()
    except Exception as error:
        if is_out_of_memory(error):
            raise


def _try_silently(build: Callable[[], object]) -> None:
    with only_errors_of("transformers"):  # shown when the model is built
        _try(build)


def _tokenize(tokenizer: Any) -> None:
    for text in _TEXTS:
        _try(partial(tokenizer, text))
        _try(partial(tokenizer, text_target=text))
    ids = range(len(tokenizer))
    _try(partial(tokenizer.decode, list(ids[:: max(len(ids) // _DECODED, 1)])))


def _render(tokenizer: PreTrainedTokenizerBase) -> None:
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    for template, messages, prompt in product(_templates(tokenizer), _CONVERSATIONS, (False, True)):
        _try(partial(render, messages, chat_template=template, add_generation_prompt=prompt))


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    found: Any = tokenizer.chat_template
    return list(found.values()) if isinstance(found, dict) else [found] if found else []
