"""The settings of `adapter`: what of a model is trained. Imports neither torch nor peft."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import setting


@dataclass
class AdapterConfig:
    """`adapter=none`: all parameters are trained, and checkpoints hold the model."""

    trains_all: ClassVar[bool] = True

    def check_installed(self) -> None:
        """Raise ConfigError when a package that this adapter comes from is not installed."""


@dataclass
class LoraConfig(AdapterConfig):
    """Hu et al., LoRA (2021), through peft: the model is frozen, products of two thin matrices are trained beside it.

    Checkpoints hold the adapter only, as peft writes it.
    """

    trains_all: ClassVar[bool] = False

    rank: int = setting(16, "Columns of the one and rows of the other thin matrix (peft's r).", minimum=1)
    alpha: float = setting(32.0, "The product counts alpha / rank times.", above=0.0)
    dropout: float = setting(0.0, "Part of an adapted module's inputs that is dropped in training.", minimum=0.0)
    target_modules: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Modules to adapt, by their names or the last part of them, such as [q_proj, v_proj]; empty: all "
            "linear layers but the output head."
        },
    )
    exclude_modules: list[str] = field(default_factory=list, metadata={"help": "Modules not to adapt."})
    modules_to_save: list[str] = field(
        default_factory=list,
        metadata={"help": "Modules that are trained and saved whole beside the adapter, such as [lm_head]."},
    )
    rank_stabilized: bool = setting(
        False, "Count the product alpha / sqrt(rank) times instead (Kalajdzievski 2023; peft's use_rslora)."
    )
    quantize: str = setting(
        "none",
        "How the frozen linear layers of the blocks are held: none, as model.dtype; int8, in 8.5 bits a weight; nf4, "
        "in 4.5 bits (QLoRA). They are quantized as they are read, and no checkpoint holds them.",
        choices=("none", "int8", "nf4"),
    )

    def check(self, prefix: str) -> None:
        """Refuse to drop everything."""
        if self.dropout >= 1.0:
            raise ConfigError(f"{prefix}dropout={self.dropout} is out of range: it must be less than 1.0.")

    def check_installed(self) -> None:
        if find_spec("peft") is None:
            raise ConfigError(
                "adapter=lora needs peft, which is not installed. Install it with pip install 'fsdp-shard[lora]', or "
                "take adapter=none."
            )
