"""`optim=adamw8bit`: torchao's AdamW with 8-bit state. Imports torch and torchao only when it builds the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.config import OptimConfig
from fsdp_shard.training.optim.adamw import check_betas
from fsdp_shard.training.optim.param_groups import decay_groups
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class AdamW8bitConfig(OptimConfig):
    """Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021), as torchao.optim.AdamW8bit has it.

    Blocks are of 256 elements in a row of the whole parameter, so that they are the same on any number of ranks. What
    has less than 4,096 elements, or is not made of whole blocks, keeps its state in full.
    """

    needs_whole: ClassVar[bool] = True

    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata={"help": "Decay rates of the running means of the gradient and of its square."},
    )
    eps: float = setting(1e-8, "Added to the denominator of the update.", above=0.0)
    weight_decay: float = setting(0.01, "Decay of matrices; norms and biases are not decayed.", minimum=0.0)

    def check(self, prefix: str) -> None:
        check_betas(self.betas, prefix)

    def check_installed(self) -> None:
        if find_spec("torchao") is None:
            raise ConfigError(
                "optim=adamw8bit needs torchao, which is not installed. Install it with "
                "pip install 'fsdp-shard[quantize]', or take optim=adamw."
            )

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """See `OptimConfig.build`."""
        import torch
        from torchao.optim import AdamW8bit

        class Eager(AdamW8bit):  # type: ignore[misc]  # torchao has no types
            """torchao compiles the update of each shape; on a CPU that takes longer than it saves."""

            def step(self, closure: Any = None) -> None:
                on_gpu = any(param.is_cuda for group in self.param_groups for param in group["params"])
                with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
                    super().step()

        groups = decay_groups(parameters, shapes, self.weight_decay)
        optimizer: torch.optim.Optimizer = Eager(groups, lr=self.lr, betas=tuple(self.betas), eps=self.eps)
        return optimizer
