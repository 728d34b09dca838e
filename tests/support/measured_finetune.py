"""A whole run of `finetune` on real ranks, as its recipe has it, and the bytes of tensors in each of its phases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.training import (
    HeldOutEvaluator,
    add_reference,
    build_optimizer,
    build_unfilled,
    finish_run,
    open_data,
    open_log,
    open_run,
    open_saver,
    start_run,
    train,
)
from tests.support.live_bytes import LiveBytes, step_phases
from tests.support.ranks import on_ranks


@dataclass(frozen=True)
class RunBytes:
    """Bytes of tensors on one rank of a run.

    Attributes:
        peak: The most that were live at one time, after the model was loaded.
        by_phase: The same in each phase: load, resume or eva, forward, loss, backward, optimizer, evaluation,
            completions, save.
        by_maker: What was live at the peak, by what made it, the largest first.
    """

    peak: int
    by_phase: dict[str, int]
    by_maker: dict[str, int]


def measure_finetune(config: FinetuneConfig, num_ranks: int, *, explains: bool = False) -> list[RunBytes]:
    """Run `finetune` to its end, or from where it is to its end; what each rank had in memory."""
    return on_ranks(num_ranks, _measure, config, explains)


def run_finetune(config: FinetuneConfig, num_ranks: int) -> None:
    """The same without counting, which takes longer."""
    on_ranks(num_ranks, _run, config, LiveBytes())


def _measure(context: DistributedContext, config: FinetuneConfig, explains: bool) -> RunBytes:
    with LiveBytes(explains=explains) as live:
        loading = _run(context, config, live)
    return RunBytes(live.most, loading | live.most_by_phase, dict(Counter(live.by_maker).most_common(40)))


def _run(context: DistributedContext, config: FinetuneConfig, live: LiveBytes) -> dict[str, int]:
    """Run the stages of the recipe; the peaks until the model is loaded, which `live` forgets."""
    with start_run(config) as start:
        data = add_reference(config, start, open_data(config, start))
        with build_unfilled(config, start) as unfilled:
            loaded = unfilled.load(config.shard.shard(unfilled.module, start.context), config.seed)
        optimizer = build_optimizer(config.optim, loaded.model, start.context, loaded.adapter)
        by_phase = dict(live.most_by_phase)
        live.reset()
        live.phase = "resume" if start.resume_from is not None else "eva"
        run = open_run(config, start, loaded, optimizer, data.train)
        live.phase = "start"
        complete = run.functions.samples

        def completions(model: Any) -> Any:
            assert complete is not None
            live.phase = "completions"
            found = complete(model)
            live.phase = "evaluation"
            return found

        run.functions.samples = None if complete is None else completions
        with (
            open_log(config, run, start, loaded, data.notes) as log,
            open_saver(config, run, start, loaded, log) as saver,
            step_phases(live, run),
        ):
            evaluator = HeldOutEvaluator(run, data.held_out, log)
            live.phase = "evaluation"
            evaluator.before_training()
            live.phase = "start"
            for report in train(run):
                live.phase = "end"
                log.step(report)
                live.phase = "evaluation"
                evaluator.after_step()
                live.phase = "save"
                if run.is_over or saver.is_due(run.state, run.config.num_steps):
                    saver.save(run.state)
                live.phase = "start"
            live.phase = "save"
            saver.finish()
            finish_run(config, run, loaded, log)
    return by_phase
