"""Skips identical blocks, and repeats their part of the recording.

Of a run of identical blocks, three run and the others are skipped; the recording repeats the middle one. A model with
126 layers costs as much as one with 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fsdp_shard.planning.step.recording.events import LOSS, POST_FORWARD, PRE_BACKWARD, PRE_FORWARD, Event

_LONGEST_PERIOD = 8
_PERIODS_RUN = 3


@dataclass(frozen=True)
class BlockRun:
    """Blocks whose kinds repeat: `periods` contains their FQNs; the first three periods run."""

    periods: tuple[tuple[str, ...], ...]

    def like(self, fqn: str) -> str:
        """The last block that ran at the position of `fqn` in its period."""
        position = next(period.index(fqn) for period in self.periods if fqn in period)
        return self.periods[_PERIODS_RUN - 1][position]

    @property
    def passed_over(self) -> frozenset[str]:
        return frozenset(fqn for period in self.periods[_PERIODS_RUN:] for fqn in period)


def alike_blocks(model: nn.Module, blocks: Sequence[str], marks: Mapping[str, object]) -> list[BlockRun]:
    """The runs of `blocks` that repeat more than three times with some period; blocks with different `marks` differ."""

    def kind(fqn: str) -> object:
        module = model.get_submodule(fqn)
        params = [(name, tuple(param.shape), param.requires_grad) for name, param in module.named_parameters()]
        return type(module), params, marks.get(fqn), fqn.rpartition(".")[0]

    kinds, runs, first = [kind(fqn) for fqn in blocks], list[BlockRun](), 0
    while first < len(kinds):
        best = max(
            ((period, _repeats(kinds, first, period)) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda found: (found[0] * (found[1] - _PERIODS_RUN), -found[0]),
        )
        period, number = best
        if number <= _PERIODS_RUN:
            first += 1
            continue
        names = [tuple(blocks[first + i * period : first + (i + 1) * period]) for i in range(number)]
        runs.append(BlockRun(tuple(names)))
        first += period * number
    return runs


def attention_kinds(model: PreTrainedModel, blocks: Sequence[str]) -> dict[str, str]:
    """The kind of attention of each of `blocks`, such as full or sliding, whose masks and caches differ."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return dict(zip(blocks, kinds, strict=False))


def _repeats(kinds: Sequence[object], first: int, period: int) -> int:
    pattern = kinds[first : first + period]
    starts = count(first, period)
    same = takewhile(lambda start: len(pattern) == period and kinds[start : start + period] == pattern, starts)
    return sum(1 for start in same if start < len(kinds))


def pass_over(model: nn.Module, fqn: str, run: BlockRun) -> None:
    """Make a block return its input, in the form in which the corresponding executed block returns its output."""
    like, outputs = model.get_submodule(run.like(fqn)), list[Any]()
    like.register_forward_hook(lambda module, args, output: outputs.append(_without_first(output)))

    def passing(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        form = outputs.pop()
        return hidden if form is None else type(form)((hidden, *form))

    model.get_submodule(fqn).forward = passing


def _without_first(output: Any) -> Any:
    return output[1:] if isinstance(output, (tuple, list)) else None


def with_repeats(recording: Sequence[Event], run: BlockRun) -> list[Event]:
    """The recording, with the skipped periods of `run` as copies of the second one.

    A forward period lasts from entering its first block to entering the next period's; a backward period lasts from
    beginning its last block to beginning the previous period's.
    """
    first, last = [period[0] for period in run.periods], [period[-1] for period in run.periods]
    extra, end = len(run.periods) - _PERIODS_RUN, _PERIODS_RUN - 1
    found: list[Event] = []
    for part in _passes(recording):
        enters = [_index(part, PRE_FORWARD, first[number]) for number in range(_PERIODS_RUN)]
        begins = [_index(part, PRE_BACKWARD, last[number]) for number in range(_PERIODS_RUN)]
        if None not in enters:
            one, two = (position or 0 for position in enters[1:])
            middle = part[one + 1 : two + 1]
            found += part[: two + 1]
            for number in range(1, extra + 1):
                found += _renamed(middle, run, {1: 1 + number, end: end + number})
            found += _renamed(part[two + 1 :], run, {end: end + extra})
        elif None not in begins:
            one, two = (position or 0 for position in begins[:2])
            middle = part[two + 1 : one + 1]
            found += _renamed(part[: two + 1], run, {end: end + extra, 1: 1 + extra})
            for number in range(extra, 0, -1):
                found += _renamed(middle, run, {1: 1 + number, 0: number})
            found += part[two + 1 :]
        else:
            found += part
    return found


def _passes(recording: Sequence[Event]) -> list[list[Event]]:
    """Split the recording into passes: each forward pass up to leaving the root, and the backward pass."""
    parts: list[list[Event]] = [[]]
    for event in recording:
        parts[-1].append(event)
        if (event.kind == POST_FORWARD and not event.module) or event.kind == LOSS:
            parts.append([])
    return parts


def _index(part: Sequence[Event], kind: str, module: str) -> int | None:
    return next((i for i, event in enumerate(part) if event.kind == kind and event.module == module), None)


def _renamed(events: Sequence[Event], run: BlockRun, numbers: Mapping[int, int]) -> list[Event]:
    """Rename `events` of one period's blocks to those of another; `numbers` maps periods."""
    names = {
        one: two
        for number, other in numbers.items()
        for one, two in zip(run.periods[number], run.periods[other], strict=True)
    }

    def name(module: str) -> str:
        for one, two in names.items():
            if module == one or module.startswith(f"{one}."):
                return two + module[len(one) :]
        return module

    return [replace(event, module=name(event.module)) for event in events]
