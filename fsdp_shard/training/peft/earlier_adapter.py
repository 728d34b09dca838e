"""A new adapter that begins with the values of an earlier one: `adapter.path`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_shard import checkpoint
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import CheckpointError, ConfigError, InputError
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig
from fsdp_shard.training.peft.lora import Adapter
from fsdp_shard.utils import in_yaml

# Entry of adapter_config.json -> the setting that makes it, and what it is where it is missing.
_SETTINGS: dict[str, tuple[str, Any]] = {
    "r": ("rank", 8),
    "lora_alpha": ("alpha", 8),
    "use_rslora": ("rank_stabilized", False),
    "use_dora": ("dora", False),
}
_LISTS = ("target_modules", "exclude_modules", "layers_to_transform", "modules_to_save")  # named alike in both


def locate_earlier(config: AdapterConfig, base: str) -> checkpoint.Location | None:
    """Locate the adapter of `adapter.path`; None if it is not set.

    Args:
        config: The settings of the adapter.
        base: Path or hub id of the model that it is to be for.

    Raises:
        ConfigError: There is nothing, or no adapter.
        CheckpointError: It cannot be read.
    """
    if not isinstance(config, LoraConfig) or config.path is None:
        return None
    try:
        found = checkpoint.locate(config.path)
    except InputError as error:
        raise ConfigError(f"adapter.path={config.path}: {error}") from error
    if not found.is_adapter:
        raise ConfigError(
            f"adapter.path={config.path} is no adapter, but weights of a whole model; give the directory of an adapter "
            f"or a run with adapter=lora, or set model.path to train on from these weights."
        )
    return found.based_on(base)


def check_earlier(
    adapter: Adapter,
    config: LoraConfig,
    shapes: Mapping[str, tuple[int, ...]],
    earlier: checkpoint.Location,
    base: checkpoint.TensorIndex,
    directory: Path,
) -> None:
    """Check that an adapter can begin with the values of an earlier one. Reads what identifies the base.

    Args:
        adapter: The new adapter.
        config: Its settings.
        shapes: Unsharded shapes of its parameters, by FQN.
        earlier: The earlier one.
        base: The weights of the model.
        directory: The directory with the config of the model.

    Raises:
        ConfigError: It is another adapter than the settings define.
        CheckpointError: It is damaged, or for another model.
    """
    settings, parts = checkpoint.check_on_base(earlier.index, base, directory)
    own = checkpoint.parse_lora(earlier.weights / checkpoint.ADAPTER_CONFIG, adapter.config)
    expected = {stored: shapes[name] for name, stored in adapter.names.items()}
    found = earlier.index.shapes
    different = sorted({name for name, _ in found.items() ^ expected.items()})
    if different:
        what = f"{different[0]} is {_shape(found, different[0])} there, and {_shape(expected, different[0])} here"
        what += f" (of {len(different)} that differ)" if len(different) > 1 else ""
    elif other := next((name for name in parts.factors if settings.scale(name) != own.scale(name)), None):
        what = f"the scale of {other} is {settings.scale(other):g} there, and {own.scale(other):g} here"
    else:
        return
    remedy = _overrides(checkpoint.read_adapter_config(earlier.weights), adapter.config)
    advice = f"Set {remedy}." if remedy else "Train another one, without adapter.path."
    raise ConfigError(f"adapter.path={config.path} is another adapter than these settings define: {what}. {advice}")


def load_earlier(adapter: Adapter, shards: Mapping[str, LocalShard], earlier: checkpoint.Location) -> None:
    """Read this rank's shards of an earlier adapter, which `check_earlier` has accepted.

    Args:
        adapter: The new adapter.
        shards: The shards of the model; those of the adapter are filled.
        earlier: The earlier one.
    """
    checkpoint.load_shards(earlier.index, adapter.stored(shards))


def check_resumed(config: AdapterConfig, base: str, step_directory: Path) -> None:
    """Check that `adapter.path` is what the run to resume began with, as far as it can still be read.

    Raises:
        CheckpointError: It is another adapter.
    """
    recorded = checkpoint.read_base_model(step_directory)
    given = config.path if isinstance(config, LoraConfig) else None
    began = None if recorded is None else recorded.adapter
    if given is None and began is None:
        return
    if given is not None and began is not None:
        try:
            earlier = locate_earlier(config, base)
            assert earlier is not None
            if checkpoint.fingerprint(earlier.index) == began:
                return
        except InputError:
            return  # it is gone; the values are those of the step
    how = "without adapter.path" if began is None else "with another adapter" if given else "with adapter.path"
    raise CheckpointError(
        f"{step_directory} is of a run that began {how}, and adapter.path is {given}; set what it was, or start a new "
        f"run in another run_dir."
    )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"


def _overrides(earlier: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The settings that define the earlier adapter, as far as they differ and can be typed."""
    found = []
    for entry, (setting, default) in _SETTINGS.items():
        if (value := earlier.get(entry, default)) != own[entry]:
            found.append(f"adapter.{setting}={in_yaml(value)}")
    for name in _LISTS:
        value = earlier.get(name) or []
        if isinstance(value, list) and {*map(str, value)} != {*map(str, own[name] or [])}:  # else it is a pattern
            found.append(f"adapter.{name}=[{','.join(map(str, value))}]")
    return " ".join(found)
