"""Tables of evaluation figures, each with the run and checkpoint that the weights came from."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_shard.evaluation.report.report_data import Cell, Table, digest, number, size, text
from fsdp_shard.evaluation.report.run_files import Run, as_interval, as_map, as_number, harness_measures
from fsdp_shard.evaluation.report.same_weights import WeightDigests, digests_in
from fsdp_shard.evaluation.scored_rows.config import MEASURES
from fsdp_shard.utils import flatten

_NOTE = (
    "An evaluation is of a step of a run if both have the same digest of their weights, wherever they lie; otherwise "
    "the path that was evaluated is shown, and with it the settings that not all evaluations of a task share. Compare "
    "figures of the same data and settings only."
)

_OF_SIZES = (
    *("evaluation", "weights", "on", "batch", "context", "first token s", "prefill tokens/s", "decode tokens/s"),
    *("per text", "peak memory"),
)
_SIZES = "Medians; tokens per second of all texts of a batch, and of each. Compare figures of the same machine only."
# Figures of some tasks only: classification, reward and generation; and those of tasks other than perplexity.
_SCORED = {"accuracy", "num_prompts"}
_OTHERS = _SCORED | {"results", "speed"}
_LIMIT = "lm_eval.limit"
# Settings with which weights compute as stored.
_STORED = {"dispatch.dtype": "keep", "dispatch.quantize": "none"}


@dataclass(frozen=True)
class _Score:
    """One model's figures in an evaluation."""

    run: Run
    weights: Cell
    figures: Mapping[str, Any]
    weights_digest: Cell
    data: Mapping[str, Any]
    settings: Mapping[str, str]  # dotted name -> value, from its provenance
    differing: frozenset[str] = frozenset()  # names of settings that not all evaluations of its task share

    @property
    def differences(self) -> Cell:
        """The settings that distinguish this evaluation, as overrides; a limit, because its figures do not cover all
        data; and the settings that made the computing weights differ from the checkpoint's.
        """
        shown = {name for name in self.settings if name in self.differing or name == _LIMIT}
        shown |= {name for name, usual in _STORED.items() if self.settings.get(name, usual) != usual}
        return text(", ".join(f"{name}={self.settings[name]}" for name in sorted(shown)) or None)


def evaluation_tables(evaluated: Sequence[Run], trained: Sequence[Run], digests: WeightDigests) -> list[Table]:
    """Make the tables of perplexities, tasks (lm-evaluation-harness, classes, answers), and speeds.

    Args:
        evaluated: Runs of `evaluate`.
        trained: Runs whose checkpoints may have been evaluated.
        digests: Finds these checkpoints.
    """
    scores = _with_differing([score for run in evaluated for score in _scores(run, trained, digests)])
    tasks = [row for score in scores for row in (*_tasks(score), *_scored_rows(score))]
    sizes = [row for score in scores for row in _sizes(score)]
    texts = [_perplexity(score) for score in scores if not _OTHERS & set(score.figures)]
    columns = ("evaluation", "weights", "settings", "loss", "perplexity", "95% interval", "bits per byte", "tokens")
    of_what = ("digest of data", "digest of weights")
    found = [Table("evaluations", "Evaluations", (*columns, *of_what), texts, _NOTE)] if texts else []
    measured = ("task", "measure", "value", "error or 95% interval")
    of_tasks = ("evaluation", "weights", "settings", *measured, "digest of weights")
    found += [Table("tasks", "Tasks", of_tasks, tasks, _NOTE)] if tasks else []
    return [*found, *([Table("generation-speed", "Speed of generation", _OF_SIZES, sizes, _SIZES)] if sizes else [])]


def _scores(run: Run, trained: Sequence[Run], digests: WeightDigests) -> Iterator[_Score]:
    provenance, against = as_map(run.result.get("provenance")), as_map(run.result.get("against"))
    models = [("checkpoint", as_map(provenance.get("weights")), run.result)]
    models += [("against", as_map(against.get("weights")), against)] if against else []
    for name, weights, figures in models:
        found = digests_in(weights)
        cell = _weights(run, name, weights, trained, digests)
        given = flatten(as_map(provenance.get("settings")))
        settings = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in given if value is not None
        }
        weights_digest = digest(None if found is None else found[0])
        yield _Score(run, cell, figures, weights_digest, as_map(provenance.get("data")), settings)


def _with_differing(scores: Sequence[_Score]) -> list[_Score]:
    """Compare the settings of the evaluations of each task."""
    tasks: dict[str | None, list[_Score]] = defaultdict(list)
    for score in scores:
        tasks[score.settings.get("task")].append(score)
    differing = {
        task: frozenset(
            name for name in set().union(*(s.settings for s in same)) if len({s.settings.get(name) for s in same}) > 1
        )
        for task, same in tasks.items()
    }
    return [replace(score, differing=differing[score.settings.get("task")]) for score in scores]


def _weights(run: Run, name: str, weights: Mapping[str, Any], trained: Sequence[Run], digests: WeightDigests) -> Cell:
    """The run and step with these weights, and any other config or tokenizer used in the evaluation; otherwise the
    evaluated path, which need not contain the weights any more.
    """
    tokenizer = run.settings.get("tokenizer", "null") if name == "checkpoint" else "null"
    of_tokenizer = "" if tokenizer == "null" else f", tokenizer={tokenizer}"
    found = digests.find(weights, trained)
    if found is not None:
        trained_run, stored = found
        config = ", another config" if digests.has_other_config(weights, stored) else ""
        return text(f"{trained_run.name}, step {stored.step}{config}{of_tokenizer}")
    return text(_text(weights.get("path")) or run.settings.get(name))


def _perplexity(score: _Score) -> list[Cell]:
    loss, perplexity, bits, tokens = (
        number(as_number(score.figures.get(name))) for name in ("loss", "perplexity", "bits_per_byte", "num_tokens")
    )
    interval = _interval(as_map(score.figures.get("confidence_interval")).get("perplexity"))
    data = digest(_text(score.data.get("digest")))
    figures = [loss, perplexity, interval, bits, tokens]
    return [text(score.run.name), score.weights, score.differences, *figures, data, score.weights_digest]


def _interval(found: Any) -> Cell:
    ends = as_interval(found)
    return text(None if ends is None else f"{number(ends[0]).text} to {number(ends[1]).text}")


def _tasks(score: _Score) -> Iterator[list[Cell]]:
    """A row per measure of each harness task."""
    for task, label, value, error in harness_measures(score.figures.get("results")):
        cells = [text(task), text(label), number(value), number(error)]
        yield [text(score.run.name), score.weights, score.differences, *cells, score.weights_digest]


def _scored_rows(score: _Score) -> Iterator[list[Cell]]:
    """A row per measure of `task=classification`, `reward` or `generation`, with the data in place of the task."""
    settings = as_map(as_map(score.figures.get("provenance")).get("settings"))
    intervals = as_map(score.figures.get("confidence_interval"))
    if not _SCORED & set(score.figures):
        return
    task = text(f"{_text(settings.get('task'))}: {_text(score.data.get('path'))}")
    for name in MEASURES:
        if (value := as_number(score.figures.get(name))) is not None:
            cells = [task, text(name), number(value), _interval(intervals.get(name))]
            yield [text(score.run.name), score.weights, score.differences, *cells, score.weights_digest]


def _sizes(score: _Score) -> Iterator[list[Cell]]:
    """A row per measured batch size and prompt length."""
    rows = score.figures.get("speed")
    places = _by_device(score.figures.get("weights_bytes"))
    quantize = score.run.settings.get("dispatch.quantize", "none")
    on = ", ".join([*places, *([] if quantize == "none" else [quantize])])
    names = (
        *("batch_size", "context_length", "first_token_seconds", "prefill_tokens_per_second"),
        *("decode_tokens_per_second", "decode_tokens_per_second_per_text"),
    )
    for row in map(as_map, rows if isinstance(rows, list) else []):
        figures = [number(as_number(row.get(name))) for name in names]
        memory = text(", ".join(_by_device(row.get("peak_memory_bytes"))) or None)
        yield [text(score.run.name), score.weights, text(on or None), *figures, memory]


def _by_device(value: Any) -> list[str]:
    """Bytes by device as text."""
    return [f"{name} {size(as_number(num_bytes)).text}" for name, num_bytes in as_map(value).items()]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
