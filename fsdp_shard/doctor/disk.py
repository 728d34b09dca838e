"""Checks whether a run can write to its disk as needed, and whether its checkpoints fit.

Test files are removed again.
"""

import fcntl
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

from fsdp_shard import sharding, training
from fsdp_shard.checkpoint import CHECKPOINTS, CheckpointConfig, StepStore
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.doctor.findings import Finding, ok, problem, warning
from fsdp_shard.doctor.run_checks import DataFunction, PlanFunction
from fsdp_shard.utils import check_writable, format_count, format_size, nearest_existing, write_atomically

_TRIAL_BYTES = 32 << 20
_SLOW_BYTES_PER_SECOND = 50e6
_SIDE_FILES = 12  # of a checkpoint: config, tokenizer, manifest, ..., and its directories


def scratch_directory(directory: Path) -> TemporaryDirectory[str]:
    """Make a temporary directory in `directory`."""
    return TemporaryDirectory(prefix=".fsdp-shard-doctor-", dir=directory)


def check_disk(run_dir: str) -> Iterator[Finding]:
    """Check that files can be written, synced, renamed and locked in `run_dir`, and measure how fast."""
    check_writable(run_dir, f"run_dir={run_dir}")
    directory = nearest_existing(Path(run_dir))
    with scratch_directory(directory) as scratch:
        trial, content = Path(scratch) / "trial", os.urandom(_TRIAL_BYTES)  # random, because some file systems compress
        begin = time.perf_counter()
        write_atomically(trial, content, sync=True)
        rate = _TRIAL_BYTES / (time.perf_counter() - begin)
        handle = os.open(trial, os.O_RDWR)  # as for a run's lock
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield warning(
                f"{directory} does not support file locks ({error.strerror}): two runs could use one run_dir at a time."
            )
        finally:
            os.close(handle)
    text = f"{directory}: {format_size(disk_usage(directory).free)} free, written and synced at {format_size(rate)}/s"
    yield ok(text) if rate > _SLOW_BYTES_PER_SECOND else warning(f"{text}: saving checkpoints will be slow")


def check_disk_space(config: FinetuneConfig, get_plan: PlanFunction, get_samples: DataFunction) -> Iterator[Finding]:
    """Check that the checkpoints still to be saved fit on the disk. With train.epochs, the data decides how many."""
    if (plan := get_plan()) is None:  # without a model, which is reported elsewhere
        return
    resumed = training.find_step(config.resume, config.run_dir)
    if training.is_finished(resumed, config.run_dir, config.train):
        yield ok("the run is finished: no checkpoint is left to save")
        return
    data = None if config.train.epochs is None else get_samples()
    if data is None and config.train.epochs is not None:
        return
    train = config.train.for_data(None if data is None else data.samples.train.num_samples)
    # A checkpoint has one replica. Of an adapter only what is trained is saved, which is what has gradients.
    num_owners = sharding.num_shards(config.shard, len(plan.per_rank)) * config.shard.tensor_parallel
    replica = plan.per_rank[:num_owners]
    is_adapter = isinstance(config.adapter, training.LoraConfig)
    weights = sum(rank.gradients_bytes if is_adapter else rank.parameters_bytes for rank in replica)
    if average := sum(rank.average_bytes for rank in replica):  # ema/, including a model's frozen parameters
        weights += average + (
            0 if is_adapter else sum(rank.parameters_bytes - rank.gradients_bytes for rank in replica)
        )
    optimizer = sum(rank.optimizer_bytes for rank in replica) * config.checkpoint.optimizer
    step = 0 if resumed is None else training.read_trainer(resumed).step
    num_saved = len(StepStore(Path(config.run_dir) / CHECKPOINTS).steps())
    count = max_num_checkpoints(train, config.checkpoint, step, num_saved)
    with_optimizer = min(count, (config.checkpoint.keep_optimizer_last or count) + 1)
    needed = count * weights + with_optimizer * optimizer
    directory = nearest_existing(Path(config.run_dir))
    free = disk_usage(directory).free
    more = " more" if num_saved else ""
    number = f"one{more} checkpoint" if count == 1 else f"up to {count:,}{more} checkpoints at a time"
    text = f"{number} of {format_size(weights + optimizer)}: {format_size(needed)} needed, {format_size(free)} free"
    if needed <= free:
        yield ok(text)
    else:
        yield problem(f"{text}. Set checkpoint.keep_last=N or a larger checkpoint.every, or give another run_dir.")
    # Each rank of a replica writes what it owns; unsharded, all ranks divide the writing.
    num_writers = len(replica) if config.shard.is_sharded else len(plan.per_rank)
    num_files = 1 if config.checkpoint.layout == "gathered" else num_writers
    yield from _file_limits(directory, count, max(weights, optimizer) // num_files, num_writers)


def _file_limits(directory: Path, num_checkpoints: int, largest_bytes: int, num_ranks: int) -> Iterator[Finding]:
    """Find whether checkpoints exceed the file limits of the file system or of this user.

    Args:
        directory: A directory on the file system.
        num_checkpoints: Number of checkpoints that coexist.
        largest_bytes: Approximate size of a checkpoint's largest file.
        num_ranks: Number of ranks that write one file each.
    """
    state, needed = os.statvfs(directory), num_checkpoints * (_SIDE_FILES + 2 * num_ranks)
    if state.f_files and state.f_favail < needed:  # 0: the file system does not count them
        yield problem(
            f"{directory}: only {format_count(state.f_favail, 'file')} can be made (inodes), and checkpoints need "
            f"about {needed:,}. Remove files, set checkpoint.keep_last=N, or give another run_dir."
        )
    if resource.RLIM_INFINITY != (limit := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) < largest_bytes:
        yield problem(
            f"a file may have at most {format_size(limit)} (ulimit -f), and a checkpoint has one of "
            f"{format_size(largest_bytes)}; `ulimit -f unlimited` removes the limit."
        )


def max_num_checkpoints(
    train: training.TrainConfig, config: CheckpointConfig, step: int = 0, num_saved: int = 0
) -> int:
    """Return how many checkpoints a run adds to its directory at most: kept ones, the best, and the one being written.

    Args:
        train: Training settings, with a known number of steps.
        config: Checkpoint settings.
        step: The step that the run resumes from.
        num_saved: Number of checkpoints in the run directory so far.
    """
    every = config.every
    before_last = max(0, (train.num_steps - 1) // every - step // every) if every else 0
    best = 1 if train.eval_every and config.save_best else 0
    added = before_last + 1 + best
    if config.keep_last is None:
        return added
    kept_forever = (train.num_steps - 1) // math.lcm(every, config.keep_every) if every and config.keep_every else 0
    at_a_time = kept_forever + config.keep_last + 1 + best
    return min(added, max(1, at_a_time - num_saved))  # an old one is deleted only after the next is complete
