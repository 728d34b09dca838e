"""Runs the batches of an evaluation on all ranks, and records each in the run directory as soon as it is computed."""

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location, model_digests
from fsdp_shard.distributed import Communicator, run_on_all
from fsdp_shard.evaluation.batch_log import BatchLog, BatchValues
from fsdp_shard.evaluation.earlier_results import remove_earlier
from fsdp_shard.utils import report_progress, say


def open_batch_log(
    path: Path,
    names: tuple[str, str],
    batches: Sequence[Sequence[int]],
    source: Location,
    weights: dict[str, Any],
    provenance: Mapping[str, Any],
) -> BatchLog:
    """Open the log of a model's finished batches, report them, and remove earlier results if there are none.

    Args:
        path: The file, in the run directory.
        names: The file's names for items and values, as in `BatchLog`.
        batches: The items of each batch.
        source: The model.
        weights: The result of `describe_model` for it.
        provenance: Everything that the figures depend on.

    Raises:
        ConfigError: Another process works in the run directory.
    """
    settings = {name: value for name, value in provenance["settings"].items() if name != "num_resamples"}
    inputs = {
        "weights": model_digests(weights),
        "data": provenance["data"]["digest"],
        "versions": provenance["versions"],
    }
    log = BatchLog(path, inputs | {"settings": settings}, batches, names)
    if log.finished:
        done = f"{len(log.finished):,} of {len(batches):,} batches"
        say(f"{source.path}: continuing after {done}, whose {names[1]} are in {path.parent}")
        return log
    remove_earlier(path.parent)
    if log.changed:
        say(
            f"{source.path}: starting again, as {path.parent} has the {names[1]} of another evaluation "
            f"({', '.join(log.changed)} differ)"
        )
    return log


def run_batches(
    ranks: Communicator,
    log: BatchLog | None,
    batches: Sequence[list[int]],
    load: Callable[[], PreTrainedModel],
    compute: Callable[[PreTrainedModel, Sequence[list[int]]], Generator[BatchValues]],
    unit: str,
    items_per_unit: int = 1,
) -> None:
    """Compute the batches missing from the log, add them, and close the log; a collective.

    Args:
        ranks: The ranks that divide the batches.
        log: The log on rank 0; None on other ranks.
        batches: The items of each batch.
        load: Loads the model; not called if the log has all batches.
        compute: Runs the model on the batches of this rank.
        unit: The unit of the progress bar.
        items_per_unit: Number of items per unit.
    """
    with nullcontext() if log is None else log:
        left = batches[ranks.broadcast_object(0 if log is None else len(log.finished)) :]
        if not left:
            return
        model = run_on_all(ranks, load)
        with (
            closing(compute(model, left[ranks.rank :: ranks.world_size])) as computed,
            closing(_batches_of_all(computed, len(left), ranks)) as of_all,
        ):
            if log is None:
                deque(of_all, maxlen=0)  # rank 0 logs them
            else:
                with report_progress(sum(map(len, batches)) // items_per_unit, "evaluate", unit) as count:
                    count(sum(len(batch.items) for batch in log.finished) // items_per_unit)
                    for batch in of_all:
                        log.append(batch)
                        count(len(batch.items) // items_per_unit)
        del model, computed
        gc.collect()  # a second model needs the memory, and blocks on disk are in reference cycles


def _batches_of_all(mine: Iterator[BatchValues], num_batches: int, ranks: Communicator) -> Generator[BatchValues]:
    """Gather batches that the ranks compute in turn; a collective. Rank 0 receives all, in order."""
    for _ in range(-(-num_batches // ranks.world_size)):
        own = run_on_all(ranks, lambda: next(mine, None))
        yield from (batch for batch in ranks.gather_object(own) if batch is not None)
