"""Evaluation figures in a model card: a Markdown table, and the hub's metadata (`model-index`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_shard.evaluation.model_card.card_subject import CardSubject
from fsdp_shard.evaluation.model_card.shown_paths import last_part, without_directories
from fsdp_shard.evaluation.report.report_data import Table, digest, number, text
from fsdp_shard.evaluation.report.run_files import METRIC, Run, as_interval, as_map, as_number, harness_measures
from fsdp_shard.evaluation.scored_rows.config import MEASURES
from fsdp_shard.utils import in_yaml

_QUANTIZE = "quantize"
_OF_ANSWERS = ("logps/", "lengths/")  # preference metrics whose size depends on the answers


@dataclass(frozen=True)
class Figure:
    """A figure of an evaluation.

    Attributes:
        data: The data it was computed on: the name of a file or a task.
        kind: The kind of data, or the task.
        measure: The measure, such as `perplexity`.
        value: The figure.
        interval: Its 95 % confidence interval.
        standard_error: Its standard error, if there is no interval.
        data_digest: Digest of the data.
        settings: The settings that affect it.
    """

    data: str
    kind: str
    measure: str
    value: float
    interval: tuple[float, float] | None = None
    standard_error: float | None = None
    data_digest: str | None = None
    settings: Mapping[str, Any] | None = None


def figures_of(subject: CardSubject) -> list[Figure]:
    """All figures: those of evaluations, and the step's held-out loss and metrics."""
    found = [figure for run in subject.evaluations for figure in _figures(run)]
    run = None if subject.is_average else subject.run
    held_out = [row for row in (run.held_out if run else ()) if row["step"] == subject.num_steps]
    # A model trained and evaluated on a quantized base differs from the pushed one.
    quantize = subject.base.quantize if run and subject.base else "none"
    settings = {} if quantize == "none" else {_QUANTIZE: quantize}
    for row in held_out:
        for name in ("loss", "perplexity", *(name for name in row if name.startswith(METRIC))):
            measure, value = name.removeprefix(METRIC), row.get(name)
            if value is not None and not measure.startswith(_OF_ANSWERS):
                found.append(Figure("held-out data of the training run", "held-out", measure, value, settings=settings))
    return found


def _figures(run: Run) -> Iterator[Figure]:
    provenance = as_map(run.result.get("provenance"))
    data, settings = as_map(provenance.get("data")), as_map(provenance.get("settings"))
    results = run.result.get("results")
    computed = _computed(as_map(settings.get("dispatch")))
    if isinstance(results, dict):
        asked = as_map(settings.get("lm_eval"))
        template = {"chat_template": True} if asked.get("chat_template") is True else {}
        yield from _task_figures(results, as_map(run.result.get("num_fewshot")), computed | template)
        return
    name = data.get("path")
    shown = last_part(name) if isinstance(name, str) and name else "a text"
    kind, data_digest = data.get("kind"), data.get("digest")
    intervals = as_map(run.result.get("confidence_interval"))
    used = {key: settings.get(key) for key in ("by", "sequence_length", "stride") if settings.get(key) is not None}
    used |= computed
    if (most := settings.get("max_new_tokens")) is not None:  # for generated answers
        used["max_new_tokens"] = most
    for measure in ("perplexity", "loss", "bits_per_byte", *MEASURES):
        value = as_number(run.result.get(measure))
        if value is not None:
            yield Figure(
                data=shown,
                kind=kind if isinstance(kind, str) else "text",
                measure=measure,
                value=value,
                interval=as_interval(intervals.get(measure)),
                data_digest=data_digest if isinstance(data_digest, str) else None,
                settings=used,
            )


def _computed(dispatch: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that made the computing weights differ from the checkpoint's."""
    usual = {"dtype": "keep", _QUANTIZE: "none"}
    return {name: dispatch[name] for name, default in usual.items() if dispatch.get(name, default) != default}


def _task_figures(
    results: Mapping[str, Any], num_fewshot: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[Figure]:
    for task, label, value, error in harness_measures(results):
        shots: dict[str, Any] = {} if num_fewshot.get(task) is None else {"num_fewshot": num_fewshot[task]}
        yield Figure(task, task, label, value, standard_error=error, settings={**shots, **settings})


def figures_table(figures: Sequence[Figure]) -> Table:
    """The figures, one per row."""
    columns = ("data", "measure", "value", "95% interval", "standard error", "settings", "digest of the data")
    rows = [
        [
            text(one.data),
            text(one.measure.replace("_", " ")),
            number(one.value),
            text(None if one.interval is None else " to ".join(number(end).text for end in one.interval)),
            number(one.standard_error),
            text(", ".join(f"{name} {_value_text(value)}" for name, value in (one.settings or {}).items()) or None),
            digest(one.data_digest),
        ]
        for one in figures
    ]
    return Table("evaluations", "Evaluations", columns, rows)


def eval_results(figures: Sequence[Figure], task: str) -> list[Any]:
    """The figures as `EvalResult`s of huggingface_hub for the hub; `task` is the hub's name of the model's task.

    Figures of quantized weights are skipped: the hub shows no settings with them, and they belong to another model.
    """
    from huggingface_hub import EvalResult

    made = []
    for one in figures:
        if _QUANTIZE in (one.settings or {}):
            continue
        interval = {"confidence_interval_95": list(one.interval)} if one.interval else {}
        error = {} if one.standard_error is None else {"standard_error": one.standard_error}
        made.append(
            EvalResult(
                task_type=task,
                dataset_type=text(one.kind).text,
                dataset_name=text(one.data).text,
                dataset_revision=None if one.data_digest is None else text(one.data_digest).text,
                metric_type=text(one.measure).text,
                metric_value=one.value,
                metric_args={**(one.settings or {}), **interval, **error} or None,
            )
        )
    return made


def _value_text(value: Any) -> str:
    return without_directories(in_yaml(value))
