"""LoRA on a model that is to be sharded: injected on the meta device, filled from a seed or a step, kept as peft does.

The frozen parameters stay the very objects that they were, so that what is known of them (which stored tensor fills
them) is carried over by identity, whatever peft calls them now. Knows no wrapper: what is trained is reached through
`LocalShard`s.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.checkpoint import (
    CONFIG,
    WEIGHTS,
    has_file,
    itemsize,
    load_shards,
    member,
    open_checkpoint,
    read_config,
    read_json,
    recognize,
)
from fsdp_shard.data import CAUSAL, CLASSIFICATION, SEQ2SEQ
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.models import tied_names
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fsdp_shard.checkpoint import TensorIndex
    from fsdp_shard.distributed import LocalShard
    from fsdp_shard.models import ModelConfig, ModelSource

BASE = "adapter_base.json"
_FINGERPRINT_ELEMENTS = 1024
_PREFIX = "base_model.model."
_PEFT_TASKS = {CAUSAL: "CAUSAL_LM", SEQ2SEQ: "SEQ_2_SEQ_LM"}  # it has none for masked language models
_NAME = "default"  # of the one adapter, peft's own default
# Entries of adapter_config.json that make a step the same adapter; the others say where it was made, and how.
_SHAPING = ("r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "use_rslora", "fan_in_fan_out")


@dataclass(frozen=True)
class Base:
    """Which model an adapter was trained on: where it lay, a digest that tells it from others, and how it was held."""

    path: str
    fingerprint: str
    quantize: str = "none"


@dataclass(frozen=True)
class Adapter:
    """What a step keeps of a model with an adapter: `names` maps a trained parameter to its name in peft's file.

    `frozen` says how the rest is held, for people, where that is not as it was stored.
    """

    FILE: ClassVar[str] = WEIGHTS

    names: Mapping[str, str]
    config: Mapping[str, Any]
    base: Base | None = None
    frozen: str | None = None

    def describe(self, shards: Mapping[str, LocalShard]) -> str:
        """How much is trained, for people."""
        num_params = sum(math.prod(shards[name].shape) for name in self.names)
        frozen = "all else is frozen" if self.frozen is None else f"all else is frozen, {self.frozen}"
        return f"LoRA: training {num_params / 1e6:,.2f} M parameters in {len(self.names)} tensors, {frozen}"

    def stored(self, shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
        """The trained ones among `shards`, under peft's names."""
        return {stored: shards[name] for name, stored in self.names.items()}

    def side_files(self) -> dict[str, bytes]:
        """adapter_config.json and what is known of the base, by name."""
        documents = {CONFIG: self.config, BASE: asdict(self.base) if self.base else {}}
        return {
            name: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode() for name, content in documents.items()
        }


def inject(
    model: PreTrainedModel, config: LoraConfig, base: str, names: Mapping[str, str], task: str = CAUSAL
) -> tuple[Adapter, dict[str, str]]:
    """Put LoRA into `model` (on meta) in place, all else frozen.

    `base` is what adapter_config.json shall name, `task` is that of the model. `names` says which stored tensor fills
    each parameter and buffer of the model; returned with it is the same for the names that they have now, copies in
    modules_to_save included.
    Raises ConfigError when no module fits.
    """
    import peft

    stored = {id(tensor): names[name] for name, tensor in model.state_dict(keep_vars=True).items() if name in names}
    _refuse_tied(model, config)
    names_before = [name for name, _ in model.named_modules()]
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it, so it may be any number
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules) or "all-linear",
        exclude_modules=list(config.exclude_modules) or None,
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.rank_stabilized,
        task_type=_PEFT_TASKS.get(task),
        base_model_name_or_path=base,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft corrects it itself
            # It sets these for fused experts, which are parameters, and looks for them among the modules alone.
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
            peft.inject_adapter_in_model(settings, model, _NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"adapter=lora does not fit {type(model).__name__}: {str(error).splitlines()[0]}") from error
    _refuse_unfound(model, config, names_before)
    now = model.state_dict(keep_vars=True)
    filled = {name: stored[id(tensor)] for name, tensor in now.items() if id(tensor) in stored}
    for name in now:
        original = name.replace(f".modules_to_save.{_NAME}.", ".original_module.")
        if original != name and original in filled:
            filled[name] = filled[original]
    trained = {name: _peft_name(name) for name, param in model.named_parameters() if param.requires_grad}
    if task == CLASSIFICATION:  # told before, it would have peft train the head whole, asked or not
        settings.task_type = "SEQ_CLS"
    return Adapter(trained, _as_json(settings)), filled


def base_path(config: ModelConfig, source: ModelSource) -> str:
    """What adapter_config.json calls the base: an absolute path, or the hub id as it was given."""
    if recognize(source.weights):
        raise ConfigError(
            f"model.path={config.path} is an adapter itself, so adapter=lora cannot train another one on it; convert "
            f"it to a model first, or take adapter=none to train what the two make together."
        )
    return str(source.weights.resolve()) if Path(config.path).expanduser().exists() else config.path


def fingerprint(index: TensorIndex) -> str:
    """A digest of names, dtypes, shapes and the first elements of all tensors."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name in sorted(index.names):
        entry = index.entry(name)
        count = min(entry.num_elements, _FINGERPRINT_ELEMENTS)
        start = bytearray(count * itemsize(entry.dtype))
        index.read_into(name, 0, start)
        digest.update(f"{name} {entry.dtype} {entry.shape} ".encode() + start)
    return digest.hexdigest()


def fill_new(shards: Mapping[str, LocalShard], names: Mapping[str, str], seed: int) -> None:
    """Give what is new in `shards`, that is not in `names`, its first values: Kaiming's for A, and nothing for B.

    Each matrix is drawn whole from (seed, its name), so that the values depend on no number of ranks.
    """
    import torch

    for name, shard in shards.items():
        if name in names:
            continue
        if "lora_B" in name or "lora_embedding_A" in name:
            shard.data.zero_()
            continue
        digest = hashlib.blake2b(f"fsdp-shard lora {seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = torch.empty(shard.shape)
        if "lora_embedding_B" in name:
            whole.normal_(generator=generator)
        else:
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        shard.data.copy_(whole.view(-1)[shard.start : shard.start + len(shard.data)])


def restore(adapter: Adapter, shards: Mapping[str, LocalShard], step_directory: Path) -> None:
    """Fill the trained ones of `shards` from a step; CheckpointError when it holds another adapter."""
    assert adapter.base is not None
    saved_base = read_json(member(step_directory, BASE))
    if not isinstance(saved_base, dict) or saved_base.get("fingerprint") != adapter.base.fingerprint:
        where = saved_base.get("path") if isinstance(saved_base, dict) else None
        raise CheckpointError(
            f"{step_directory} holds an adapter that was trained on {where}, and the weights in {adapter.base.path} "
            f"are others; give that model as model.path."
        )
    if (quantize := saved_base.get("quantize", "none")) != adapter.base.quantize:
        raise CheckpointError(
            f"{step_directory} holds an adapter that was trained with adapter.quantize={quantize}, and what "
            f"adapter.quantize={adapter.base.quantize} makes of its base is another model. Give the same."
        )
    mine = adapter.stored(shards)
    with open_checkpoint(step_directory) as index:
        known = {name: shard.shape for name, shard in mine.items()}
        if index.shapes != known:
            odd = sorted(dict(index.shapes.items() ^ known.items()))
            raise CheckpointError(
                f"{step_directory} holds another adapter than these settings make: they differ in {odd[0]} and "
                f"{len(odd) - 1} more. Give the adapter.* settings of that run."
            )
        load_shards(index, mine)
    saved = read_config(step_directory)
    for key in _SHAPING:
        if saved.get(key) != adapter.config[key]:
            raise CheckpointError(
                f"{step_directory} was saved with {key}={saved.get(key)}, but these settings give "
                f"{adapter.config[key]}. Give the adapter.* settings of that run."
            )


def is_adapter_step(step_directory: Path | None) -> bool:
    return step_directory is not None and has_file(step_directory, CONFIG)


def check_continues(config: AdapterConfig, step_directory: Path | None) -> None:
    """Raise ConfigError when a step was saved with an adapter and these settings have none, or the other way round."""
    if step_directory is not None and config.trains_all == is_adapter_step(step_directory):
        was, give = ("with", "adapter=lora") if config.trains_all else ("without", "adapter=none")
        raise ConfigError(
            f"{step_directory} was saved {was} an adapter, so this run cannot go on from it; give {give}, or begin "
            f"anew from its weights with model.path and another run_dir."
        )


def _refuse_tied(model: PreTrainedModel, config: LoraConfig) -> None:
    aliases = tied_names(model)
    for name in {*aliases, *aliases.values()}:
        module = name.rpartition(".")[0]
        wanted = [*config.target_modules, *config.modules_to_save]
        if any(module == part or module.endswith(f".{part}") for part in wanted):
            raise ConfigError(
                f"adapter.target_modules or adapter.modules_to_save has {module}, whose weight {type(model).__name__} "
                f"ties to another module's: they would no longer be one. Leave it out."
            )


def _refuse_unfound(model: PreTrainedModel, config: LoraConfig, modules: Sequence[str]) -> None:
    """peft is content when any target module is there, and ignores modules to save, or not to adapt, that are not.

    `modules` are the names of those that the model had before.
    """
    found = [name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
    found += [
        name.partition(".lora_embedding_A")[0] for name, _ in model.named_parameters() if ".lora_embedding_A" in name
    ]
    saved = [
        name.partition(".modules_to_save.")[0] for name, _ in model.named_parameters() if ".modules_to_save." in name
    ]
    for setting, wanted, there in (
        ("target_modules", config.target_modules, found),
        ("modules_to_save", config.modules_to_save, saved),
        ("exclude_modules", config.exclude_modules, modules),
    ):
        for part in wanted:
            if not any(name == part or name.endswith(f".{part}") for name in there):
                raise ConfigError(f"adapter.{setting} has {part}, but {type(model).__name__} has no such module.")


def _peft_name(name: str) -> str:
    """As peft's files have it: without the adapter's own name, and what is saved whole under the module's."""
    plain = name.replace(f".modules_to_save.{_NAME}.", ".")
    return _PREFIX + ".".join(part for part in plain.split(".") if part != _NAME)


def _as_json(settings: Any) -> dict[str, Any]:
    """What peft writes into adapter_config.json."""

    def plain(value: Any) -> Any:
        if isinstance(value, set):
            return sorted(value)
        return value.value if isinstance(value, Enum) else value

    return {key: plain(value) for key, value in {**settings.to_dict(), "inference_mode": True}.items()}
