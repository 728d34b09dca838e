"""The subject of a model card: a checkpoint, its run, and the evaluations of the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import (
    AVERAGE,
    CHECKPOINTS,
    BaseModel,
    HubTarget,
    Location,
    describe_weights,
    is_hub_id,
    parse_step,
    read_adapter_config,
    read_base_model,
    weights_digest,
)
from fsdp_shard.errors import InputError, ModelError
from fsdp_shard.evaluation.config import SPEED
from fsdp_shard.evaluation.report.run_files import Run, as_map, find_runs, is_run, read_run
from fsdp_shard.evaluation.report.same_weights import Digests, digests_in, has_other_config
from fsdp_shard.utils import format_count, read_json


@dataclass(frozen=True)
class CardSubject:
    """The subject of a model card.

    Attributes:
        target: The repository and branch of the card.
        location: The checkpoint to push.
        architectures: The model classes in config.json.
        adapter_base: The hub id of the base model, if the adapter itself is pushed instead of a model.
        adapter_config: The content of the adapter's adapter_config.json.
        weights: Digest of the checkpoint's weights; for an adapter, also that of its base.
        pushed_digest: Digest of the pushed weights, which may be converted.
        step: The directory of the checkpoint's step, or of the step whose average (ema) it is.
        run: The run of this step.
        base: The model from which the run started.
        defaults: The default of each setting of a run, by dotted name.
        evaluations: Runs of `evaluate` of the same weights.
    """

    target: HubTarget
    location: Location
    architectures: tuple[str, ...]
    adapter_base: str | None
    adapter_config: Mapping[str, Any]
    weights: Digests
    pushed_digest: str
    step: Path | None
    run: Run | None
    base: BaseModel | None
    defaults: Mapping[str, str]
    evaluations: Sequence[Run]

    def of_pushed(self, pushed: Location) -> CardSubject:
        """The same, with the digest of what the checkpoint was converted to; all weights are read for it."""
        return dataclasses.replace(self, pushed_digest=weights_digest(pushed.index))

    @property
    def num_steps(self) -> int | None:
        """Number of trained steps of the run."""
        return None if self.step is None else parse_step(self.step.name)

    @property
    def is_average(self) -> bool:
        """Whether the checkpoint is the average of the run's weights, to which the run's figures do not apply."""
        return self.step is not None and self.location.weights != self.step

    @property
    def adapter_task(self) -> str | None:
        """peft's name of the task that the adapter is for, such as `CAUSAL_LM`."""
        found = self.adapter_config.get("task_type")
        return found if isinstance(found, str) else None

    @property
    def repo_id(self) -> str:
        """The name of the repository."""
        return self.target.repo_id

    @property
    def base_on_hub(self) -> str | None:
        """The hub id of the model from which the run started; None if it was a directory."""
        path = self.adapter_base or (self.base.path if self.base else "")
        return path if is_on_hub(path) else None


def is_on_hub(path: str) -> bool:
    """Whether a path in the records of a run is a hub id: it looks like one, and does not exist on this machine."""
    return is_hub_id(path) and not Path(path).exists()


def _step_of(location: Location) -> Path | None:
    """The directory of a checkpoint's step, or of the step that it averages; None without a run on this machine."""
    weights = location.weights
    step = weights.parent if weights.name == AVERAGE else weights
    is_step = parse_step(step.name) is not None and step.parent.name == CHECKPOINTS
    return step if is_step and is_run(step.parent.parent) else None


def read_subject(
    target: HubTarget,
    location: Location,
    adapter_base: str | None,
    defaults: Callable[[Mapping[str, str]], Mapping[str, str]],
    evaluations: Sequence[str],
) -> tuple[CardSubject, list[str]]:
    """Read the subject of a card; reads all weights for their digests.

    Args:
        target: The repository and branch that the card is for.
        location: The checkpoint.
        adapter_base: The hub id of the base model if the adapter itself is pushed.
        defaults: Returns the default of each setting of a run, given its settings.
        evaluations: Directories of `evaluate` runs, or directories that contain such runs.

    Returns:
        The subject, and a sentence for everything that was left out.

    Raises:
        InputError: One of `evaluations` contains no run, or none of them evaluated these weights.
    """
    has_base = adapter_base is None or _has_base(location)
    weights = digests_in(describe_weights(location)) if has_base else (weights_digest(location.index), None)
    assert weights is not None, "there is a digest in each description"
    step = _step_of(location)
    run = None if step is None else read_run(step.parent.parent, step.parent.parent.resolve().name, step)
    chosen, left_out = _of_model(evaluations, weights, location)
    subject = CardSubject(
        target=target,
        location=location,
        architectures=_architectures(location) if has_base else (),
        adapter_base=adapter_base,
        adapter_config={} if adapter_base is None else read_adapter_config(location.weights),
        weights=weights,
        pushed_digest=weights[0],
        step=step,
        run=run,
        base=read_base_model(step or location.weights) if location.weights.is_dir() else None,
        defaults=defaults(run.settings) if run else {},
        evaluations=chosen,
    )
    problems = [problem for one in [*([run] if run else []), *chosen] for problem in one.problems]
    return subject, [*left_out, *problems]


def _of_model(paths: Sequence[str], weights: Digests, location: Location) -> tuple[list[Run], list[str]]:
    """The completed evaluations of the checkpoint at `location`, and a note for each kind of run left out."""
    runs = [read_run(path, path.name) for path in find_runs(paths)] if paths else []
    same = [run for run in runs if run.command == "evaluate" and digests_in(_weights_of(run)) == weights]
    if paths and not same:
        raise InputError(
            f"There is no evaluation of the weights that are pushed in {', '.join(paths)}: none of its "
            f"{format_count(len(runs), 'run')} has their digest in result.json. Evaluate what you push, and then give "
            "the run_dir of that."
        )
    tokenizer, notes = _tokenizer_digest(location) if same else (None, [])
    parts = [_other_parts(run, location, tokenizer) for run in same]
    apart = ", ".join(f"{run.name} ({' and '.join(of)})" for run, of in zip(same, parts, strict=True) if of)
    chosen = [run for run, of in zip(same, parts, strict=True) if not of]
    if same and not chosen:
        raise InputError(
            f"All evaluations of the weights that are pushed in {', '.join(paths)} are with another config or "
            f"tokenizer than theirs: {apart}. Evaluate what you push without config= and tokenizer=, and then give the "
            "run_dir of that."
        )
    others = [run for run in runs if run not in same]
    limited = [run for run in chosen if _setting_of(run, "lm_eval", "limit") is not None]
    of_speed = [run for run in chosen if _setting_of(run, "task") == SPEED]
    left_out = {
        ", not evaluated with these weights": (len(others), _names(others)),
        ", evaluated with another config or tokenizer": (len(same) - len(chosen), apart),
        " of a part of the questions (lm_eval.limit)": (len(limited), _names(limited)),
        " of the speed, which depends on the machine": (len(of_speed), _names(of_speed)),
    }
    notes += [f"{format_count(count, 'run')}{why}: {names}." for why, (count, names) in left_out.items() if count]
    return [run for run in chosen if run not in (*limited, *of_speed)], notes


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)


def _other_parts(run: Run, location: Location, tokenizer: str | None) -> list[str]:
    """Parts that an evaluation of the weights at `location` took from elsewhere, as far as recorded."""
    found = as_map(as_map(run.result.get("provenance")).get("tokenizer")).get("digest")
    other_tokenizer = tokenizer is not None and isinstance(found, str) and found != tokenizer
    parts = {"config": has_other_config(_weights_of(run), location), "tokenizer": other_tokenizer}
    return [name for name, is_other in parts.items() if is_other]


def _tokenizer_digest(location: Location) -> tuple[str | None, list[str]]:
    """The digest of the tokenizer as evaluations record it, or None and a sentence with the reason."""
    from fsdp_shard.evaluation.provenance import tokenizer_digest
    from fsdp_shard.models import load_tokenizer

    try:
        return tokenizer_digest(load_tokenizer(location.tokenizer_directory)), []
    except ModelError as error:  # such as one with code of its own, which only an evaluation is allowed to run
        return None, [f"whether evaluations had this tokenizer, as it cannot be loaded: {error}"]


def _setting_of(run: Run, *names: str) -> Any:
    """A setting that an evaluation records, such as `lm_eval.limit`: how many questions were asked, None for all."""
    found: Any = run.result
    for key in ("provenance", "settings", *names):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _weights_of(run: Run) -> Mapping[str, Any]:
    """The weights that an evaluation records."""
    return as_map(as_map(run.result.get("provenance")).get("weights"))


def _has_base(location: Location) -> bool:
    """Whether the base model of an adapter is on this machine, with its weights and config."""
    try:
        return bool(location.base.index.tensors) and location.config_directory.is_dir()
    except InputError:
        return False


def _architectures(location: Location) -> tuple[str, ...]:
    config = read_json(location.config_directory / "config.json")
    found = config.get("architectures") if isinstance(config, dict) else None
    names = found if isinstance(found, list) else []
    return tuple(name for name in names if isinstance(name, str) and name.isidentifier())
