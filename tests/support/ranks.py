"""Run a function on real ranks: forked processes that meet over gloo through a file."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

from fsdp_shard.distributed import DistributedContext, LaunchConfig, init_distributed

# Fork, not spawn: the ranks begin with everything imported (1 s instead of 20 s on two cores).
_FORK = multiprocessing.get_context("fork")


@dataclass
class Launched:
    """The least that `launch` takes as a config."""

    run_dir: str
    launch: LaunchConfig
    debug: bool = False
    per_machine: ClassVar[tuple[str, ...]] = ()


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, context: DistributedContext) -> float:
    """One step by this rank's `loss`; the mean of the losses of all ranks."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return context.all_reduce([float(loss.detach())])[0] / context.world_size


class _NotMetError(AssertionError):
    """The ranks did not form a process group, so a rank has not called the function."""


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`function(context, *args)` on each of `world_size` ranks; what each returned, in rank order.

    The first rank that raises ends the others, and its traceback is the test's failure. Now and then a forked rank
    never meets the others, before `function` is called: then all are started once more, with a warning in the summary
    of the tests, and what it hung in is on standard error. What `function` raises is never tried again.
    """
    try:
        return _on_ranks(world_size, function, *args, **options)
    except _NotMetError as error:
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # elsewhere a warning is an error
            warnings.warn(f"started once more: {error}", stacklevel=2)
        return _on_ranks(world_size, function, *args, **options)


def _on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    replicas: int = 1,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    context_parallel: int = 1,
    timeout_seconds: float = 200.0,
    device: str = "cpu",
) -> list[Any]:
    with TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _FORK.Pipe(duplex=False)
            task = (
                rank,
                world_size,
                f"file://{directory}/rendezvous",
                (replicas, tensor_parallel, expert_parallel, context_parallel, device),
                sender,
                function,
                args,
            )
            processes.append(_FORK.Process(target=_rank_main, args=task))  # no daemon: it may have processes of its own
            pipes.append(receiver)
            processes[-1].start()
            sender.close()
        try:
            return _collect(pipes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in values], timeout_seconds)
        assert ready, f"no rank answered within {timeout_seconds} s; rank(s) {sorted(values)} have ended"
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                values[rank], error, has_met = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if error is not None and not has_met and "Wait timeout" in error:
                raise _NotMetError(f"rank {rank} waited for the others\n{error}")
            assert error is None, f"rank {rank} raised\n{error}"
    return [values[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    rendezvous: str,
    mesh: tuple[int, int, int, int, str],
    out: Connection,
    function: Callable[..., Any],
    args: Any,
) -> None:
    replicas, layers, experts, sequences, device = mesh
    gc.freeze()  # what the parent left is never collected here: a process group of its would wait for threads of its
    faulthandler.dump_traceback_later(50, file=2)  # what keeps it from meeting the others
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    has_met = False
    try:
        with init_distributed(
            device,
            replicas,
            timeout_seconds=60,
            rendezvous=rendezvous,
            tensor_parallel=layers,
            expert_parallel=experts,
            context_parallel=sequences,
        ) as context:
            faulthandler.cancel_dump_traceback_later()
            has_met = True
            value = function(context, *args)
            context.barrier()
        answer: tuple[Any, str | None, bool] = (value, None, True)
    except BaseException:
        answer = (None, traceback.format_exc(), has_met)
    out.send_bytes(pickle.dumps(answer))  # plain bytes: a tensor sent as an object would live in this process's memory
    out.close()
