"""A recipe as a user would write one: finetune's settings and one more, `act`, which says what each rank does."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp_shard.cli import recipe
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.errors import DataError, Interrupted, LossError
from fsdp_shard.utils import setting


@dataclass
class OwnConfig(FinetuneConfig):
    """Try what a rank can do."""

    act: str = setting("write", "What to do.", choices=("write", "data", "loss", "bug", "die", "wait", "save", "fill"))


def check(config: OwnConfig) -> None:
    """Refuse text that is not there."""
    if not Path(config.data.path).is_file():
        raise DataError(f"data.path={config.data.path}: there is no such file.")


@recipe(OwnConfig, check=check)
def main(config: OwnConfig) -> None:
    """Leave a file with this rank's number and the run's directory, then act."""
    import torch

    from fsdp_shard.distributed import init_distributed

    with init_distributed(config.launch.device, timeout_seconds=60) as context:
        directories = context.all_gather_object(config.run_dir)
        assert len(set(directories)) == 1, directories
        rank = context.rank
        (Path(config.run_dir) / f"rank-{rank}").write_text(f"{rank} of {context.world_size}")
        last = rank == context.world_size - 1
        if config.act == "data" and last:
            raise DataError("text.txt has no rows on this rank.")
        if config.act == "loss":
            raise LossError("The loss became NaN.")
        if config.act == "bug" and last:
            raise KeyError("nonsense")
        if config.act == "fill" and last:
            torch.empty(1 << 50)  # no machine has it
        if config.act == "die" and last:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.act == "wait":
            time.sleep(60)
        if config.act == "save":
            _save_when_told(Path(config.run_dir), rank)
        context.barrier()


def _save_when_told(run_dir: Path, rank: int) -> None:
    """As a training loop does: a signal only leaves a note, and the work is saved before the rank ends."""
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.append(number))
    (run_dir / f"ready-{rank}").write_text("")
    while not told:
        time.sleep(0.01)
    time.sleep(0.3)
    (run_dir / f"saved-{rank}").write_text(f"{len(told)} signal")
    raise Interrupted(f"Stopped after step 3, which is saved in {run_dir}.", signal_number=told[0])


if __name__ == "__main__":
    main()
