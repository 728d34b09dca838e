"""Tries a config and a tokenizer in a process that is ended when they take too much, before this one uses them.

Some numbers in a config ask for any number of layers, labels or positions, under hundreds of names; a chat template is
a program; a tokenizer can double its text again and again. None of that can be seen without doing it.
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
    [{"role": "user", "content": ""}],  # what data.kind=chat renders first
    [_USER],
    [_USER, _ANSWER, _USER],
    [{"role": "system", "content": "Be brief."}, _USER, _ANSWER],
)
_DECODED = 4096  # tokens, equally far apart

_Use = Callable[[Any], None]
_tried: dict[tuple[object, ...], ModelError | None] = {}  # configs by path and state of the file, and what came of them


def try_config(directory: Path, build: Callable[[], object]) -> None:
    """Build a model from its config, without weights, as `build` does; once for a file.

    Args:
        directory: The directory of config.json.
        build: What it raises is raised again by whoever calls it, and ignored here.

    Raises:
        ModelError: It takes more time or memory than its limits.
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
    """Tokenize, decode and render a little with a tokenizer that was loaded.

    Args:
        tokenizer: The tokenizer.
        directory: Its directory, for errors.

    Raises:
        ModelError: It takes more time or memory than its limits.
    """
    import jinja2  # noqa: F401  # once, and not in each process that is forked

    what = f"using the tokenizer or the chat template in {directory}"
    with LimitedProcess[_Use, None](lambda use: use(tokenizer), what, error=ModelError) as process:
        process(_tokenize)
        process(_render)


def refuse_large_buffers(model: nn.Module) -> None:
    """Raise ModelError if the buffers that no checkpoint holds, such as masks, take more than their limit."""
    num_bytes = sum(buffer.nbytes for module in model.modules() for _, buffer in non_persistent_buffers(module))
    what = f"The model of this config.json computes {format_size(num_bytes)} of masks and positions when it is loaded"
    try:
        refuse_excess(num_bytes, "buffer_bytes", what)
    except CheckpointError as error:
        raise ModelError(str(error)) from None


def _import_classes(document: Any) -> None:
    """Import the classes of the models that a config names, which takes longer than to build them."""
    if isinstance(document, dict):
        with suppress(Exception):  # whoever builds the model reports it
            MODEL_MAPPING[CONFIG_MAPPING[document["model_type"]]]
        for value in document.values():
            _import_classes(value)


def _try(use: Callable[[], object]) -> None:
    """Call `use`, and ignore what it raises, unless it is for want of memory."""
    try:
        use()
    except Exception as error:
        if is_out_of_memory(error):
            raise


def _try_silently(build: Callable[[], object]) -> None:
    with only_errors_of("transformers"):  # whoever builds the model hears it
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
