"""Where a run stands: what `trainer.json` of a checkpoint holds. Knows no weights and no files.

The learning rate, the random state and the place in the data are all functions of what is here (`schedule.py`,
`seeding.py`, `data/order.py`), so this is enough to go on exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fsdp_shard.errors import CheckpointError, ConfigError

_FORMAT_VERSION = 1


@dataclass
class TrainerState:
    """`step` updates were made from the first `num_samples` of the sample order, with `num_tokens` predictions.

    `seed` and `data` (`WindowDataset.identity`) define that order. `best_loss` is the lowest held-out loss so far, of
    step `best_step`; `reference_loss` is the one to fall below, and `num_stale` evaluations in a row since have not.
    `place` is where streamed data is at, or None; its form is `data`'s. Of the steps, `num_skipped` changed no weights,
    the last `num_skipped_in_row` of them one after the other. `source_tokens` are the predictions of each source of a
    mixture, by its name. `owes_evaluation`: one was due after this step, but a signal asked for the run to stop.
    """

    seed: int
    data: str
    step: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    reference_loss: float | None = None
    num_stale: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    place: dict[str, Any] | None = None
    source_tokens: dict[str, int] = field(default_factory=dict)
    owes_evaluation: bool = False

    def advance(
        self,
        num_samples: int,
        num_tokens: int,
        source_tokens: Mapping[str, int] | None = None,
        *,
        skipped: bool = False,
    ) -> None:
        """Count one more step, which updated the weights unless it was skipped."""
        self.step += 1
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        for name, num in (source_tokens or {}).items():
            self.source_tokens[name] = self.source_tokens.get(name, 0) + num
        self.num_skipped += skipped
        self.num_skipped_in_row = self.num_skipped_in_row + 1 if skipped else 0

    def evaluated(self, loss: float, min_delta: float = 0.0) -> bool:
        """Take note of a held-out loss of this step; whether it is the lowest so far.

        It counts as stale unless it is more than `min_delta` below the last one that did not: many small falls that
        add up to that are progress.
        """
        self.owes_evaluation = False
        if self.reference_loss is None or loss < self.reference_loss - min_delta:
            self.reference_loss, self.num_stale = loss, 0
        else:
            self.num_stale += 1
        if self.best_loss is not None and loss >= self.best_loss:
            return False
        self.best_loss, self.best_step = loss, self.step
        return True

    @property
    def is_best(self) -> bool:
        """Whether the weights as they are now have the lowest held-out loss so far."""
        return self.best_step == self.step

    def stops_early(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were stale."""
        return patience is not None and self.num_stale >= patience

    def check_continues(self, seed: int, data: str) -> None:
        """Raise ConfigError when a run with this seed and data would not go on where this one stopped."""
        if seed != self.seed:
            raise ConfigError(
                f"seed={seed}, but the run to resume began with seed={self.seed}: its samples would come in another "
                f"order. Give seed={self.seed}, or begin anew from its weights with model.path."
            )
        if data != self.data:
            raise ConfigError(
                f"The text or data.sequence_length is not that of the run to resume (windows {data}, expected "
                f"{self.data}), so its place in the data means nothing here. Give the same data.* settings and files, "
                f"or begin anew from its weights with model.path."
            )

    def to_json(self) -> str:
        """The content of `trainer.json`."""
        values = {name: value for name, value in asdict(self).items() if name not in _OPTIONAL or value}
        return json.dumps({"format_version": _FORMAT_VERSION, **values}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, what: str) -> TrainerState:
        """Read `to_json`'s output; raises CheckpointError, naming `what` (the file), when it is anything else."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{what} is not JSON ({error}); this checkpoint cannot be resumed from.") from error
        if not isinstance(values, dict) or values.pop("format_version", None) != _FORMAT_VERSION:
            raise CheckpointError(f"{what} is no trainer state of format version {_FORMAT_VERSION}.")
        values = {name: make() for name, make in _OPTIONAL.items()} | values
        expected = {field.name for field in fields(cls)}
        if expected != set(values):
            missing, unknown = sorted(expected - set(values)), sorted(set(values) - expected)
            raise CheckpointError(f"{what} does not have the expected entries: missing {missing}, unknown {unknown}.")
        for name, value in values.items():
            _check_entry(name, value, what)
        return cls(**values)


def _check_entry(name: str, value: Any, what: str) -> None:
    if name == "source_tokens" and isinstance(value, dict):
        for source, num in value.items():
            _check_entry(f"source_tokens.{source}", num, what)
        return
    kinds, words = _KINDS.get(name, ((int,), "a whole number of at least 0"))
    is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not is_right or (isinstance(value, int) and value < 0):
        raise CheckpointError(f"{what}: {name} is {value!r}; expected {words}.")


# What is left out where there is nothing to say, and what that is.
_OPTIONAL: dict[str, Callable[[], Any]] = {"place": lambda: None, "source_tokens": dict, "owes_evaluation": bool}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "data": ((str,), "text"),
    "place": ((dict, type(None)), "an object or nothing"),
    "source_tokens": ((dict,), "an object"),
    "owes_evaluation": ((bool,), "true or false"),
    "best_loss": ((float, int, type(None)), "a number or null"),
    "best_step": ((int, type(None)), "a whole number of at least 0 or null"),
    "reference_loss": ((float, int, type(None)), "a number or null"),
}
