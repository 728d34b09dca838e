"""Locates a path's target: a run, a checkpoint of any format, a model, a remote address, a hub id."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.adapters.adapter_checks import refuse_other_config, refuse_other_tokenizer
from fsdp_shard.checkpoint.adapters.lora_merge import merge_adapter
from fsdp_shard.checkpoint.base_model import HeadChanges, read_base_model
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.formats.registry import recognize
from fsdp_shard.checkpoint.formats.trainer_layouts import find_checkpoint, latest_step_directory
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file
from fsdp_shard.checkpoint.keys.quantized_weights import (
    DEQUANTIZED,
    configured_quantization,
    quantization,
    refuse_quantized,
)
from fsdp_shard.checkpoint.model_files import (
    CONFIG,
    classifier_directory,
    has_tokenizer,
    list_model_files,
    replace_tokenizer,
)
from fsdp_shard.checkpoint.open import open_weights
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA
from fsdp_shard.checkpoint.steps.manifest import MANIFEST
from fsdp_shard.checkpoint.steps.step_reference import choose_step, split_reference
from fsdp_shard.checkpoint.steps.step_store import CHECKPOINTS, StepStore
from fsdp_shard.errors import CheckpointError, InputError, ModelError
from fsdp_shard.models import GGUF_FORMAT, check_model_config, download_model, gguf_model_files
from fsdp_shard.utils import is_remote, path_text

# org/name, or only a name, such as gpt2, of models older than organizations. Looser than `is_hub_id`: the hub itself
# reports what is wrong with a name to read.
_HUB_ID = re.compile(r"[\w-][\w.-]*/(?!.*\.gguf$)[\w.-]+|[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Location:
    """The target of a path. A command locates a path once and passes this on; each index in it is also opened once.

    It can be pickled for other processes, which open the files themselves.

    Its directories; all but the first may download, or write the config of a GGUF file:
        side: Beside the weights, with config and tokenizer.
        expected_config_directory: Where the config should be: of an adapter's base, of `config_path`, or made from
            GGUF.
        config_directory: The same, checked: ModelError without a usable config.
        expected_tokenizer_directory, tokenizer_directory: The same two for the tokenizer.

    Attributes:
        path: The path as passed.
        weights: The directory or file that holds the weights, on this machine.
        format: Name of their format; None if nothing in `weights` is recognized as weights.
        side: The directory with config and tokenizer, if it is not that of the weights.
        step: The training step, if a directory name contains it.
        base_path: Path or hub id of an adapter's base model; None for the one in adapter_config.json.
        config_path: Path or hub id of the model with the config; None for the weights' own directory.
        tokenizer_path: The same for the tokenizer.
        fetch_weights: Whether a base model's weights are downloaded from the hub.
    """

    path: str
    weights: Path
    format: str | None = None
    side: Path | None = None
    step: int | None = None
    base_path: str | None = None
    config_path: str | None = None
    tokenizer_path: str | None = None
    fetch_weights: bool = True

    def __str__(self) -> str:
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # no open index

    def to_json(self) -> dict[str, Any]:
        """Serialize this location for another process on the same machine; `from_json` is the inverse."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self.__getstate__().items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Location:
        """Return the location from the result of `to_json`."""
        paths = {name: Path(values[name]) for name in ("weights", "side") if values[name] is not None}
        return cls(**{**values, **paths})

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are a peft adapter, to be merged into a base model."""
        return self.format == peft.NAME

    @cached_property
    def new_head(self) -> HeadChanges | None:
        """Further changes by an adapter with a classifier's new head; None for all others."""
        recorded = read_base_model(self.weights) if self.is_adapter else None
        return None if recorded is None else recorded.head

    @cached_property
    def base(self) -> Location:
        """The base model of an adapter."""
        path = self.base_path or peft.base_of(self.weights)
        try:
            if self.base_path is None:
                found = _locate_named_by_file(path, peft.revision_of_base(self.weights), self.fetch_weights)
            else:
                found = locate(path, fetch_weights=self.fetch_weights)
        except InputError as error:
            raise self._unreadable_base(path, error) from error
        if found.is_adapter:
            raise CheckpointError(
                f"{self.weights} is an adapter of {path}, which is an adapter itself; convert that to a model first."
            )
        found = dataclasses.replace(found, config_path=self.config_path)
        if not self.weights.is_absolute():
            return found
        side = None if found.side is None else found.side.absolute()  # like these weights, wherever this process goes
        return dataclasses.replace(found, weights=found.weights.absolute(), side=side)

    def _unreadable_base(self, path: str, error: InputError) -> CheckpointError:
        file = self.weights / peft.ADAPTER_CONFIG
        is_ours = has_file(self.weights, MANIFEST)  # it has a digest of that file
        return CheckpointError(
            f"{self.weights} is an adapter of {path}, which cannot be read: {error} Give its base model with base=PATH "
            f"in generate, evaluate and convert, with --base in verify and diff"
            f"{'' if is_ours else f', or correct base_model_name_or_path in {file}'}."
        )

    @cached_property
    def expected_config_directory(self) -> Path:
        """The expected directory of the config; a GGUF file's is made from its metadata."""
        if self.is_adapter:
            directory = self.base.expected_config_directory
            if self.new_head is None or self.config_path is not None or not has_file(directory, CONFIG):
                return directory
            return classifier_directory(self.base.model_files, self.new_head.config)
        if self.config_path is not None:
            return _locate_named("config", self.config_path).config_directory
        directory = self._default_directory
        if self.format == GGUF_FORMAT:  # a config.json in its directory is often a stub with only the model type
            starts = (piece.start for entry in self.index.tensors.values() for piece in entry.pieces)
            return gguf_model_files(self.index.files()[0], min(starts, default=0))
        return directory

    @property
    def _default_directory(self) -> Path:
        """Where config and tokenizer are unless a path names others: `side`, or the directory of the weights."""
        return self.side or (self.weights if self.weights.is_dir() else self.weights.parent)

    @property
    def config_directory(self) -> Path:
        """The directory with the model's config; ModelError if there is no usable config."""
        model, home = self.base if self.is_adapter else self, self.expected_config_directory
        if model.format is not None and not has_file(home, CONFIG):
            raise ModelError(
                f"{model.weights} holds weights, but there is no config.json in "
                f"{'the current directory' if home == Path() else home}. Name their model with config=PATH and "
                f"tokenizer=PATH (directories or hub ids) in generate, evaluate and convert, --config and --tokenizer "
                f"in diff; to train or plan with them, convert them first."
            )
        if model.format is None and model.weights.is_file() and model.weights.name != CONFIG:
            raise ModelError(f"{model.weights} is not a weight file; give a model directory, a checkpoint or a hub id.")
        list_model_files(home)  # rejects links out of it, which transformers would follow
        check_model_config(home)
        return home

    @property
    def tokenizer_directory(self) -> Path:
        """The directory with the tokenizer; ModelError if it is that of the config and has none."""
        if self.expected_tokenizer_directory == self.expected_config_directory:
            return self.config_directory
        list_model_files(self.expected_tokenizer_directory)
        return self.expected_tokenizer_directory

    @cached_property
    def expected_tokenizer_directory(self) -> Path:
        """The expected directory of the tokenizer.

        It is the one passed, else that of an adapter or of weights without a config if they have one, else that of the
        config.
        """
        if self.tokenizer_path is not None:
            directory = _locate_named("tokenizer", self.tokenizer_path).expected_tokenizer_directory
            if not replace_tokenizer({}, list_model_files(directory)):
                raise ModelError(f"tokenizer={self.tokenizer_path}: there are no files of a tokenizer in {directory}.")
            return directory
        has_own = (self.is_adapter or self.config_path is not None) and has_tokenizer(self._default_directory)
        if has_own:
            return self._default_directory
        if self.is_adapter:
            refuse_other_tokenizer(self.weights, self.expected_config_directory)
        return self.expected_config_directory

    def with_config_and_tokenizer(self, config: str | None, tokenizer: str | None) -> Location:
        """Return the same weights, with this config if they have none, and this tokenizer if one is passed."""
        if config is None or has_file(self.expected_config_directory, CONFIG):
            config = self.config_path
        return dataclasses.replace(self, config_path=config, tokenizer_path=tokenizer or self.tokenizer_path)

    def based_on(self, base: str | None) -> Location:
        """Return the same weights; an adapter gets this base model if one is passed."""
        return dataclasses.replace(self, base_path=base) if base is not None and self.is_adapter else self

    @cached_property
    def model_files(self) -> dict[str, Path]:
        """The model's files other than weights, by name, such as config, tokenizer and license."""
        files = list_model_files(self.expected_config_directory)
        if self.expected_tokenizer_directory == self.expected_config_directory:
            return files
        return replace_tokenizer(files, list_model_files(self.expected_tokenizer_directory))

    @cached_property
    def index(self) -> TensorIndex:
        """The stored tensors, for an adapter its own; raises CheckpointError."""
        if self._default_directory.is_dir() and not (self.format == GGUF_FORMAT and self.weights.is_file()):
            list_model_files(self._default_directory)
        is_alone = self.config_path is not None and not self.is_adapter
        return open_weights(self.weights, self.expected_config_directory if is_alone else self.side, self.step)

    @cached_property
    def model_index(self) -> TensorIndex:
        """The tensors of the whole model: an adapter is merged into its base as it is read; raises CheckpointError."""
        if not self.is_adapter:
            return self.index
        adapter, location = self.index, self.base
        try:
            base = location.index
        except InputError as error:
            raise self._unreadable_base(location.path, error) from error
        if self.config_path is None:
            refuse_other_config(adapter.root, location.expected_config_directory)
        return merge_adapter(adapter, base, self.expected_config_directory)

    def check_dequantizable(self) -> str | None:
        """Check that the weights, by the tensors here or the config, are plain or can be dequantized.

        Returns:
            The method that quantized them, such as fp8; None if they are plain.

        Raises:
            CheckpointError: `convert dequantize=true` does not support the method.
        """
        has_weights = self.format is not None and not self.is_adapter
        method = quantization(self.index) if has_weights else configured_quantization(self.expected_config_directory)
        if method not in DEQUANTIZED:
            refuse_quantized(self.weights, method)
        return method

    def file_states(self) -> list[tuple[str, int, int]]:
        """Return name, size and modification time (ns) of the files that define the model; they differ after a change.

        These are weights, config, tokenizer, and for an adapter those of its base.
        """
        directory = self.weights if self.is_adapter else self.expected_config_directory
        config = [directory / peft.ADAPTER_CONFIG] if has_file(directory, peft.ADAPTER_CONFIG) else []
        is_elsewhere = self.config_path is not None or self.tokenizer_path is not None
        named = list_model_files(self.expected_tokenizer_directory).values() if is_elsewhere else ()
        paths = sorted({*self.index.files(), *list_model_files(directory).values(), *config, *named})
        states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return states + (self.base.file_states() if self.is_adapter else [])


def locate(
    path: str | os.PathLike[str],
    gguf_file: str | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    fetch_weights: bool = True,
) -> Location:
    """Locate the target of a path. Opens no weights; downloads from a remote store or the hub.

    Args:
        path: A run (its latest step), a step of one (RUN@best, RUN@latest, RUN@step-400), a checkpoint of any format, a
            model directory, a weight file, the address of a run or a step on a remote store, or a hub id.
        gguf_file: Name of the GGUF file in a directory or hub repository.
        base: Base model of an adapter, if it is not the one in adapter_config.json.
        config: The model whose config to use, for weights without one or instead of theirs.
        tokenizer: The model whose tokenizer to use.
        fetch_weights: Whether to download the weights of a hub id; config and tokenizer are always downloaded.

    Returns:
        The location. Missing weights and a missing config are errors only when they are used.

    Raises:
        CheckpointError: There is nothing at `path`, there are several checkpoints, or `base` is passed and `path` is
            not an adapter.
        ConfigError: An argument is not a path.
        ModelError: A hub id cannot be downloaded.
    """
    root = local_path(path)
    if not os.path.exists(root):  # Path.exists raises for a name that is too long
        _check_hub_id(path, root)
        root = download_model(str(path), gguf_file, fetch_weights)
    if gguf_file is not None:
        root = root / gguf_file
        if not root.is_file():
            raise CheckpointError(f"There is no GGUF file {root}.")
    location = dataclasses.replace(
        _locate_in(root, path),
        base_path=None if base is None else path_text(base),
        config_path=None if config is None else path_text(config),
        tokenizer_path=None if tokenizer is None else path_text(tokenizer),
        fetch_weights=fetch_weights,
    )
    if base is not None and not location.is_adapter:
        raise CheckpointError(
            f"base={base} is for an adapter, but {location.weights} holds the weights of a model itself."
        )
    return location


def _locate_named_by_file(path: str, revision: str | None, fetch_weights: bool) -> Location:
    """Locate a model named only by a file, without a request: addresses are rejected, hub ids must be cached.

    Args:
        path: Its path or hub id.
        revision: Branch, tag or commit of a hub id; None for the default one.
        fetch_weights: As for `locate`.
    """
    if "://" in path:
        raise CheckpointError("it is an address, and none is opened that only a file names.")
    root = local_path(path)
    if not os.path.exists(root):
        _check_hub_id(path, root)
        root = download_model(path, None, fetch_weights, only_cached=True, revision=revision)
    return dataclasses.replace(_locate_in(root, path), fetch_weights=fetch_weights)


def _locate_in(root: Path, path: str | os.PathLike[str]) -> Location:
    """Locate the checkpoint in `root`, the local directory or file of `path`."""
    root = latest_step_directory(root)
    weights, side, step = find_checkpoint(root, lambda candidate: recognize(candidate) is not None)
    known = recognize(weights)
    return Location(os.fspath(path), weights, known.NAME if known else None, side, step)


def _check_hub_id(path: str | os.PathLike[str], root: Path) -> None:
    """Raise CheckpointError unless a path that does not exist here may be on the hub."""
    if os.path.islink(root) or not _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(
            f"{root} does not exist; give a checkpoint (a file or a directory), a run directory, or a hub id such as "
            f"org/name."
        )


def _locate_named(setting: str, path: str) -> Location:
    """Locate the model with the config or tokenizer; errors name the setting."""
    try:
        return locate(path, fetch_weights=False)
    except InputError as error:
        raise type(error)(f"{setting}={path}: {error}") from error


def open_checkpoint(path: str | os.PathLike[str] | Location) -> TensorIndex:
    """Open a checkpoint of any format, recognized by its content. Only headers are read.

    Args:
        path: A run (its latest step), a step of one (RUN@best, RUN@step-400), a checkpoint of any format, a model
            directory, a weight file, the address of a run or a step on a remote store, or a hub id; or a `Location`.

    Returns:
        The tensor index, a context manager: `names`, `dtypes`, `shapes`, and `read(name, slices)`.

    Raises:
        CheckpointError: The message names the damaged file, or what was found instead of a checkpoint.
        ConfigError: `path` is not a path.
        ModelError, RemoteError: The model of a hub id, or what an address leads to, cannot be fetched.

    Example:
        >>> with open_checkpoint("outputs/run") as index:
        ...     weight = index.read("lm_head.weight")
    """
    return (path if isinstance(path, Location) else locate(path)).index


def is_checkpoint(directory: Path, *, sealed: bool = False) -> bool:
    """Return whether a directory is a checkpoint with a config or the like; if `sealed`, also with a manifest."""
    names = (MANIFEST,) if sealed else (MANIFEST, CONFIG, DCP_METADATA, peft.ADAPTER_CONFIG)
    return any(has_file(directory, name) for name in names) and recognize(directory) is not None


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the local path of `path`: that of a step if it names one, else itself, which need not exist.

    RUN@latest, RUN@best, RUN@step-N and the pointer RUN/checkpoints/best name a step, and so does a remote address,
    from which it is downloaded. CheckpointError if there is no such step.
    """
    run, wanted = split_reference(path_text(path))
    if is_remote(run):
        from fsdp_shard.checkpoint.remote.download import local_copy

        return local_copy(run, wanted)
    root = Path(run).expanduser()
    if wanted is None:
        return root
    if not root.is_dir():
        raise CheckpointError(f"{path} names a step of the run {root}, but there is no such directory.")
    store = StepStore(root / CHECKPOINTS if (root / CHECKPOINTS).is_dir() else root)
    return store.path(choose_step(wanted, store.steps(), store.best(), run))
