"""`optim=adamw8bit`: torchao's AdamW with 8-bit state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.training.optim.torch_optim import AdamConfig
from fsdp_shard.utils import require_package

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class AdamW8bitConfig(AdamConfig):
    """AdamW with 8-bit state (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021), as in torchao.

    A block is 256 consecutive elements of the unsharded parameter, so blocks are the same on any number of ranks.
    Parameters with fewer than 4,096 elements, or with an incomplete block, keep an unquantized state.
    """

    needs_full_params: ClassVar[bool] = True

    def check_installed(self) -> None:
        require_package("torchao", "quantize", "optim=adamw8bit", "set optim=adamw")

    def create(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch
        from torchao.optim import AdamW8bit

        class Eager(AdamW8bit):  # type: ignore[misc]  # torchao has no types
            """An optimizer without torchao's compilation for each shape, which on a CPU takes longer than it saves."""

            def step(self) -> None:
                on_gpu = any(param.is_cuda for group in self.param_groups for param in group["params"])
                with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
                    super().step()

        optimizer: Optimizer = Eager(groups, lr=self.lr, betas=tuple(self.betas), eps=self.eps)
        return optimizer
