"""The `adapter.*` settings, which select the trained parameters of a model. Imports neither torch nor peft."""

from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import require_package, setting

EVA = "eva"
PRINCIPAL = ("pissa", "pissa_fast", "olora")  # values of `adapter.init` that start from a part of the weights


@dataclass
class AdapterConfig:
    """`adapter=none`: all parameters are trained, and checkpoints hold the model."""

    trains_all: ClassVar[bool] = True
    init, quantize = "default", "none"  # not settings here

    @property
    def begins_at_base(self) -> bool:
        """Whether training begins from the model without its adapter."""
        return False

    @property
    def finds_directions(self) -> bool:
        """Whether its initial values are the principal directions of the inputs of layers."""
        return False

    def check_installed(self) -> None:
        """Raise ConfigError if a package that this adapter needs is not installed."""


@dataclass
class LoraConfig(AdapterConfig):
    """LoRA (Hu et al., 2021), through peft: the model is frozen, and low-rank updates of its layers are trained.

    Checkpoints hold only the adapter, in peft's format.
    """

    trains_all: ClassVar[bool] = False

    path: str | None = setting(
        None,
        "Adapter with the initial values of this one: a run, a step of it (RUN@best), the directory of an adapter of "
        "peft, or a hub id. It must be for the model of model.path, and the other settings here must match its own.",
    )
    rank: int = setting(16, "Rank of the LoRA matrices (peft's r).", minimum=1)
    alpha: float = setting(32.0, "Scale of the low-rank update, which is multiplied by alpha / rank.", above=0.0)
    dropout: float = setting(0.0, "Dropout probability of the inputs of adapted modules.", minimum=0.0)
    target_modules: list[str] = setting(
        [], "Modules to adapt, such as [q_proj, v_proj]; empty: all linear layers except the output head."
    )
    exclude_modules: list[str] = setting([], "Modules not to adapt.")
    layers_to_transform: list[int] = setting(
        [], "Numbers of the layers to adapt, such as [0, 1], counted from 0; empty: all layers."
    )
    modules_to_save: list[str] = setting([], "Modules to train fully and save with the adapter, such as [lm_head].")
    rank_stabilized: bool = setting(False, "Scale by alpha / sqrt(rank) instead (rsLoRA, peft's use_rslora).")
    dora: bool = setting(
        False, "Train the norms of the outputs' weights separately from their direction (DoRA, peft's use_dora)."
    )
    init: str = setting(
        "default",
        "Initial values (peft's init_lora_weights), which leave the model as it is, up to rounding. default: A "
        "uniform, B zero; gaussian: A normal with a standard deviation of 1 / rank, B zero; orthogonal: A and B in "
        "orthogonal spans; pissa: the largest singular values of each weight, which are trained instead of an update "
        "to it (pissa_fast: found in 16 random iterations); olora: the first columns of its QR decomposition; eva: A "
        "the principal directions of each layer's inputs in the first micro-batches, B zero (peft's with rho=1: "
        "ranks are not redistributed over the layers).",
        choices=("default", "gaussian", "orthogonal", EVA, *PRINCIPAL),
    )
    lora_plus_ratio: float | None = setting(
        None,
        "LoRA+: B matrices and vectors train at optim.lr times this, such as 16, all else at optim.lr; null: the same "
        "rate for all.",
        above=1.0,
    )
    lora_plus_embedding_lr: float | None = setting(
        None, "LoRA+: learning rate of adapted embeddings; null: 1e-6, as in peft.", above=0.0
    )
    quantize: str = setting(
        "none",
        "Quantization of the frozen linear layers of the blocks. none: model.dtype; int8: 8.5 bits per weight; nf4: "
        "4.5 bits per weight (QLoRA). Weights are quantized on load; checkpoints do not hold them.",
        choices=("none", "int8", "nf4"),
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for values that are out of range or contradict each other."""
        if self.dropout >= 1.0:
            raise ConfigError(f"{prefix}dropout={self.dropout} is out of range: it must be less than 1.0.")
        if self.path == "":
            raise ConfigError(f"{prefix}path is empty; give the directory of an adapter, or remove it.")
        if self.path is not None and self.init != "default":
            raise ConfigError(
                f"{prefix}init={self.init} has no effect with {prefix}path, whose values the adapter begins with; "
                f"remove one of them."
            )
        if self.init == "orthogonal" and self.rank % 2:
            raise ConfigError(
                f"{prefix}init=orthogonal needs an even {prefix}rank, which A and B share; it is {self.rank}."
            )
        if self.init in PRINCIPAL and (self.dora or self.quantize != "none"):
            other = f"{prefix}dora=true" if self.dora else f"{prefix}quantize={self.quantize}"
            raise ConfigError(
                f"{prefix}init={self.init}, which takes its first values from the weights, cannot be combined with "
                f"{other}; remove one of them."
            )
        if self.lora_plus_embedding_lr is not None and self.lora_plus_ratio is None:
            raise ConfigError(
                f"{prefix}lora_plus_embedding_lr={self.lora_plus_embedding_lr} has no effect without "
                f"{prefix}lora_plus_ratio; set that too, or remove it."
            )
        if self.dora and self.quantize != "none":
            raise ConfigError(
                f"{prefix}dora=true cannot be combined with {prefix}quantize={self.quantize}: its forward pass needs "
                f"the norms of the frozen weights, which are not decoded there. Remove one of them."
            )

    @property
    def begins_at_base(self) -> bool:
        return self.path is None

    @property
    def finds_directions(self) -> bool:
        return self.init == EVA

    def check_installed(self) -> None:
        require_package("peft", "lora", "adapter=lora", "set adapter=none")
