"""Plans one model with many settings, and checks whether `finetune` would accept them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from fsdp_shard.data import PAIRS
from fsdp_shard.models import SEQ2SEQ, check_packing, check_shared_prompts
from fsdp_shard.planning.costs.model_facts import ModelFacts, model_facts
from fsdp_shard.planning.costs.step_cost import StepCost, step_cost
from fsdp_shard.planning.costs.teacher_cost import with_teacher
from fsdp_shard.planning.memory import built_model, plan_memory
from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan
from fsdp_shard.planning.plan_cache import PlanCache, without_activations, without_loss
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.training import (
    DistillConfig,
    check_architecture,
    check_combination,
    check_teacher_config,
    check_trained,
    decoder_start,
)
from fsdp_shard.utils import check


@dataclass
class Planner:
    """Plans runs of one model; values that plans share are computed once.

    Attributes:
        config: The transformers config of the model.
        on_gpu: Whether the ranks have GPUs.
        check_together: Raises ConfigError for conflicts between sections, beyond the checks here.
        host: The host memory of a run's machines; None if unknown.
        nodes: The fewest and the most machines of a run; its plan is for the fewest.
        seconds: Returns the time of a step of a run, or None; None if no times are known.
        num_plans: Number of planned runs.
        max_plans: Maximum number of plans per kind of advice.
    """

    config: PretrainedConfig
    on_gpu: bool = True
    check_together: Callable[[PlannedRun], None] | None = None
    host: Callable[[PlannedRun], HostMemory | None] | None = None
    seconds: Callable[[PlannedRun], float | None] | None = None
    cache: PlanCache = field(default_factory=PlanCache)
    nodes: tuple[int, int] = (1, 1)
    num_plans: int = 0
    max_plans: int = 150

    def plan(self, run: PlannedRun) -> MemoryPlan:
        """Plan the memory of a run; raises as `plan_memory` does."""
        self.num_plans += 1
        return plan_memory(self.config, run, self.cache)

    def host_of(self, run: PlannedRun) -> HostMemory | None:
        """The host memory of a run's machines, if known."""
        return None if self.host is None else self.host(run)

    def fits(self, run: PlannedRun, plan: MemoryPlan, memory_bytes: int) -> bool | None:
        """Whether a run's plan fits in the memory of devices and machines; None if it has no peak."""
        host = self.host_of(run)
        return plan.fits(memory_bytes) if host is None or host.fits(plan) else False

    def cannot_hold(self, run: PlannedRun, memory_bytes: int) -> bool:
        """Whether its ranks cannot hold even 4-bit weights; False if host memory is unknown."""
        host = self.host_of(run)
        if host is None:
            return False
        _, _, units = built_model(self.config, run, self.cache)
        per_rank = memory_bytes + host.num_bytes // host.num_ranks
        return sum(unit.num_params for unit in units) // 2 > run.num_ranks * per_rank

    def cost(self, run: PlannedRun) -> StepCost:
        """The computation and communication of a step of a run."""
        shard = without_activations(run.shard)

        def measure() -> ModelFacts:
            stored, _, _ = built_model(self.config, run, self.cache)
            return model_facts(self.config, stored, run.model, run.adapter, shard)

        facts = self.cache.get("costs", (without_loss(run.model), run.adapter, shard), measure)
        return with_teacher(step_cost(facts, run), run, self.cache)

    def check(self, run: PlannedRun) -> None:
        """Raise an InputError if `finetune` would reject the settings of `run`. Cheap; builds no model."""
        for section in (run.model, run.shard, run.train, run.optim, run.adapter, run.objective):
            check(section)
        if self.check_together is not None:
            self.check_together(run)
        fewest, most = self.nodes
        for num_ranks in (run.num_ranks // fewest * nodes for nodes in range(fewest, most + 1)):
            check_combination(run, num_ranks, on_gpu=self.on_gpu, is_packed=run.is_packed, is_streamed=run.is_streamed)

    def check_model(self, run: PlannedRun) -> None:
        """Raise an InputError if `finetune` would reject the model with these settings, once `plan` accepted them."""
        model, _, _ = built_model(self.config, run, self.cache)
        task, objective = run.model.task, run.objective
        self.cache.get("architecture", (task, objective.name), lambda: check_architecture(self.config, task, objective))
        if task == SEQ2SEQ:
            decoder_start(model)
        if isinstance(objective, DistillConfig):
            of_teacher = objective.teacher, objective.top_k, run.sequence_length, run.is_packed
            self.cache.get("teacher config", of_teacher, lambda: self._check_teacher(objective, run))
        run.optim.check_parameters([name for name, _ in model.named_parameters(remove_duplicate=False)])
        check_trained(model, run.shard)
        if run.is_packed:
            packs_pairs = run.objective.samples == PAIRS
            key = packs_pairs, run.model.attention, run.sequence_length if packs_pairs else None
            self.cache.get("packing", key, lambda: self._check_packed(run, packs_pairs))

    def _check_teacher(self, distill: DistillConfig, run: PlannedRun) -> None:
        teacher = distill.locate(fetch_weights=False)
        length, is_packed = run.sequence_length, run.is_packed
        check_teacher_config(distill, teacher, run.model, self.config, length, is_packed=is_packed)

    def _check_packed(self, run: PlannedRun, packs_pairs: bool) -> None:
        if packs_pairs:
            check_shared_prompts(self.config, run.model.attention, run.sequence_length)
        else:
            check_packing(self.config, run.model.attention)
