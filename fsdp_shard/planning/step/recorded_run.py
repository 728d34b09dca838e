"""What the recording of a micro-batch depends on, and the recording, which plans with the same of it share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import models, sharding
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.plan_cache import PlanCache, without_dtype, without_loss, without_ranks
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.completions import Completions
from fsdp_shard.planning.step.divided_model import divide_model
from fsdp_shard.planning.step.micro_batch import BatchSize, planned_batch
from fsdp_shard.planning.step.recording.events import Recordings
from fsdp_shard.planning.step.recording.record_passes import ExtraPasses, record_passes
from fsdp_shard.planning.step.shard_state import RankPart
from fsdp_shard.planning.step.snapshot import COMPLETIONS, EVA
from fsdp_shard.training import AdapterConfig, ObjectiveConfig, use_loss_head

if TYPE_CHECKING:
    from fsdp_shard.planning.step.eva_pass import EvaPass


@dataclass(frozen=True)
class RecordedRun:
    """All that a recording reads of a run; plans of one model that are equal in it share their recording.

    `build` and `record` read nothing else of the run, and look recordings up by all fields: a setting that is not in
    them cannot change a recording.

    Attributes:
        model: The settings `model.*` without the stored dtype: parameters are in the dtypes of their units.
        adapter: The settings `adapter.*`.
        shard: The settings `shard.*` without those for how ranks work together, except on sequences.
        units: The units of a rank's part, the root last, without the bytes of their stored dtype.
        experts: FQNs of the units of divided experts.
        objective: The settings `objective.*`.
        reference_kind: As in `PlannedRun.reference_kind`.
        size: The size of the micro-batch.
        keeps_scores: Whether attention keeps the scores of all pairs of tokens.
        completions: The completions of `train.sample_prompts`, if any.
        eva: The pass of `adapter.init=eva`, if any.
    """

    model: models.ModelConfig
    adapter: AdapterConfig
    shard: sharding.ShardConfig
    units: tuple[sharding.Unit, ...]
    experts: tuple[str, ...]
    objective: ObjectiveConfig
    reference_kind: str | None
    size: BatchSize
    keeps_scores: bool
    completions: Completions | None
    eva: EvaPass | None

    @classmethod
    def of(cls, config: PretrainedConfig, part: RankPart, run: PlannedRun) -> RecordedRun:
        """Return what the recording of `run` reads."""
        size, eva = BatchSize.of(config, run), None
        if run.adapter.finds_directions and not run.resumes:
            from fsdp_shard.planning.step.eva_pass import EvaPass  # few plans need it

            eva = EvaPass(replace(size, num_rows=run.num_rows), run.num_ranks)
        shard = replace(
            without_ranks(run.shard),
            context_parallel=run.shard.context_parallel,
            context_method=run.shard.context_method,
        )
        return cls(
            model=without_dtype(run.model),
            adapter=run.adapter,
            shard=shard,
            units=tuple(replace(unit, num_bytes=0) for unit in part.units),
            experts=tuple(sorted(part.experts)),
            objective=run.objective,
            reference_kind=run.reference_kind,
            size=size,
            keeps_scores=_keeps_scores(config, run),
            completions=Completions.of(run),
            eva=eva,
        )

    def build(self, config: PretrainedConfig, cache: PlanCache) -> tuple[PreTrainedModel, bool]:
        """Build the model of the recording on meta; return it, and whether its output head computes the loss."""
        return cache.get("recorded model", (self,), lambda: self._build(config))

    def record(self, model: PreTrainedModel, has_loss_head: bool, cache: PlanCache) -> Recordings:
        """Record a micro-batch of the model that `build` returned.

        Raises:
            Any of CANNOT_TRAIN: It does not run on fake tensors.
        """
        # `model.chunked_loss` has decided on the head, and is not read again.
        recorded = replace(self, model=without_loss(self.model))
        return cache.get("recording", (recorded, has_loss_head), lambda: recorded._record(model, has_loss_head))

    def _build(self, config: PretrainedConfig) -> tuple[PreTrainedModel, bool]:
        shard = self.shard
        model, _ = build_planned(config, self.model, self.adapter, shard.param_dtype, shard)
        if shard.flattens_units:
            for unit in self.units:  # one flat gradient, which covers frozen parameters too
                params = [model.get_parameter(name) for name in unit.parameters]
                if any(param.requires_grad for param in params):
                    for param in params:
                        param.requires_grad_(True)
        has_loss_head = shard.tensor_parallel == 1 and use_loss_head(  # otherwise the head is divided
            model, self.model.chunked_loss, any_vocabulary=not self.objective.is_cross_entropy
        )
        divide_model(model, shard)
        if shard.context_parallel > 1:
            sharding.use_context_parallel(model, sharding.resolve_context_method(shard, config))
        return model, has_loss_head

    def _record(self, model: PreTrainedModel, has_loss_head: bool) -> Recordings:
        size = replace(self.size, upcasts_logits=self.objective.is_cross_entropy and not has_loss_head)
        extra: dict[str, ExtraPasses | None] = {COMPLETIONS: self.completions, EVA: self.eva}
        with _math_attention() if self.keeps_scores else nullcontext():
            return record_passes(
                model,
                self.shard,
                self.units,
                partial(
                    planned_batch,
                    model,
                    self.objective,
                    self.reference_kind,
                    size,
                    leaves_adapter_out=self.adapter.begins_at_base,
                ),
                uncast=self.experts,
                rows=size.rows,
                extra={phase: passes for phase, passes in extra.items() if passes is not None},
            )


def _keeps_scores(config: PretrainedConfig, run: PlannedRun) -> bool:
    """Whether attention keeps the scores of all pairs of tokens.

    On a GPU, torch's flash attention supports no float32, and the kernel that does supports no grouped-query heads.
    """
    text: Any = config.get_text_config()
    heads, key_heads = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    is_grouped = bool(heads and key_heads and key_heads < heads)
    return run.on_gpu and is_grouped and run.shard.param_dtype == "float32" and run.model.attention in ("auto", "sdpa")


def _math_attention() -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return found
