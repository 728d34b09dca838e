"""The settings common to all optimizers. Imports no torch.

An optimizer is a subclass of `OptimConfig` and one line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.optim.parameter_groups import decay_groups
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


def decay_setting(default: float) -> float:
    """Declare the setting `weight_decay`, whose default depends on the optimizer."""
    return setting(
        default, "Weight decay of matrices and embeddings; it does not apply to norms and biases.", minimum=0.0
    )


@dataclass
class OptimConfig:
    """The `optim.*` settings; a subclass adds the settings of one optimizer and creates it.

    With `needs_full_params`, updating a parameter requires all of its elements: one rank gathers, updates and scatters
    it, and keeps its state. Otherwise each rank updates its own shard.
    """

    needs_full_params: ClassVar[bool] = False

    lr: float = setting(2e-5, "Peak learning rate, reached after warm-up.", above=0.0)
    weight_decay: float = decay_setting(0.0)

    @property
    def keeps_state(self) -> bool:
        """Whether the optimizer has state other than the parameters, which a resume needs."""
        return True

    def check_installed(self) -> None:
        """Raise ConfigError if a package that this optimizer needs is not installed."""

    def check_divided(self, tensor_parallel: int, expert_parallel: int) -> None:
        """Raise ConfigError if the optimizer needs full parameters, and several ranks divide layers or experts."""
        if not self.needs_full_params or tensor_parallel == expert_parallel == 1:
            return
        name = "tensor_parallel" if tensor_parallel > 1 else "expert_parallel"
        raise ConfigError(
            f"This optimizer needs full parameters for an update, which it cannot gather with "
            f"shard.{name}={max(tensor_parallel, expert_parallel)}; use optim=adamw or optim=sgd."
        )

    def check_parameters(self, names: Iterable[str]) -> None:
        """Raise ConfigError if the settings name a module that contains none of the parameters with these FQNs."""

    def build(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        rates: Mapping[str, float] | None = None,
    ) -> torch.optim.Optimizer:
        """Build the optimizer of the trainable parameters.

        Args:
            parameters: Parameters by FQN, sharded or not; frozen ones are ignored.
            shapes: Unsharded shapes by FQN, as a wrapper may store its shard of a matrix as a flat vector.
            rates: Peak learning rates by FQN, for parameters whose rate is not `lr`.
        """
        return self.create(decay_groups(parameters, shapes, self.weight_decay, rates))

    def create(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create the optimizer from `groups`, each with its own `weight_decay`, and some with their own `lr`."""
        raise ConfigError(
            "optim has no optimizer: make the config with `fs.compose_config(fs.FinetuneConfig, [...])`, which has "
            "adamw unless the settings name another, such as optim=adafactor."
        )
