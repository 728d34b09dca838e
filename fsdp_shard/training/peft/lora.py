"""Adds LoRA to a model before sharding: injected on the meta device, filled from a seed or a checkpoint.

The frozen parameters remain the same objects, so each one's stored tensor is found by identity, regardless of peft's
renaming.
"""

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_shard import checkpoint
from fsdp_shard.distributed import Communicator, LocalShard
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.models import CAUSAL, SEQ2SEQ, SEQUENCE_CLASSIFICATION, ModelConfig, tied_names
from fsdp_shard.training.peft.config import EVA, AdapterConfig, LoraConfig
from fsdp_shard.training.peft.initial_values import Magnitude
from fsdp_shard.training.peft.principal import Principal, combined_settings, inject_principal
from fsdp_shard.utils import first_line, format_number, is_remote

if TYPE_CHECKING:
    import peft

_LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")  # how peft finds the number of a layer in the name of a module
_PEFT_TASKS = {CAUSAL: "CAUSAL_LM", SEQ2SEQ: "SEQ_2_SEQ_LM"}  # peft has none for masked language models
_EMBEDDING_LR = 1e-6  # peft's default with LoRA+
_NAME = "default"  # peft's default name of an adapter
# Entries of adapter_config.json that define the adapter; the others only describe its origin. Entry -> the setting
# `adapter.NAME` that sets it, and peft's default.
SETTING_OF_ENTRY: dict[str, tuple[str, Any]] = {
    "r": ("rank", 8),
    "lora_alpha": ("alpha", 8),
    "use_rslora": ("rank_stabilized", False),
    "use_dora": ("dora", False),
}
_LIMITS = ("exclude_modules", "layers_to_transform")  # of target_modules
LIST_ENTRIES = ("target_modules", "exclude_modules", "layers_to_transform", "modules_to_save")  # also names of settings
_DEFINING = (*SETTING_OF_ENTRY, *LIST_ENTRIES, "fan_in_fan_out")


@dataclass(frozen=True)
class Adapter:
    """The part of a model with an adapter that checkpoints store.

    Attributes:
        names: FQN of a trained parameter -> its name in peft's file.
        config: Content of adapter_config.json.
        base: The base model.
        frozen: Quantization of the frozen weights, to print.
        magnitudes: Parameter with DoRA magnitudes -> the weight whose norms they are.
        principal: The layers that are initialized with a part of their weights, if any.
        eva: FQNs of layers that `fill_eva` initializes from their inputs.
        lora_plus: (ratio, learning rate of embeddings) of LoRA+, if used.
    """

    FILE: ClassVar[str] = checkpoint.ADAPTER_WEIGHTS

    names: Mapping[str, str]
    config: Mapping[str, Any]
    base: checkpoint.BaseModel | None = None
    frozen: str | None = None
    magnitudes: Mapping[str, Magnitude] = field(default_factory=dict)
    lora_plus: tuple[float, float] | None = None
    principal: Principal | None = None
    eva: Sequence[str] = ()

    def describe(self, shards: Mapping[str, LocalShard]) -> str:
        """Describe how much is trained."""
        num_params = sum(math.prod(shards[name].shape) for name in self.names)
        frozen = "all else is frozen" if self.frozen is None else f"all else is frozen, {self.frozen}"
        kind = "DoRA" if self.magnitudes else "LoRA"
        return f"{kind}: training {format_number(num_params)} parameters in {len(self.names)} tensors, {frozen}"

    def learning_rates(self, lr: float, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
        """Return LoRA+'s peak learning rates (Hayou et al., 2024), grouped as in peft's `create_loraplus_optimizer`.

        Args:
            lr: The learning rate of A matrices, and of matrices in modules_to_save.
            shapes: Unsharded shapes of the trained parameters.

        Returns:
            FQN -> learning rate, for B matrices, vectors and adapted embeddings; empty without LoRA+.
        """
        if self.lora_plus is None:
            return {}
        ratio, of_embeddings = self.lora_plus
        rates = {name: lr * ratio for name, shape in shapes.items() if ".lora_B." in name or len(shape) == 1}
        return rates | {name: of_embeddings for name in shapes if ".lora_embedding_" in name}

    def stored(self, shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
        """Return the trained `shards`, by their names in peft's file."""
        return {stored: shards[name] for name, stored in self.names.items()}

    def to_save(self, shards: Mapping[str, LocalShard], ranks: Communicator) -> dict[str, LocalShard]:
        """Return the `shards` that a checkpoint stores, by their names in peft's file; a collective."""
        found = self.stored(shards)
        return found if self.principal is None else found | self.principal.stored(self.names, shards, ranks)

    def files(self) -> dict[str, bytes]:
        """Return the content of adapter_config.json and of the file that describes the base model."""
        config = (json.dumps(self.config, indent=2, sort_keys=True) + "\n").encode()
        base = b"{}\n" if self.base is None else self.base.to_json()
        return {checkpoint.ADAPTER_CONFIG: config, checkpoint.ADAPTER_BASE: base}


def inject_lora(
    model: PreTrainedModel,
    config: LoraConfig,
    base: str,
    names: Mapping[str, str],
    task: str = CAUSAL,
    head: Sequence[str] = (),
) -> tuple[Adapter, dict[str, str]]:
    """Add LoRA to a model in place, and freeze everything else.

    Args:
        model: The model, on the meta device.
        config: Settings of the adapter.
        base: Path or hub id of the base model, for adapter_config.json.
        names: Parameter or buffer of the model -> stored tensor that fills it.
        task: Task of the model.
        head: Modules of a new head, which are trained and saved as if listed in modules_to_save.

    Returns:
        The adapter, and `names` with the FQNs after the injection, including the copies in modules_to_save.

    Raises:
        ConfigError: The settings do not fit the modules of the model.
    """
    import peft

    stored = {id(tensor): names[name] for name, tensor in model.state_dict(keep_vars=True).items() if name in names}
    _check_tied(model, config)
    modules = [name for name, _ in model.named_modules()]
    _check_targets(model, config, modules)
    settings = _peft_settings(model, config, base, task, head)
    _inject(model, settings)
    _check_found(model, config, modules)
    _check_init(model, config, task)
    principal = inject_principal(model, config)
    filled = _map_stored_tensors(model, stored)
    trained = {name: _peft_name(name) for name, param in model.named_parameters() if param.requires_grad}
    if principal is not None:
        for name, value in combined_settings(config).items():
            setattr(settings, name, value)
    elif config.init != "default":  # set earlier, peft would draw values of meta tensors
        settings.init_lora_weights = config.init  # type: ignore[assignment]  # one of peft's words
        if config.init == EVA:
            settings.eva_config = peft.EvaConfig(rho=1.0)
    if task == SEQUENCE_CLASSIFICATION:  # set earlier, peft would always train the head
        settings.task_type = "SEQ_CLS"
    adapter = Adapter(
        trained,
        _as_json(settings),
        magnitudes=_magnitudes(model),
        lora_plus=_lora_plus(config),
        principal=principal,
        eva=_eva_layers(model, config),
    )
    return adapter, filled


def _peft_settings(
    model: PreTrainedModel, config: LoraConfig, base: str, task: str, head: Sequence[str]
) -> "peft.LoraConfig":
    import peft

    excluded = [] if config.target_modules else _routers(model)
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it, so any number works
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules) or _all_linear(model, config),
        layers_to_transform=sorted(config.layers_to_transform) or None,
        exclude_modules=list(dict.fromkeys([*config.exclude_modules, *excluded])) or None,
        modules_to_save=list(dict.fromkeys([*config.modules_to_save, *head])) or None,
        use_rslora=config.rank_stabilized,
        use_dora=config.dora,
        task_type=_PEFT_TASKS.get(task),
        base_model_name_or_path=base,
    )


def _inject(model: PreTrainedModel, settings: "peft.LoraConfig") -> None:
    import peft

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft corrects it itself
            # peft sets these for fused experts, which are parameters, but looks for them only among modules.
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
            with torch.device("meta"):  # else peft allocates each matrix before it moves it to meta
                peft.inject_adapter_in_model(settings, model, _NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        is_dora = "use_dora" in str(error)  # peft's word, for layers such as fused experts
        hint = " Set adapter.dora=false, or adapter.target_modules to other modules." if is_dora else ""
        raise ConfigError(f"adapter=lora does not fit {type(model).__name__}: {first_line(error)}{hint}") from error


def _map_stored_tensors(model: PreTrainedModel, stored: Mapping[int, str]) -> dict[str, str]:
    """Map each parameter and buffer to its stored tensor, by the identity of the tensor before the injection."""
    now = model.state_dict(keep_vars=True)
    filled = {name: stored[id(tensor)] for name, tensor in now.items() if id(tensor) in stored}
    for name in now:
        original = name.replace(f".modules_to_save.{_NAME}.", ".original_module.")
        if original != name and original in filled:
            filled[name] = filled[original]
    return filled


def base_path(config: ModelConfig, source: checkpoint.Location) -> str:
    """Return the base model for adapter_config.json: an absolute path or a hub id; raise ConfigError for an adapter."""
    if checkpoint.is_adapter(source.weights):
        raise ConfigError(
            f"model.path={config.path} is itself an adapter, to which adapter=lora cannot add another one; to "
            f"continue training it, set model.path to its base model and adapter.path={config.path}; or convert it to "
            f"a model first, or set adapter=none to train the merged model."
        )
    is_local = not is_remote(config.path) and checkpoint.local_path(config.path).exists()
    return str(source.weights.resolve()) if is_local else config.path


def restore(adapter: Adapter, shards: Mapping[str, LocalShard], step_directory: Path) -> None:
    """Load the trained `shards` from a step; raise CheckpointError if it holds another adapter."""
    assert adapter.base is not None
    saved = checkpoint.read_base_model(step_directory)
    if saved is not None and saved.quantize != adapter.base.quantize:
        raise CheckpointError(
            f"{step_directory} holds an adapter that was trained with adapter.quantize={saved.quantize}, and with "
            f"adapter.quantize={adapter.base.quantize} its base is another model. Set "
            f"adapter.quantize={saved.quantize}."
        )
    stored = adapter.stored(shards)
    with checkpoint.open_checkpoint(step_directory) as index:
        expected = {name: shard.shape for name, shard in stored.items()}
        if adapter.principal is not None:
            expected = adapter.principal.shapes(adapter.names, expected)
        if index.shapes != expected:
            different = sorted(dict(index.shapes.items() ^ expected.items()))
            raise CheckpointError(
                f"{step_directory} holds another adapter than these settings define: they differ in {different[0]} and "
                f"{len(different) - 1} more. Set the adapter.* settings of that run; with adapter.init=pissa, "
                f"pissa_fast or olora a step has twice the rank."
            )
        if adapter.principal is not None:
            adapter.principal.restore(adapter.names, shards, index)
            both = {adapter.names[name] for name in adapter.principal.parameters() if name in adapter.names}
            stored = {name: shard for name, shard in stored.items() if name not in both}
        checkpoint.load_shards(index, stored)
    config = checkpoint.read_adapter_config(step_directory)
    for key in _DEFINING:
        if config.get(key) != adapter.config[key]:
            raise CheckpointError(
                f"{step_directory} was saved with {key}={config.get(key)}, but these settings define "
                f"{adapter.config[key]}. Set the adapter.* settings of that run."
            )


def is_adapter_step(step_directory: Path) -> bool:
    """Whether a step holds only an adapter."""
    return checkpoint.has_file(step_directory, checkpoint.ADAPTER_CONFIG)


def check_continues(config: AdapterConfig, step_directory: Path | None) -> None:
    """Raise ConfigError if a step was saved with an adapter but these settings have none, or vice versa."""
    if step_directory is not None and config.trains_all == is_adapter_step(step_directory):
        was, remedy = ("with", "adapter=lora") if config.trains_all else ("without", "adapter=none")
        raise ConfigError(
            f"{step_directory} was saved {was} an adapter, so this run cannot resume from it; set {remedy}, or start a "
            f"new run from its weights with model.path and another run_dir."
        )


def _check_tied(model: PreTrainedModel, config: LoraConfig) -> None:
    aliases = tied_names(model)
    for name in {*aliases, *aliases.values()}:
        module = name.rpartition(".")[0]
        if any(_matches(module, wanted) for wanted in [*config.target_modules, *config.modules_to_save]):
            raise ConfigError(
                f"adapter.target_modules or adapter.modules_to_save has {module}, whose weight {type(model).__name__} "
                f"ties to that of another module: they would no longer be the same. Remove it."
            )


def _check_targets(model: PreTrainedModel, config: LoraConfig, modules: Sequence[str]) -> None:
    """Raise ConfigError, with the names of the linear layers, if a target module does not exist."""
    for part in config.target_modules:
        if not any(_matches(name, part) for name in modules):
            linear = (torch.nn.Linear, Conv1D)  # Conv1D is a linear layer of GPT-2
            found = (name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, linear))
            raise ConfigError(
                f"adapter.target_modules has {part}, but {type(model).__name__} has no such module; its linear layers "
                f"are {', '.join(dict.fromkeys(found))}."
            )


def _routers(model: PreTrainedModel) -> list[str]:
    """Return the names of routers that are linear layers but return more than a product, which peft cannot wrap."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return sorted({name.rpartition(".")[2] for name, module in modules if type(module).__name__.endswith("Router")})


def _all_linear(model: PreTrainedModel, config: LoraConfig) -> str | list[str]:
    """Return the default target modules; with layers_to_transform, peft requires names.

    Raises:
        ConfigError: The layers to transform have no linear layers, or also weights of other kinds.
    """
    if not config.layers_to_transform:
        return "all-linear"
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if _layer_of(f"{name}.") not in config.layers_to_transform:
            continue
        if any(param.ndim > 2 for param in module.parameters(recurse=False)):
            raise ConfigError(
                f"adapter.layers_to_transform needs adapter.target_modules for {type(model).__name__}, whose {name} is "
                f"not a plain linear layer; name the modules to adapt, such as [q_proj, v_proj]."
            )
        if isinstance(module, torch.nn.Linear | Conv1D):
            found[name.rpartition(".")[2]] = None
    if not found:
        raise _no_layer(model, config.layers_to_transform[0])
    return list(found)


def _layer_of(module: str) -> int | None:
    found = _LAYER.match(module)
    return None if found is None else int(found["number"])


def _no_layer(model: PreTrainedModel, number: int) -> ConfigError:
    numbers = [layer for name, _ in model.named_modules() if (layer := _layer_of(f"{name}.")) is not None]
    known = f"its layers are 0 to {max(numbers)}" if numbers else "the names of its modules have no numbers of layers"
    return ConfigError(
        f"adapter.layers_to_transform has {number}, but {type(model).__name__} has no module to adapt there; {known}."
    )


def _eva_layers(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the layers for `init=eva`: all except embeddings, which use `default`, as in peft.

    Raises:
        ConfigError: A layer has fewer inputs than the rank.
    """
    from peft.tuners.lora import Linear

    found = []
    for name, module in model.named_modules():
        if config.init == EVA and isinstance(module, Linear):
            assert module.in_features is not None
            if config.rank > module.in_features:
                raise ConfigError(
                    f"adapter.init=eva is for layers with at least adapter.rank={config.rank} inputs, and {name} has "
                    f"{module.in_features}; set a smaller adapter.rank, or adapter.target_modules to others."
                )
            found.append(name)
    return found


def _check_init(model: PreTrainedModel, config: LoraConfig, task: str) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    wrapped = next((name for name, module in model.named_modules() if isinstance(module, ParamWrapper)), None)
    if config.init == EVA and task != CAUSAL:
        raise ConfigError(
            f"adapter.init=eva takes the inputs of layers at tokens to predict, and is for model.task={CAUSAL}, not "
            f"{task}; use adapter.init=default."
        )
    if config.init in ("orthogonal", EVA) and wrapped is not None:
        raise ConfigError(
            f"adapter.init={config.init} is for layers with one matrix, but {wrapped} of {type(model).__name__} has "
            f"one for each expert; use adapter.init=default, or set adapter.target_modules to other modules."
        )


def _check_found(model: PreTrainedModel, config: LoraConfig, modules: Sequence[str]) -> None:
    """Check every entry: peft accepts target modules if any of them exists, and ignores other missing modules.

    `modules` are the names of the modules before the injection.
    """
    parameters = [name for name, _ in model.named_parameters()]
    adapted, embeddings, saved = (
        [name.partition(part)[0] for name in parameters if part in name]
        for part in (".lora_A.", ".lora_embedding_A", ".modules_to_save.")
    )
    for setting, wanted, found in (
        ("target_modules", config.target_modules, adapted + embeddings),
        ("modules_to_save", config.modules_to_save, saved),
        ("exclude_modules", config.exclude_modules, modules),
    ):
        for part in wanted:
            if not any(_matches(name, part) for name in found):
                why = f"{type(model).__name__} has no such module."
                if setting == "target_modules" and any(_matches(name, part) for name in modules):
                    limits = [f"adapter.{name}" for name in _LIMITS if getattr(config, name)]
                    limits = limits or ["adapter.modules_to_save"]
                    why = f"the model has such modules only where {' or '.join(limits)} excludes them; remove one."
                raise ConfigError(f"adapter.{setting} has {part}, but {why}")
    if config.lora_plus_embedding_lr is not None and not embeddings:
        raise ConfigError(
            f"adapter.lora_plus_embedding_lr={config.lora_plus_embedding_lr} has no effect, as no embedding of "
            f"{type(model).__name__} is adapted; add one to adapter.target_modules, or remove it."
        )
    layers = {_layer_of(name) for name in adapted + embeddings}
    for number in config.layers_to_transform:
        if number not in layers:
            raise _no_layer(model, number)


def _matches(module: str, wanted: str) -> bool:
    return module == wanted or module.endswith(f".{wanted}")


def _lora_plus(config: LoraConfig) -> tuple[float, float] | None:
    if config.lora_plus_ratio is None:
        return None
    return config.lora_plus_ratio, config.lora_plus_embedding_lr or _EMBEDDING_LR


def _magnitudes(model: PreTrainedModel) -> dict[str, Magnitude]:
    """The weights whose norms are DoRA's magnitudes, by the FQN of the parameter that holds the magnitudes."""
    found = {}
    for name, module in model.named_modules():
        owner, is_one, _ = name.partition(f".lora_magnitude_vector.{_NAME}")
        if is_one:
            found[f"{name}.weight"] = Magnitude(f"{owner}.base_layer.weight", bool(module.fan_in_fan_out))
    return found


def _peft_name(name: str) -> str:
    """Return the name in peft's file: without the adapter's name; copies of modules use the module's name."""
    plain = name.replace(f".modules_to_save.{_NAME}.", ".")
    plain = plain.replace(f".lora_magnitude_vector.{_NAME}.weight", ".lora_magnitude_vector")
    return checkpoint.PEFT_PREFIX + ".".join(part for part in plain.split(".") if part != _NAME)


def _as_json(settings: Any) -> dict[str, Any]:
    """Convert to the content of adapter_config.json like peft: sets as lists, enumerations as strings."""
    content: dict[str, Any] = json.loads(json.dumps(settings.to_dict() | {"inference_mode": True}, default=sorted))
    return content
