"""`objective=distill`: distillation from the logits of a larger model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.checkpoint import Location, locate
from fsdp_shard.errors import InputError
from fsdp_shard.models import CAUSAL
from fsdp_shard.training.objectives.objective import PRECOMPUTED, ForwardPass, ObjectiveConfig
from fsdp_shard.utils import REQUIRED, derived, setting

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

COMPUTED = "computed"


@dataclass
class DistillConfig(ObjectiveConfig):
    """Distillation (Hinton et al., 2015): alpha * T^2 * KL(teacher || student) + (1 - alpha) * cross-entropy.

    The KL divergence compares the distributions of logits / T; T^2 preserves the scale of its gradients. It uses the
    teacher's `top_k` most likely tokens for each prediction, with probabilities normalized to 1, as in Gemma 3 (Gemma
    Team, 2025). The student's distribution is over the whole vocabulary. Dropping the rest of the teacher's mass makes
    the student slightly overconfident for a small k (Anshumann et al., 2025); with all tokens, the divergence is exact.
    """

    name: ClassVar[str] = "distill"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL,)
    headline: ClassVar[tuple[str, ...]] = ("kl", "cross_entropy", "agreement")
    is_cross_entropy: ClassVar[bool] = False
    num_token_values: ClassVar[int] = 3  # as in `StudentTerms`, which needs torch

    teacher: str = setting(
        REQUIRED,
        "The model to learn from, with the same vocabulary: a run or a step of it (RUN@best), a checkpoint of any "
        "format, or a hub id. It computes in the dtype of its weights; model.trust_remote_code applies to it, too.",
    )
    alpha: float = setting(
        0.5,
        "Weight of the KL divergence; the cross-entropy has the remaining weight. 1: only the teacher.",
        above=0.0,
        maximum=1.0,
    )
    temperature: float = setting(1.0, "Divisor of both models' logits in the KL divergence.", above=0.0)
    top_k: int | None = setting(
        64,
        "Number of the teacher's most likely tokens used for each prediction; null: the whole vocabulary.",
        minimum=1,
    )
    teacher_logits: str = setting(
        PRECOMPUTED,
        "precomputed: one pass of the teacher over the samples of the run before training, kept in data.cache_dir (8 "
        "bytes for each of top_k tokens of each prediction) and never computed again; computed: the teacher runs "
        "alongside the model in each step, on every rank, also for streamed data.",
        choices=(PRECOMPUTED, COMPUTED),
    )
    # Any, as in DispatchConfig.
    teacher_max_memory: Any = setting(
        None,
        "Memory for the teacher on each rank, such as {0: 20GB, cpu: 64GB}; what does not fit is read from the disk "
        "as it runs. Of several ranks on a machine, each uses its own GPU, so name all: {0: 20GB, 1: 20GB, cpu: 64GB}. "
        "Default: the memory that is free when it is loaded; with "
        "teacher_logits=computed on GPUs, leave some for training.",
    )

    @property
    def is_precomputed(self) -> bool:
        """Whether the teacher runs before training, so that its targets come with the samples."""
        return self.teacher_logits == PRECOMPUTED

    def num_top_tokens(self, config: PretrainedConfig) -> int:
        """How many of the teacher's tokens count for each prediction; `config` is the teacher's, or the student's."""
        return self.top_k or int(config.get_text_config().vocab_size)

    @derived("teacher")
    def source(self) -> Location:
        """The location that `teacher` leads to, resolved once; errors name the setting."""
        return self.locate()

    def locate(self, *, fetch_weights: bool = True) -> Location:
        """Resolve `teacher`; for a hub model, download the weights only if `fetch_weights` is true."""
        try:
            return locate(self.teacher, fetch_weights=fetch_weights)
        except InputError as error:
            raise type(error)(f"objective.teacher={self.teacher}: {error}") from error

    def terms(self, forward: ForwardPass) -> torch.Tensor:
        """Run the forward passes of both models and return the sum of the losses divided by the divisor, [1]."""
        from fsdp_shard.training.loss.distillation import StudentTerms
        from fsdp_shard.training.loss.forward_loss import forward_rows

        batch, number = forward.batch, float(len(forward.batch.label_positions))
        labels, targets = batch.labels.flatten()[batch.label_positions], forward.reference.targets(batch)
        function = StudentTerms(labels, targets, self.temperature)
        divergence, plain, same = forward_rows(forward.model.module, batch, function).sum(0).unbind()
        for name, total in (("kl", divergence), ("cross_entropy", plain), ("agreement", same)):
            forward.sums.add_metric(name, total, number)
        loss = self.alpha * self.temperature**2 * divergence + (1 - self.alpha) * plain
        return (loss / forward.divisors[0]).reshape(1)
