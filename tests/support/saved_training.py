"""The tiny Llama trained and saved: behind the training as a run saves it, and one step in both layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_shard.checkpoint import (
    CheckpointConfig,
    StepContent,
    StepStore,
    load_shards,
    locate,
    open_checkpoint,
    optimizer_shards,
    save_step,
)
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import ModelConfig, tied_names
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import (
    FinetuneSaver,
    LoadedModel,
    LoadFigures,
    RunContent,
    RunLock,
    TrainerState,
    collect_model_files,
)
from tests.support.sharded import WRAPPERS, sharded
from tests.support.tiny import llama, token_batch


class Training:
    """A tiny model that is trained and saved; `told` is what a user would see."""

    def __init__(
        self,
        context: DistributedContext,
        run_dir: Path,
        wrapper: str = "fsdp2",
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        self.context, self.told, self.store = context, list[str](), StepStore(run_dir / "checkpoints")
        self.model = sharded(WRAPPERS[wrapper](param_dtype="float32"), context)
        self.optimizer = optimizer(self.model.module.train().parameters(), lr=1e-2)
        self.state = TrainerState(0, "none")
        loaded = LoadedModel(
            model=self.model, num_params=0, num_blocks=0, aliases=tied_names(llama()), figures=LoadFigures(0, 0, 0, 0)
        )
        config = CheckpointConfig(**settings)
        beside = {"config.json": b"{}"}
        content = RunContent(loaded, self.optimizer, None, beside)
        self.saver: FinetuneSaver = FinetuneSaver(str(run_dir), config, context, content, self, RunLock())

    def note(self, lines: str) -> None:
        """Keep what a user would be told."""
        self.told.append(lines)

    def warn(self, lines: str) -> None:
        """Keep what a user would be warned of."""
        self.told.append(lines)

    def saved(self, directory: Path) -> None:
        """Keep that a checkpoint is there."""
        self.told.append(f"saved {directory.name}")

    def step(self) -> None:
        """Train one step."""
        rows = token_batch(self.state.step).chunk(self.context.world_size)[self.context.rank]
        self.model.module(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.advance(len(rows), rows.numel(), {}, skipped=False)

    def held(self) -> dict[str, torch.Tensor]:
        """A copy of all weights and optimizer states of this rank."""
        shards = self.model.local_shards()
        states = optimizer_shards(self.optimizer, shards)
        return {name: shard.data.clone() for name, shard in {**shards, **states}.items()}

    def stored(self, step: int) -> dict[str, torch.Tensor]:
        """What `held` is to be after this step is loaded, read over what is held now."""
        shards = self.model.local_shards()
        states = optimizer_shards(self.optimizer, shards)
        with (
            open_checkpoint(self.store.path(step)) as weights,
            open_checkpoint(self.store.path(step) / "optimizer") as moments,
        ):
            load_shards(weights, shards)
            load_shards(moments, states)
        return self.held()


def train_and_save(context: DistributedContext, config: ShardConfig, root: Path, model_dir: Path) -> dict[str, Any]:
    """One step, saved in both layouts; what this rank then holds."""
    model = sharded(config, context)
    optimizer = torch.optim.AdamW(model.module.train().parameters(), lr=1e-2)
    rows = token_batch(0).chunk(context.world_size)[context.rank]
    model.module(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shards = model.local_shards()
    state = StepContent(
        shards,
        tied_names(llama()),
        optimizer_shards(optimizer, shards),
        collect_model_files(locate(model_dir), ModelConfig(dtype="float32"), DataConfig()),
    )
    for layout in ("sharded", "gathered"):
        size = 40_000 if layout == "gathered" else None
        save_step(context, StepStore(root / layout), 1, state, layout=layout, max_shard_bytes=size)
    return {"shards": {name: (s.start, s.data.clone(), s.writes) for name, s in shards.items()}}
