"""Initializes a new adapter with the values of an earlier one: `adapter.path`."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard import checkpoint
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import CheckpointError, ConfigError, InputError
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig
from fsdp_shard.training.peft.lora import LIST_ENTRIES, SETTING_OF_ENTRY, Adapter
from fsdp_shard.utils import in_yaml, is_remote


def locate_earlier(config: AdapterConfig, base: str) -> checkpoint.Location | None:
    """Locate the adapter of `adapter.path`; None if it is not set.

    Args:
        config: The settings of the adapter.
        base: Path or hub id of the model that the adapter must belong to.

    Raises:
        ConfigError: The path does not exist or is not an adapter.
        CheckpointError: The adapter cannot be read.
    """
    if not isinstance(config, LoraConfig) or config.path is None:
        return None
    return _locate(config.path).based_on(base)


def _locate(path: str) -> checkpoint.Location:
    try:
        found = checkpoint.locate(path)
    except InputError as error:
        raise ConfigError(f"adapter.path={path}: {error}") from error
    if not found.is_adapter:
        what = "no known format of an adapter" if found.format is None else "weights of a whole model"
        raise ConfigError(
            f"adapter.path={path} holds {what}; give the directory of an adapter (adapter_config.json with "
            f"adapter_model.safetensors) or a run with adapter=lora. To continue from a model, set model.path."
        )
    return found


def pin_earlier(config: AdapterConfig, base: str) -> None:
    """If `adapter.path` is a run, replace it with the step that it leads to now, for all ranks and records.

    The arguments and errors are those of `locate_earlier`.
    """
    found = locate_earlier(config, base)
    if found is None or found.step is None:
        return
    assert isinstance(config, LoraConfig)
    assert config.path is not None
    if not is_remote(config.path):
        config.path = str(found.weights)


def check_earlier(
    adapter: Adapter,
    config: LoraConfig,
    shapes: Mapping[str, tuple[int, ...]],
    earlier: checkpoint.Location,
    base: checkpoint.TensorIndex,
    directory: Path,
) -> None:
    """Check that an adapter can begin with the values of an earlier one. Reads the data that identifies the base model.

    Args:
        adapter: The new adapter.
        config: The settings of the new adapter.
        shapes: Unsharded shapes of its parameters, by FQN.
        earlier: The earlier one.
        base: The weights of the model.
        directory: The directory with the model's config.

    Raises:
        ConfigError: The earlier adapter differs from the settings, belongs to another model, or is damaged.
    """
    try:
        checkpoint.check_on_base(earlier.index, base, directory)
    except CheckpointError as error:
        raise ConfigError(f"adapter.path={config.path}: {error}") from error
    _check_same(adapter, config, shapes, earlier)


def check_planned(adapter: Adapter, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Check the adapter of `adapter.path` as far as a plan can: not whether it is for the weights, which a plan lacks.

    Args:
        adapter: The new adapter.
        config: The settings of the new adapter, with a path.
        shapes: Unsharded shapes of its parameters, by FQN.

    Returns:
        Whether the adapter is on this machine. If not, nothing is checked.

    Raises:
        ConfigError: The earlier adapter differs from the settings or is damaged.
    """
    assert config.path is not None
    if is_remote(config.path) or is_gone(config):
        return False
    _check_same(adapter, config, shapes, _locate(config.path))
    return True


def _check_same(
    adapter: Adapter, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]], earlier: checkpoint.Location
) -> None:
    """Raise ConfigError unless the earlier adapter has the tensors and scales that the settings define."""
    try:
        found, entries = earlier.index.shapes, checkpoint.read_adapter_config(earlier.weights)
        settings = checkpoint.parse_lora(earlier.weights / checkpoint.ADAPTER_CONFIG, entries)
        recorded = checkpoint.read_base_model(earlier.weights)
    except CheckpointError as error:
        raise ConfigError(f"adapter.path={config.path}: {error}") from error
    if settings.parameters or settings.tokens:
        has = f"matrices for each expert ({settings.parameters[0]})" if settings.parameters else "rows of embeddings"
        raise ConfigError(
            f"adapter.path={config.path} has {has}, and only an adapter of layers with one matrix can be trained on; "
            f"train another one, without adapter.path."
        )
    if recorded is not None and recorded.quantize != config.quantize:
        raise ConfigError(
            f"adapter.path={config.path} was trained with adapter.quantize={recorded.quantize}, and with "
            f"adapter.quantize={config.quantize} its base is another model. Set adapter.quantize={recorded.quantize}."
        )
    own = checkpoint.parse_lora(earlier.weights / checkpoint.ADAPTER_CONFIG, adapter.config)
    expected = {stored: shapes[name] for name, stored in adapter.names.items()}
    plain = [name.removeprefix(checkpoint.PEFT_PREFIX) for name in expected if ".lora_" in name]
    modules = [name.partition(".lora_")[0] for name in plain]
    different = sorted({name for name, _ in found.items() ^ expected.items()})
    if different:
        what = f"{different[0]} is {_shape(found, different[0])} there, and {_shape(expected, different[0])} here"
        what += f" (of {len(different)} that differ)" if len(different) > 1 else ""
    elif unused := next((name for name in modules if not settings.is_target(name)), None):
        what = f"{unused} is not among its target_modules there, and is here"
    elif other := next((name for name in modules if settings.scale(name) != own.scale(name)), None):
        what = f"the scale of {other} is {settings.scale(other):g} there, and {own.scale(other):g} here"
    else:
        return
    advice = _advice(entries, adapter.config, found)
    raise ConfigError(f"adapter.path={config.path} is another adapter than these settings define: {what}. {advice}")


def check_head(config: LoraConfig, labels: Sequence[str], earlier: checkpoint.Location) -> None:
    """Raise ConfigError if the head of an earlier adapter has classes other than `labels`, or another order."""
    recorded = checkpoint.read_base_model(earlier.weights)
    if recorded is None or recorded.head is None:
        return
    if recorded.head.classes != list(labels):
        raise ConfigError(
            f"adapter.path={config.path} has a head with the classes [{','.join(recorded.head.classes)}], but "
            f"model.labels=[{','.join(labels)}]; set model.labels=[{','.join(recorded.head.classes)}]."
        )


def load_earlier(adapter: Adapter, shards: Mapping[str, LocalShard], earlier: checkpoint.Location) -> None:
    """Read this rank's shards of an earlier adapter that `check_earlier` has accepted.

    Args:
        adapter: The new adapter.
        shards: The shards of the model, of which those of the adapter are filled.
        earlier: The earlier one.
    """
    checkpoint.load_shards(earlier.index, adapter.stored(shards))


def is_gone(config: AdapterConfig) -> bool:
    """Whether `adapter.path` is set but no longer exists."""
    path = config.path if isinstance(config, LoraConfig) else None
    return path is not None and not is_remote(path) and not Path(path.partition("@")[0]).exists()


def check_resumed(config: AdapterConfig, base: str, step_directory: Path) -> None:
    """Check that `adapter.path` is the adapter that the run to resume began with, unless it was deleted.

    Raises:
        ConfigError: It is not an adapter.
        CheckpointError: It is another adapter.
    """
    recorded = checkpoint.read_base_model(step_directory)
    given = config.path if isinstance(config, LoraConfig) else None
    began = None if recorded is None else recorded.adapter
    where = None if recorded is None else recorded.adapter_path
    if given is None and began is None:
        return
    if given is not None and began is not None:
        if is_gone(config) and where is not None and Path(where).is_relative_to(given.partition("@")[0]):
            return  # values come from the step
        earlier = locate_earlier(config, base)
        assert earlier is not None
        if checkpoint.fingerprint(earlier.index) == began:
            return
    remedy = "remove it" if began is None else f"set adapter.path={where}"
    raise CheckpointError(
        f"{step_directory} is of a run that began with adapter.path={where}, and it is {given}; {remedy}, or start a "
        f"new run in another run_dir."
    )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"


def _advice(earlier: Mapping[str, Any], own: Mapping[str, Any], stored: Collection[str]) -> str:
    """The settings that define the earlier adapter, whose tensors are `stored`, or why there are none."""
    if patterns := [name for name in ("rank_pattern", "alpha_pattern") if earlier.get(name)]:
        return f"Its {' and '.join(patterns)} cannot be set here; train another one, without adapter.path."
    if isinstance(earlier.get("target_modules"), str) and earlier["target_modules"] != "all-linear":
        return "Its target_modules is a pattern; set adapter.target_modules to the names of these modules."
    found = []
    for entry, (setting, default) in SETTING_OF_ENTRY.items():
        if (value := earlier.get(entry, default)) != own[entry]:
            found.append(f"adapter.{setting}={in_yaml(value)}")
    for name in LIST_ENTRIES:
        value = earlier.get(name) or []
        if name == "modules_to_save":  # peft also lists modules that the model may lack
            value = [module for module in value if any(f".{module}." in tensor for tensor in stored)]
        if isinstance(value, list) and {*map(str, value)} != {*map(str, own[name] or [])}:
            found.append(f"adapter.{name}=[{','.join(map(str, value))}]")
    return f"Set {' '.join(found)}." if found else "Train another one, without adapter.path."
