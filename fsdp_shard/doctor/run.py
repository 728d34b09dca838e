"""What is trained on what: the settings as `finetune` checks them, memory, room for checkpoints, and the data.

Nothing is loaded of the model but its config; text is tokenized into the cache that the run will take it from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint import CheckpointConfig, locate
from fsdp_shard.data import Streamed, open_samples, tokenize_all
from fsdp_shard.distributed import LaunchConfig, uses_gpus, world_sizes
from fsdp_shard.doctor.findings import Finding, ok, problem, skipped, warning
from fsdp_shard.doctor.storage import there
from fsdp_shard.inference import free_cpu_bytes
from fsdp_shard.models import load_config, load_tokenizer
from fsdp_shard.planning import MemoryPlan, PlannedRun, plan_memory
from fsdp_shard.training import LoraConfig, TrainConfig, data_task
from fsdp_shard.utils import format_size

if TYPE_CHECKING:
    from fsdp_shard.config import FinetuneConfig


def settings(config: FinetuneConfig, check: Callable[[FinetuneConfig], None] | None) -> Iterator[Finding]:
    """What finetune itself finds with `check` before any rank starts; nothing is fetched from a remote store."""
    if missing := _not_given(config):
        yield skipped(missing)
        return
    assert check is not None, "the recipe has one"
    check(replace(config, checkpoint=replace(config.checkpoint, remote=None)))
    yield ok(f"finetune takes {config.model.path} and {config.data.path or 'the mixture'} on {_ranks(config.launch)}")


def plan_of(config: FinetuneConfig) -> MemoryPlan | None:
    """The memory of each rank, and blocks and parameters; None where there is no model, or it cannot be planned for."""
    if not config.model.path or config.shard.tensor_parallel > 1 or config.shard.expert_parallel > 1:
        return None
    run = PlannedRun(
        config.model,
        config.shard,
        config.train,
        config.optim,
        config.data.sequence_length,
        min(world_sizes(config.launch)),
        config.adapter,
        config.checkpoint.asynchronous,
    )
    source = locate(config.model.path, config.model.gguf_file)
    return plan_memory(load_config(source, config.model.trust_remote_code), run)


def memory(plan: MemoryPlan | None, config: FinetuneConfig) -> Iterator[Finding]:
    """Whether each rank of this machine has the memory that the plan says it needs."""
    if plan is None:
        divided = "memory is not counted where layers or experts are divided; watch memory_bytes in metrics.jsonl"
        yield warning(divided) if config.model.path else skipped("model.path=...")
        return
    what = f"{plan.model_class}, {plan.num_params / 1e6:,.1f} M parameters in {len(plan.blocks)} blocks"
    if plan.peak_bytes is None:
        yield warning(f"{what}; what its forward pass keeps could not be measured ({plan.problem})")
        return
    on_gpu, num_ranks = uses_gpus(config.launch), config.launch.ranks
    free = _free_gpu_bytes(num_ranks) if on_gpu else free_cpu_bytes() // num_ranks
    text = f"{what}: up to {format_size(plan.peak_bytes)} a rank, {format_size(free)} are free"
    if plan.peak_bytes <= free:
        yield ok(text)
    else:
        yield problem(
            f"{text}. What helps: more ranks, a smaller train.micro_batch_size, shard.activation_checkpointing=true"
            f"{', shard.cpu_offload=true' if on_gpu else ''}; `fsdp-shard plan` tells what takes it."
        )
    in_host_memory = max(rank.staging_bytes + rank.host_bytes for rank in plan.per_rank) * num_ranks
    if on_gpu and in_host_memory > (free := free_cpu_bytes()):
        yield problem(
            f"the ranks keep up to {format_size(in_host_memory)} in host memory, {format_size(free)} are free; "
            f"checkpoint.asynchronous=false and shard.cpu_offload=false need none."
        )


def room(plan: MemoryPlan | None, config: FinetuneConfig) -> Iterator[Finding]:
    """Whether all checkpoints that will be there at one time fit on the disk."""
    if plan is None:
        return
    num_shards = config.shard.num_shards(len(plan.per_rank))
    of_weights, of_optimizer = _step_bytes(plan, num_shards, isinstance(config.adapter, LoraConfig))
    of_optimizer *= config.checkpoint.optimizer
    count = num_at_once(config.train, config.checkpoint)
    with_optimizer = min(count, (config.checkpoint.keep_optimizer_last or count) + 1)
    needed, free = count * of_weights + with_optimizer * of_optimizer, disk_usage(there(Path(config.run_dir))).free
    number = "one checkpoint" if count == 1 else f"up to {count:,} checkpoints at a time"
    text = (
        f"{number} of {format_size(of_weights + of_optimizer)}: {format_size(needed)}, and {format_size(free)} are free"
    )
    if needed <= free:
        yield ok(text)
    else:
        yield problem(f"{text}. Set checkpoint.keep_last=N or a larger checkpoint.every, or give another run_dir.")


def num_at_once(train: TrainConfig, config: CheckpointConfig) -> int:
    """The most checkpoints that lie in the run's directory at a time: kept ones, the best, and one on its way."""
    before_last = (train.steps - 1) // config.every if config.every else 0
    best = 1 if train.eval_every and config.save_best else 0
    if config.keep_last is None:
        return before_last + 1 + best
    for_good = (
        (train.steps - 1) // math.lcm(config.every, config.keep_every) if config.every and config.keep_every else 0
    )
    return min(before_last + 1, for_good + config.keep_last + 1) + best


def data(config: FinetuneConfig) -> Iterator[Finding]:
    """What becomes of the text, and how often each sample will be trained."""
    if missing := _not_given(config):
        yield skipped(missing)
        return
    source = locate(config.model.path, config.model.gguf_file)
    tokenizer, task = load_tokenizer(source, config.model.trust_remote_code), data_task(config.model, source)
    tokenized = tokenize_all(config.data, tokenizer, task=task.name)
    samples = open_samples(config.data, tokenized, task, config.seed, lambda: tokenizer)
    yield from map(ok, samples.notes)
    wanted = config.train.steps * config.train.global_batch_size
    if isinstance(samples.train, Streamed):
        yield ok(f"{config.train.steps:,} steps take {wanted:,} samples of the stream")
    else:
        epochs = wanted / len(samples.train)
        yield ok(f"{config.train.steps:,} steps take {wanted:,} samples of {len(samples.train):,}: {epochs:.3g} epochs")


def _not_given(config: FinetuneConfig) -> str:
    given = {"model.path=...": config.model.path, "data.path=...": config.data.path or config.data.mixture}
    return " ".join(name for name, value in given.items() if not value)


def _ranks(launch: LaunchConfig) -> str:
    sizes = world_sizes(launch)
    return f"{sizes[0]} rank{'s' if sizes[0] > 1 else ''}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} ranks"


def _free_gpu_bytes(num_ranks: int) -> int:
    import torch

    return min(int(torch.cuda.mem_get_info(ordinal)[0]) for ordinal in range(num_ranks))


def _step_bytes(plan: MemoryPlan, num_shards: int, adapter_only: bool) -> tuple[int, int]:
    """Bytes of weights and of optimizer state in a checkpoint, which has those of one replica once.

    Of an adapter only what is trained is saved, which is what has gradients.
    """
    replica = plan.per_rank[:num_shards]
    weights = sum(rank.gradients_bytes if adapter_only else rank.parameters_bytes for rank in replica)
    return weights, sum(rank.optimizer_bytes for rank in replica)
