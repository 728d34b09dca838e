"""Checks the run itself: its directory, its memory, and its settings as `finetune` checks them.

Only the model's config and the headers of its weights are read. Text is tokenized into the cache that the run will
use.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fsdp_shard import inference, models, training
from fsdp_shard.checkpoint import Location, RemoteStore
from fsdp_shard.config import FinetuneConfig, refuse_nested
from fsdp_shard.data import Samples, Task, TokenizedData, open_samples, tokenize_all
from fsdp_shard.distributed import gpu_number, num_local_ranks, uses_gpus, world_sizes
from fsdp_shard.doctor.findings import Finding, noted, ok, problem, skipped, warning
from fsdp_shard.planning import (
    HostMemory,
    MemoryPlan,
    PlannedRun,
    Planner,
    advice_lines,
    advise,
    chosen_settings,
    plan_memory,
    switched_off,
)
from fsdp_shard.utils import check as check_sections, format_count, format_number, format_size

_MAX_PLANS = 12  # of each kind, because a dry run should take seconds


@dataclass(frozen=True)
class PreparedData:
    """A run's data as its ranks would open it.

    Attributes:
        samples: The training and held-out samples.
        tokenized: The tokenized files behind them.
        task: The training task.
        tokenizer: The tokenizer.
    """

    samples: Samples
    tokenized: TokenizedData
    task: Task
    tokenizer: PreTrainedTokenizerBase


PlanFunction = Callable[[], MemoryPlan | None]
DataFunction = Callable[[], PreparedData | None]


def check_run_directory(config: FinetuneConfig) -> Iterator[Finding]:
    """Check that the run may use its directory, and find its starting point. Fetches nothing from a remote store."""
    run_dir, train = config.run_dir, config.train
    if (other := training.holder(Path(run_dir))) is not None:
        yield problem(f"run_dir={run_dir} is in use by another run ({other}); wait for it, or give another run_dir.")
    refuse_nested(config)
    step = _resumed_step(config)
    if step is None:
        yield ok(f"run_dir={run_dir}: a new run starts")
        return
    if config.model.path and (note := training.check_base_model(config, step)) is not None:
        yield warning(note)
    if training.is_finished(step, run_dir, train):
        yield warning(training.describe_finished(config, step))
    else:
        training.check_optimizer(step, config.optim)
        current = training.read_trainer(step).step
        end = train.num_steps if train.epochs is None else f"train.epochs={train.epochs:g}"
        yield ok(f"run_dir={run_dir}: the run resumes from {step}, at step {current} of {end}")


def check_remote(url: str | None) -> Iterator[Finding]:
    """Check that the store of checkpoint.remote answers, if one is set."""
    if url is None:
        return
    latest = RemoteStore(url).latest()
    yield ok(f"{url} answers and has {'no checkpoint' if latest is None else f'checkpoints up to step {latest}'}")


def check_settings(config: FinetuneConfig, check: Callable[[FinetuneConfig], None]) -> Iterator[Finding]:
    """Check the settings with `check`, as finetune does before ranks start, without a remote store."""
    if missing := missing_settings(config):
        yield skipped(missing)
        return
    check(replace(config, checkpoint=replace(config.checkpoint, remote=None)))
    text = config.data.path or "the mixture"
    sizes = world_sizes(config.launch)
    ranks = f"{sizes[0]} to {sizes[-1]} ranks" if len(sizes) > 1 else format_count(sizes[0], "rank")
    yield ok(f"finetune accepts {config.model.path} and {text} on {ranks}")
    yield from map(noted, training.describe_lengths(config.data, _context_length(config)))


def plan_run(config: FinetuneConfig) -> MemoryPlan | None:
    """Plan the memory of each rank, including blocks and parameters.

    Args:
        config: Settings of the run.

    Returns:
        The plan; None if there is no model.
    """
    if not config.model.path:
        return None
    return plan_memory(model_config(config), _planned_run(config))


def _planned_run(config: FinetuneConfig) -> PlannedRun:
    length, num_ranks = _settle_length(config), min(world_sizes(config.launch))
    resumes = _resumed_step(config) is not None
    return PlannedRun.of(config, length, num_ranks, on_gpu=uses_gpus(config.launch), resumes=resumes)


def check_memory(config: FinetuneConfig, get_plan: PlanFunction) -> Iterator[Finding]:
    """Check that each rank on this machine has the memory that the plan requires."""
    plan = get_plan()
    if plan is None:
        yield skipped("model.path=...")
        return
    size = f"{format_number(plan.num_params)} parameters in {format_count(len(plan.blocks), 'block')}"
    what = f"{plan.model_class}, {size}"
    if plan.peak_bytes is None:
        yield warning(f"{what}; the activations of its forward pass could not be measured ({plan.problem})")
        return
    on_gpu, num_ranks, free_host = uses_gpus(config.launch), num_local_ranks(config.launch), inference.free_cpu_bytes()
    free = (
        min(torch.cuda.mem_get_info(gpu)[0] for gpu in {gpu_number(rank) for rank in range(num_ranks)})
        if on_gpu
        else free_host // num_ranks
    )
    text = f"{what}: up to {format_size(plan.needed_bytes)} per rank, {format_size(free)} free"
    if plan.fits(free):
        yield ok(text)
    else:
        yield problem(f"{text}. {_what_would_fit(config, free, on_gpu=on_gpu)}")
    host = HostMemory(free_host, num_ranks)
    if not host.fits(plan):
        yield problem(
            f"the ranks need up to {format_size(host.needed_by(plan))} of host memory, {format_size(free_host)} free; "
            f"checkpoint.asynchronous=false, shard.cpu_offload=false and shard.activation_offload=false need none."
        )


def _what_would_fit(config: FinetuneConfig, free_bytes: int, *, on_gpu: bool) -> str:
    """Settings with which each rank needs at most `free_bytes`; additional ranks would share this machine."""

    def check_together(run: PlannedRun) -> None:
        sections = {name: getattr(run, name) for name in ("model", "shard", "train", "optim", "adapter", "objective")}
        check_sections(replace(config, **sections))

    host = HostMemory(inference.free_cpu_bytes(), num_local_ranks(config.launch))
    planner = Planner(
        model_config(config),
        on_gpu=on_gpu,
        check_together=check_together,
        max_plans=_MAX_PLANS,
        host=lambda run: host,
        nodes=(config.launch.min_nodes, config.launch.max_nodes),
    )
    given, starts = chosen_settings(config), _resumed_step(config) is None
    stays = {"launch.ranks", *switched_off(config)}
    found = advise(planner, _planned_run(config), free_bytes, given, fixed=stays, trains_other=starts)
    return f"{' '.join(' '.join(advice_lines(found)).split())} `fsdp-shard plan` shows what needs the memory."


def prepare_samples(config: FinetuneConfig) -> PreparedData | None:
    """Tokenize and open the data; None if the settings lack a model or data."""
    if missing_settings(config):
        return None
    source = _source(config)
    model_config(config)  # transformers reads it for the tokenizer, whose error would not name it
    tokenizer = models.load_tokenizer(source.tokenizer_directory, config.model.trust_remote_code)
    task = training.data_task(config.model, source, config.objective.samples)
    _settle_length(config)
    tokenized = tokenize_all(config.data, tokenizer, task=task.name)
    samples = open_samples(config.data, tokenized, task, config.seed, lambda: tokenizer)
    return PreparedData(samples, tokenized, task, tokenizer)


def _resumed_step(config: FinetuneConfig) -> Path | None:
    """The step that the run would resume from, if it is on this machine."""
    return training.find_step(config.resume, config.run_dir)


def _source(config: FinetuneConfig) -> Location:
    """The location that the run would load its model from."""
    return training.model_source(config, _resumed_step(config))


def model_config(config: FinetuneConfig) -> PretrainedConfig:
    """Return the config of the model that the run would train."""
    return training.origin_config(config.model, _source(config))


def _context_length(config: FinetuneConfig) -> models.ContextLength:
    return models.load_context_length(_source(config).config_directory, config.model.trust_remote_code)


def _settle_length(config: FinetuneConfig) -> int:
    """Set the sequence length as `finetune` does, whose checks may have failed earlier for another reason."""
    return config.data.sequence_length or training.settle_run_length(
        config.data, _resumed_step(config), _context_length(config)
    )


def missing_settings(config: FinetuneConfig) -> str:
    """Return the settings missing for checks of model and data, as text; empty if none is missing."""
    given = {"model.path=...": config.model.path, "data.path=...": config.data.path or config.data.mixture}
    return " ".join(name for name, value in given.items() if not value)
