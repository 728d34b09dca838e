"""EVA (Paischer et al., 2024): initializes A with the principal directions of its layer's inputs, and B with zeros.

Follows peft's `initialize_lora_eva_weights` with rho = 1, where each layer keeps its rank. peft's incremental PCA reads
the inputs at predicted tokens, one micro-batch after the other in training order, until the directions of all layers
have converged. A micro-batch is one PCA step on any number of ranks, so the result does not depend on that number. One
rank, the owner, does the steps of a layer. The other ranks send it their inputs in turn as the layer runs, so it holds
the inputs of one micro-batch at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_shard.data import LABELED, Dataset
from fsdp_shard.distributed import DistributedContext, run_on_all
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.sharding import ShardedModel, clean_fqns, transformers_model
from fsdp_shard.training.batch_loader import read_batch, to_device
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.held_out.evaluator import eval_mode
from fsdp_shard.training.loss.device_batch import DeviceBatch
from fsdp_shard.training.loss.forward_loss import forward_rows
from fsdp_shard.training.loss.log_probs import LabelLogProbs
from fsdp_shard.training.peft.disable_adapters import adapters_disabled
from fsdp_shard.training.stop_signal import StopSignal, raise_if_stopped
from fsdp_shard.utils import format_count, report_progress

SIMILARITY = 0.99  # peft's tau: a direction has converged if its cosine with the previous step is at least this
MAX_STEPS = 512  # micro-batches; peft has no limit
_SEED = 42  # as in peft, for the randomized decomposition

Seen = Callable[[str, torch.Tensor], None]


def fill_eva(
    config: FinetuneSettings,
    model: ShardedModel,
    layers: Sequence[str],
    dataset: Dataset,
    context: DistributedContext,
    stop: StopSignal,
) -> str:
    """Fill the A matrices of a new adapter; a collective.

    Args:
        config: The settings of `finetune`; a step of the PCA is a micro-batch.
        model: The model with its weights.
        layers: FQNs of the layers.
        dataset: The samples, in training order; rewound afterwards.
        context: The ranks.
        stop: A signal that ends the pass.

    Returns:
        A summary to print.

    Raises:
        ConfigError, CheckpointError: On all ranks: the inputs of a layer have no directions to find.
        Interrupted: On all ranks: a signal came.
    """
    module, size = model.module, config.train.micro_batch_size
    num_directions = {fqn: shard.shape[0] for fqn, shard in _matrices(model, layers).items()}
    batches = _batches(module, dataset, size, context, is_labeled=config.objective.samples == LABELED)
    is_compiled = config.shard.compile is not False
    eager: Any = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()  # graphs have no hooks
    with eval_mode(model), adapters_disabled(module), eager:
        first = next(batches)
        leaders = _first_with_same_input(module, layers, first, context)
        found = _Directions({fqn: num_directions[fqn] for fqn in dict.fromkeys(leaders.values())}, context)
        title, unit = "principal directions of the inputs of layers", "micro-batches at most"
        with report_progress(MAX_STEPS, title, unit, enabled=context.is_main) as count:
            batch: DeviceBatch | None = first
            while batch is not None:
                found.begin(batch.label_positions)
                run_watching(module, batch, found.moving, found.step)
                count(found.end())
                raise_if_stopped(stop, context, "the initial values of adapter.init=eva")
                batch = next(batches) if found.moving and found.num_steps < MAX_STEPS else None
    dataset.load_state_dict(None)  # a stream would continue where reading stopped
    shards = _matrices(model, layers)
    for leader in dict.fromkeys(leaders.values()):  # one whole matrix at a time
        whole = found.everywhere(leader)
        for shard in (shards[fqn] for fqn in layers if leaders[fqn] == leader):
            shard.fill(whole)
    moving = f"; those of {format_count(len(found.moving), 'layer')} have not converged" if found.moving else ""
    done = f"principal directions of the inputs of {format_count(len(layers), 'layer')}"
    return f"EVA: {done}, from {format_count(found.num_used * size, 'sample')}{moving}"


def _matrices(model: ShardedModel, layers: Sequence[str]) -> dict[str, Any]:
    shards = model.local_shards()
    return {fqn: shards[f"{fqn}.lora_A.default.weight"] for fqn in layers}


def _batches(
    module: nn.Module, dataset: Dataset, micro_batch_size: int, context: DistributedContext, *, is_labeled: bool
) -> Iterator[DeviceBatch]:
    """The micro-batches of this rank, in training order; each is a collective.

    Of labeled answers, only the trained ones, not the prompts with other answers.
    """
    first = 0

    def read(first: int) -> DeviceBatch:
        batch = read_batch(dataset, np.arange(first, first + micro_batch_size), module)
        found = to_device(batch, context.device)
        return found.of_row(0) if is_labeled else found

    while True:
        total = micro_batch_size * context.num_data_ranks
        dataset.prepare(first, total)
        yield run_on_all(context, partial(read, first + micro_batch_size * context.data_rank))
        first += total


def run_watching(module: nn.Module, batch: DeviceBatch, layers: Sequence[str], seen: Seen) -> None:
    """Call `seen` with the FQN and the input of each of `layers` in a forward pass.

    No logits are computed if the output head allows it.
    """
    nothing = batch.label_positions[:0]
    with _record_inputs(module, layers, seen):
        forward_rows(module, replace(batch, label_positions=nothing), LabelLogProbs(nothing))


@contextmanager
def _record_inputs(module: nn.Module, layers: Sequence[str], seen: Seen) -> Iterator[None]:
    """Call `seen` with the FQN and the input of each of `layers` as it runs."""
    wanted, inside = set(layers), transformers_model(module) or module
    clean_fqn = clean_fqns(inside)
    with ExitStack() as hooks:
        for name, layer in inside.named_modules():
            if (fqn := clean_fqn(name)) in wanted:

                def hook(layer: nn.Module, args: tuple[Any, ...], fqn: str = fqn) -> None:
                    seen(fqn, args[0])

                hooks.callback(layer.register_forward_pre_hook(hook).remove)
        yield


def _first_with_same_input(
    module: nn.Module, layers: Sequence[str], batch: DeviceBatch, context: DistributedContext
) -> dict[str, str]:
    """Each layer -> the first layer that has the same input, such as `q_proj` for `k_proj`; a collective.

    Raises:
        ConfigError: Not all layers run once with all tokens on all ranks; experts do not.
    """
    order: dict[str, str] = {}
    last: tuple[str, torch.Tensor] | None = None
    wrong: list[str] = []

    def seen(fqn: str, inputs: torch.Tensor) -> None:
        nonlocal last
        if last is None or inputs is not last[1]:
            last = (fqn, inputs)
        if fqn in order or inputs[..., 0].numel() != batch.labels.numel():
            wrong.append(fqn)
        order[fqn] = last[0]

    run_watching(module, batch, layers, seen)
    wrong += [fqn for fqn in layers if fqn not in order]
    if everywhere := [fqn for of_rank in context.all_gather_object(wrong) for fqn in of_rank]:
        raise ConfigError(
            f"adapter.init=eva is for layers that run once in a forward pass, with the inputs of all tokens, and "
            f"{everywhere[0]} does not; set adapter.target_modules to others, or adapter.init=default."
        )
    return order


def new_pca(num_directions: int) -> Any:
    """peft's incremental PCA with this number of directions."""
    from peft.utils.incremental_pca import IncrementalPCA

    return IncrementalPCA(n_components=num_directions, lowrank=True, lowrank_seed=_SEED)


class _Directions:
    """The incremental PCA of each layer's inputs, on the layer's owner.

    Args:
        num_directions: The number of directions of each layer.
        context: The ranks.

    Attributes:
        moving: Layers whose directions have not converged yet, equal on all ranks.
        num_steps: Micro-batches so far, on all ranks together; at most `MAX_STEPS`.
        num_used: Micro-batches until the last layer converged.
    """

    def __init__(self, num_directions: Mapping[str, int], context: DistributedContext) -> None:
        self.moving = list(num_directions)
        self.num_steps, self.num_used = 0, 0
        self._context, self._num_directions = context, num_directions
        self._owners = {fqn: number % context.world_size for number, fqn in enumerate(num_directions)}
        self._own = {
            fqn: new_pca(number) for fqn, number in num_directions.items() if self._owners[fqn] == context.rank
        }
        self._still: dict[str, int] = {}  # of this rank's layers, with the number of the step
        self._not_finite: list[str] = []
        self._label_positions = torch.empty(0, dtype=torch.int64)
        self._lengths: list[int] = []

    def begin(self, label_positions: torch.Tensor) -> None:
        """Begin a micro-batch on each rank; `label_positions` [num_predictions] are those of this rank's."""
        self._label_positions = label_positions
        self._lengths = self._context.all_gather_object(len(label_positions))

    def step(self, fqn: str, inputs: torch.Tensor) -> None:
        """Process the inputs [..., num_features] of a layer at all tokens; a collective.

        A micro-batch with fewer rows than directions is skipped, as in peft.
        """
        inputs, owner = inputs.flatten(0, -2), self._owners[fqn]
        for source, num_rows in enumerate(self._lengths[: MAX_STEPS - self.num_steps]):
            if num_rows < self._num_directions[fqn]:
                continue
            positions = self._label_positions if source == self._context.rank else self._label_positions[:0]
            rows = self._context.send_rows(inputs[positions].float(), source, owner, num_rows)
            if owner == self._context.rank and fqn not in self._still:
                self._fit(fqn, self.num_steps + source + 1, rows)
            del rows  # before the next rows arrive

    def _fit(self, fqn: str, number: int, rows: torch.Tensor) -> None:
        """Do one PCA step with the rows of a micro-batch, given its number."""
        if not bool(rows.isfinite().all()):
            self._not_finite.append(fqn)
            return
        pca = self._own[fqn]
        before = getattr(pca, "components_", None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="CUDA reports that you have")  # it seeds all of them
            pca.partial_fit(rows)
        if before is not None and bool((F.cosine_similarity(pca.components_, before) >= SIMILARITY).all()):
            self._still[fqn] = number

    def end(self) -> int:
        """End the micro-batch of each rank; a collective.

        Returns:
            The number of micro-batches used.

        Raises:
            CheckpointError: On all ranks: the inputs of a layer are not finite.
        """
        taken = len(self._lengths[: MAX_STEPS - self.num_steps])
        self.num_steps += taken
        still, used, not_finite = set[str](), 0, list[str]()
        for of_rank, wrong in self._context.all_gather_object((self._still, self._not_finite)):
            still |= of_rank.keys()
            used = max(used, *of_rank.values(), 0)
            not_finite += wrong
        if not_finite:
            raise CheckpointError(
                f"adapter.init=eva: the inputs of {not_finite[0]} are not finite; the weights are not usable in the "
                f"dtype of the computation."
            )
        self.moving = [fqn for fqn in self.moving if fqn not in still]
        self.num_used = self.num_steps if self.moving else used
        return taken

    def everywhere(self, fqn: str) -> torch.Tensor:
        """The directions of a layer on all ranks, float32 [num_directions, num_features] on the CPU; a collective.

        Raises:
            ConfigError: On all ranks: no micro-batch had at least as many rows as the layer has directions.
        """
        own = getattr(self._own.get(fqn), "components_", None)
        found = self._context.broadcast_object(None if own is None else own.float().cpu(), self._owners[fqn])
        if found is None:
            raise ConfigError(
                f"adapter.init=eva needs micro-batches with at least adapter.rank={self._num_directions[fqn]} tokens "
                f"to predict, and the first {self.num_steps} have fewer; set a larger train.micro_batch_size, or "
                f"adapter.init=default."
            )
        assert isinstance(found, torch.Tensor)
        return found
