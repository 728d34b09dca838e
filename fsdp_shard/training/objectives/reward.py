"""`objective=reward`: a reward model, whose single output is higher for the better answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from fsdp_shard.training.objectives.answer_pairs import add_metrics
from fsdp_shard.training.objectives.objective import ForwardPass, PreferenceConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from fsdp_shard.data import Batch


@dataclass
class RewardConfig(PreferenceConfig):
    """A reward model (Bradley-Terry; Ouyang et al., 2022): -log sigmoid(reward chosen - reward rejected - margin).

    The margin comes from the data, if it has one. The reward is the output of a classifier with `num_labels` 1.
    """

    name: ClassVar[str] = "reward"
    tasks: ClassVar[tuple[str, ...]] = (SEQUENCE_CLASSIFICATION,)

    center: float = setting(
        0.0,
        "Weight of the squared sum of both rewards of a pair, which keeps their mean near 0 (Eisenstein et al., 2023).",
        minimum=0.0,
    )

    def trained_tokens(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Return which tokens the model reads, excluding those of pairs that fill up a batch."""
        if batch.segments is not None:
            return batch.segments > 0
        return (batch.inputs["attention_mask"] > 0) & super().trained_tokens(batch)[:, None]

    def terms(self, forward: ForwardPass) -> torch.Tensor:
        """Run the forward pass of both answers and return the sum of the losses divided by the divisor, [1]."""
        import torch
        import torch.nn.functional as F

        from fsdp_shard.data import IGNORE_INDEX
        from fsdp_shard.training.loss.forward_loss import forward_scores

        chosen, rejected = forward_scores(forward.model, forward.batch).view(-1, 2).unbind(1)
        is_pair = torch.ones_like(rejected, dtype=torch.bool)  # packed batches have no fillers
        if forward.batch.packed is None:
            is_pair = forward.batch.labels[1::2] != IGNORE_INDEX
        margin = forward.batch.extras.get("margin", torch.zeros_like(chosen))
        losses = -F.logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected).square()
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
        }
        add_metrics(forward, metrics, is_pair)
        return (torch.where(is_pair, losses, 0.0).sum() / forward.divisors[0]).reshape(1)
