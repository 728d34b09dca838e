"""PiSSA (Meng et al., 2024) and OLoRA (Büyükakyüz, 2024): adapters that are initialized with a part of the weights.

peft subtracts that part from the base model. Here, the base stays unchanged, and a second, frozen adapter of each layer
subtracts the part: W + s * B @ A - s * B0 @ A0. The base without adapters is therefore exact; with both adapters, it
equals the model up to rounding in the computation dtype. A checkpoint stores both as one plain LoRA of twice the rank,
A' = [A, A0], B' = [B, -B0], which any tool can read; a resume splits it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_shard.checkpoint import TensorIndex
from fsdp_shard.distributed import Communicator, LocalShard, run_on_all
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.training.peft.config import PRINCIPAL, LoraConfig
from fsdp_shard.training.seeding import derived_seed

_TRAINED, _FROZEN = "default", "initial"  # names of the two adapters
_NUM_ITERATIONS = 16  # of the randomized decomposition, as in peft's examples

Factors = tuple[torch.Tensor, torch.Tensor]  # A [rank, inputs] and B [outputs, rank]


@dataclass(frozen=True)
class PrincipalLayer:
    """A layer whose adapter is initialized with a part of its weight.

    Attributes:
        weight: FQN of the base weight.
        is_transposed: Whether the weight is stored as [inputs, outputs].
        scale: Scale of the product of the adapter's matrices.
        lora_rank: Rank of the trained adapter.
    """

    weight: str
    is_transposed: bool
    scale: float
    lora_rank: int


def principal_factors(kind: str, weight: torch.Tensor, rank: int, scale: float, seed: int) -> Factors:
    """Decompose a weight, float32 [outputs, inputs], as in `adapter.init=kind`, in CPU memory."""
    if kind == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if kind == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            left, values, transposed = torch.svd_lowrank(weight, rank, niter=_NUM_ITERATIONS)
            right = transposed.T
    root = (values / scale).sqrt()
    return root[:, None] * right, left * root


@dataclass(frozen=True)
class Principal:
    """All such layers of a model, by FQN, and the decomposition: `pissa`, `pissa_fast` or `olora`."""

    kind: str
    layers: Mapping[str, PrincipalLayer]

    def parameters(self) -> Iterator[str]:
        """Yield the FQNs of the parameters of both adapters in all layers."""
        for layer in self.layers:
            yield from (_name(layer, factor, which) for factor in "AB" for which in (_TRAINED, _FROZEN))

    def fill(
        self,
        shards: Mapping[str, LocalShard],
        names: Mapping[str, str],
        index: TensorIndex,
        seed: int,
        ranks: Communicator,
    ) -> None:
        """Decompose the base weights, each by one rank, and fill both adapters; a collective.

        Args:
            shards: This rank's shards of all parameters.
            names: Parameter -> stored tensor that fills it.
            index: The stored tensors.
            seed: Seed of the run, for the randomized decomposition.
            ranks: The ranks.
        """

        def mine() -> dict[str, Factors]:
            own = list(self.layers.items())[ranks.rank :: ranks.world_size]
            return {fqn: self._decompose(fqn, layer, shards, index, names, seed) for fqn, layer in own}

        found = run_on_all(ranks, mine)
        for factors in ranks.all_gather_object(found):
            for fqn, both in factors.items():
                for factor, whole in zip("AB", both, strict=True):
                    for which in (_TRAINED, _FROZEN):
                        shards[_name(fqn, factor, which)].fill(whole)

    def _decompose(
        self,
        fqn: str,
        layer: PrincipalLayer,
        shards: Mapping[str, LocalShard],
        index: TensorIndex,
        names: Mapping[str, str],
        seed: int,
    ) -> Factors:
        # In the model's dtype, with the formulas of peft's pissa_init and olora_init.
        weight = index.read(names[layer.weight]).to(shards[layer.weight].data.dtype).float()
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{index.path}: {names[layer.weight]} is not finite, so adapter.init={self.kind} cannot divide it."
            )
        weight = weight.T if layer.is_transposed else weight
        return principal_factors(self.kind, weight, layer.lora_rank, layer.scale, derived_seed("lora", seed, fqn))

    def stored(
        self, trained: Mapping[str, str], shards: Mapping[str, LocalShard], ranks: Communicator
    ) -> dict[str, LocalShard]:
        """Return the factors of both adapters combined into one, gathered on rank 0, by their names in peft's file.

        A collective.

        Args:
            trained: FQN of a trained parameter -> its name in peft's file.
            shards: This rank's shards of all parameters.
            ranks: The ranks.
        """
        parts = {name: shards[name] for name in self.parameters()}
        own = {name: (shard.start, shard.data.cpu()) for name, shard in parts.items() if shard.writes}
        everyone = ranks.gather_object(own)
        found = {}
        for layer in self.layers:
            for factor in "AB":
                name, frozen = (_name(layer, factor, which) for which in (_TRAINED, _FROZEN))
                shape, dtype = parts[name].shape, parts[name].data.dtype
                shape = (2 * shape[0], shape[1]) if factor == "A" else (shape[0], 2 * shape[1])
                data = torch.empty(0, dtype=dtype)
                if ranks.is_main:
                    one, two = (_whole(parts[part], [given[part] for given in everyone if part in given])
                                for part in (name, frozen))  # fmt: skip
                    data = torch.cat([one, two]) if factor == "A" else torch.cat([one, -two], dim=1)
                found[trained[name]] = LocalShard(data, data.view(-1), 0, shape, writes=ranks.is_main)
        return found

    def restore(self, trained: Mapping[str, str], shards: Mapping[str, LocalShard], index: TensorIndex) -> None:
        """Fill both adapters from the factors that `stored` combined."""
        for layer in self.layers:
            for factor in "AB":
                name, frozen = (_name(layer, factor, which) for which in (_TRAINED, _FROZEN))
                one, two = index.read(trained[name]).chunk(2, dim=0 if factor == "A" else 1)
                shards[name].fill(one)
                shards[frozen].fill(two if factor == "A" else -two)

    def shapes(self, trained: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return `shapes` by names in peft's file, with twice the rank for these layers' factors."""
        found = dict(shapes)
        for layer in self.layers:
            rows, columns = found[a := trained[_name(layer, "A", _TRAINED)]]
            found[a] = (2 * rows, columns)
            rows, columns = found[b := trained[_name(layer, "B", _TRAINED)]]
            found[b] = (rows, 2 * columns)
        return found


def inject_principal(model: nn.Module, config: LoraConfig) -> Principal | None:
    """Add the frozen adapters to a model on meta that has the trained ones; return None for other values of `init`.

    Raises:
        ConfigError: A layer's adapter cannot be initialized with a part of its weight.
    """
    if config.init not in PRINCIPAL:
        return None
    import peft
    from peft.tuners.lora import Linear, LoraLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        inputs, outputs = module.in_features or 0, module.out_features or 0
        if not isinstance(module, Linear) or config.rank > min(inputs, outputs):
            raise ConfigError(
                f"adapter.init={config.init} is for linear layers with at least adapter.rank={config.rank} inputs and "
                f"outputs, and {fqn} is {type(module).__name__} [{inputs}, {outputs}]; set a smaller adapter.rank, "
                f"adapter.target_modules to others, or adapter.init=default."
            )
        scale = float(module.scaling[_TRAINED])
        layers[fqn] = PrincipalLayer(f"{fqn}.base_layer.weight", bool(module.fan_in_fan_out), scale, config.rank)
    frozen = peft.LoraConfig(
        r=config.rank,
        lora_alpha=-config.alpha,  # type: ignore[arg-type]  # any number works: a negative one subtracts
        target_modules=list(layers),
        use_rslora=config.rank_stabilized,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft corrects it itself
        peft.inject_adapter_in_model(frozen, model, _FROZEN, low_cpu_mem_usage=True)
    for module in model.modules():  # peft has activated only the new adapter everywhere
        if isinstance(module, AuxiliaryTrainingWrapper):
            module.set_adapter(_TRAINED)
    for fqn in layers:
        layer: Any = model.get_submodule(fqn)
        layer.set_adapter([_TRAINED, _FROZEN])
        for factor in "AB":
            model.get_parameter(_name(fqn, factor, _FROZEN)).requires_grad_(False)
    return Principal(config.init, layers)


def combined_settings(config: LoraConfig) -> dict[str, Any]:
    """The entries of adapter_config.json for both adapters combined, which have the same scale."""
    alpha = config.alpha * (math.sqrt(2) if config.rank_stabilized else 2)
    return {"r": 2 * config.rank, "lora_alpha": alpha}


def _name(layer: str, factor: str, which: str) -> str:
    return f"{layer}.lora_{factor}.{which}.weight"


def _whole(shard: LocalShard, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    whole = torch.empty(shard.shape, dtype=shard.data.dtype)
    for start, data in parts:
        whole.view(-1)[start : start + len(data)] = data
    return whole
