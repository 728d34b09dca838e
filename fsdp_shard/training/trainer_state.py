"""The progress of a run, stored as `trainer.json` in checkpoints.

The learning rate, the random state and the position in the data are functions of it (`lr_schedule.py`, `seeding.py`,
`data/sample_order.py`), so a resumed run continues exactly.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.utils import parse_json

_FORMAT_VERSION = 1


@dataclass
class TrainerState:
    """The progress of a run.

    Attributes:
        seed: Seed of the run, which determines the sample order.
        data: Identity of the dataset (`Dataset.identity`).
        step: Number of finished steps.
        num_samples: Number of samples trained, in the order that `seed` and `data` define.
        num_tokens: Number of predictions trained.
        best_loss: Lowest held-out loss after any step so far, that of step `best_step`.
        best_step: Step with the lowest held-out loss so far.
        loss_to_beat: Held-out loss that an evaluation must improve on (early stopping).
        num_stale: Number of evaluations since then without an improvement.
        num_skipped: Number of steps that did not change the weights.
        num_skipped_in_row: Number of consecutive skipped steps up to this one.
        dataset_state: Position in streamed data, whose format depends on the data; None for other data.
        source_tokens: Number of predictions for each source of a mixture, by name.
        samples_per_epoch: Number of samples in an epoch; None for streams and mixtures, and in older checkpoints.
        evaluation_pending: Whether an evaluation due after this step is missing: the run was interrupted before it, or
            a resume made this step the last.
        evaluated_step: The latest evaluated or sampled step; 0 without one, and in older checkpoints.
        latest_loss: The held-out loss of that step.
        held_out: Identity of the held-out samples evaluated so far; empty without any, and in older checkpoints.
        loss_before: Held-out loss before the first step, on the same samples; None if unknown.
        changed_settings: Settings that resumes changed: lists of the step, the setting's name, and its values before
            and after, as YAML; None if unknown, as in older checkpoints.
    """

    seed: int
    data: str
    step: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    loss_to_beat: float | None = None
    num_stale: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    dataset_state: dict[str, Any] | None = None
    source_tokens: dict[str, int] = field(default_factory=dict)
    samples_per_epoch: int | None = None
    evaluation_pending: bool = False
    evaluated_step: int = 0
    latest_loss: float | None = None
    held_out: str = ""
    loss_before: float | None = None
    changed_settings: list[list[Any]] | None = field(default_factory=list)

    @property
    def epoch(self) -> float | None:
        """Number of samples trained divided by the number per epoch; None if the data has no such number."""
        return self.num_samples / self.samples_per_epoch if self.samples_per_epoch else None

    def advance(self, num_samples: int, num_tokens: int, source_tokens: Mapping[str, int], *, skipped: bool) -> None:
        """Count a step; a skipped one did not change the weights."""
        self.step += 1
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        for name, num in source_tokens.items():
            self.source_tokens[name] = self.source_tokens.get(name, 0) + num
        self.num_skipped += skipped
        self.num_skipped_in_row = self.num_skipped_in_row + 1 if skipped else 0

    def record_held_out(self, held_out: str) -> bool:
        """Record the samples evaluated from now on. Losses on other samples are not compared with theirs.

        Args:
            held_out: Identity of the samples.

        Returns:
            Whether a best step on other samples was discarded.
        """
        is_other = self.held_out not in ("", held_out)
        had_best = self.best_step is not None
        if is_other:
            self.best_loss, self.best_step, self.loss_to_beat, self.num_stale = None, None, None, 0
            self.loss_before, self.latest_loss = None, None
        if self.latest_loss is None:
            self.evaluated_step = 0
        self.held_out = held_out
        return is_other and had_best

    def record_evaluation(self, loss: float, min_delta: float = 0.0) -> None:
        """Record the held-out loss of this step.

        An evaluation counts as an improvement only if it is more than `min_delta` below the last improvement, so small
        decreases count once they add up.
        """
        self.evaluation_pending = False
        self.evaluated_step, self.latest_loss = self.step, loss
        if self.loss_to_beat is None or loss < self.loss_to_beat - min_delta:
            self.loss_to_beat, self.num_stale = loss, 0
        else:
            self.num_stale += 1
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step

    def record_resume(self, changes: Mapping[str, tuple[str, str]] | None) -> None:
        """Record the settings that change from this step on: values before and after, by name; None if unknown."""
        if changes is None or self.changed_settings is None:
            self.changed_settings = None
        else:
            self.changed_settings += [[self.step, name, *values] for name, values in changes.items()]

    @property
    def is_best(self) -> bool:
        """Whether the current weights have the lowest held-out loss of all steps so far."""
        return self.best_step == self.step

    @property
    def held_out_loss(self) -> float | None:
        """Held-out loss of this step; None if it was not evaluated."""
        return self.latest_loss if self.evaluated_step == self.step else None

    @property
    def never_improved(self) -> bool:
        """Whether no step has a lower held-out loss than the model had before training."""
        return self.loss_before is not None and self.best_loss is not None and self.best_loss >= self.loss_before

    def stops_early(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row did not improve."""
        return patience is not None and self.num_stale >= patience

    def check_continues(self, seed: int, data: str, where: str, changes: Callable[[], Sequence[str]] = list) -> None:
        """Raise ConfigError if a run with other settings cannot continue this one.

        Args:
            seed: The seed of the new run.
            data: The identity of the new run's data.
            where: Names the step of this run.
            changes: Returns `name before -> now` for settings that have changed.
        """
        if seed != self.seed:
            raise ConfigError(
                f"seed={seed}, but the run to resume started with seed={self.seed} ({where}): the order of the samples "
                f"would change. Set seed={self.seed}, or start a new run from its weights with model.path."
            )
        if data != self.data:
            found = "; changed: ".join(filter(None, [data, ", ".join(changes())]))
            raise ConfigError(
                f"The data or data.sequence_length differ from those of the run to resume ({where}: samples "
                f"{self.data}, found {found}), so its position in the data is not valid. Set the same data.* settings "
                f"and files, or start a new run from its weights with model.path."
            )

    def to_json(self) -> str:
        """Return the content of `trainer.json`."""
        entries = {_STORED.get(name, name): value for name, value in asdict(self).items()}
        values = {name: value for name, value in entries.items() if value != _OPTIONAL.get(name, ...)}
        return json.dumps({"format_version": _FORMAT_VERSION, **values}, indent=1) + "\n"

    @classmethod
    def from_json(cls, content: bytes, what: str) -> TrainerState:
        """Parse the content of the file `what`; raise CheckpointError, which names it, if it is damaged."""
        values = parse_json(content, what)
        if not isinstance(values, dict) or values.pop("format_version", None) != _FORMAT_VERSION:
            raise CheckpointError(f"{what} is not a trainer state of format version {_FORMAT_VERSION}.")
        known = {_STORED.get(field.name, field.name) for field in fields(cls)}
        missing, unknown = sorted(known - _OPTIONAL.keys() - set(values)), sorted(set(values) - known)
        if missing or unknown:
            raise CheckpointError(f"{what} does not have the expected entries: missing {missing}, unknown {unknown}.")
        for name, value in values.items():
            _check_entry(name, value, what)
        for change in values.get("changed_settings") or ():
            if not isinstance(change, list) or [type(value) for value in change] != [int, str, str, str]:
                raise CheckpointError(
                    f"{what}: changed_settings has {change!r}; expected a step, a name and two values."
                )
        for source, num in values.get("source_tokens", {}).items():
            _check_entry(f"source_tokens.{source}", num, what)
        if (values["best_loss"] is None) != (values["best_step"] is None):
            raise CheckpointError(f"{what}: best_loss and best_step belong together; one of them is null.")
        attributes = {entry: name for name, entry in _STORED.items()}
        values = copy.deepcopy(_OPTIONAL) | values
        return cls(**{attributes.get(name, name): value for name, value in values.items()})


def _check_entry(name: str, value: Any, what: str) -> None:
    kinds, words = _KINDS.get(name, ((int,), "a whole number of at least 0"))
    if type(value) not in kinds or (type(value) is int and value < 0):
        raise CheckpointError(f"{what}: {name} is {value!r}; expected {words}.")


# Attributes -> their entries in `trainer.json`, where the names differ.
_STORED = {"loss_to_beat": "reference_loss", "dataset_state": "place", "evaluation_pending": "owes_evaluation"}
# Entries omitted if they have these values; older checkpoints lack them.
_OPTIONAL: dict[str, Any] = {
    "place": None,
    "source_tokens": {},
    "samples_per_epoch": None,
    "owes_evaluation": False,
    "evaluated_step": 0,
    "latest_loss": None,
    "held_out": "",
    "loss_before": None,
    "changed_settings": None,
}
# The types of entries, and their names in errors; other entries are counts.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "data": ((str,), "text"),
    "held_out": ((str,), "text"),
    "place": ((dict, type(None)), "an object or null"),
    "source_tokens": ((dict,), "an object"),
    "owes_evaluation": ((bool,), "true or false"),
    "changed_settings": ((list, type(None)), "a list or null"),
    "loss_before": ((float, int, type(None)), "a number or null"),
    "latest_loss": ((float, int, type(None)), "a number or null"),
    "best_loss": ((float, int, type(None)), "a number or null"),
    "best_step": ((int, type(None)), "a whole number of at least 0 or null"),
    "reference_loss": ((float, int, type(None)), "a number or null"),
}


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether an action is due after `step`: every `every` steps (0: none in between), and after the last step."""
    return step == num_steps or (every > 0 and step % every == 0)
