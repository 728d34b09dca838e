"""The text of a model card: metadata for the hub, and Markdown.

All content from files is escaped: in the metadata by YAML, in the text as Markdown.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence

from fsdp_shard.checkpoint import CARD_MARK, HubTarget
from fsdp_shard.errors import one_line
from fsdp_shard.evaluation.model_card.card_figures import Figure, eval_results, figures_of, figures_table
from fsdp_shard.evaluation.model_card.card_subject import CardSubject, is_on_hub
from fsdp_shard.evaluation.model_card.shown_paths import last_part, shown_setting, without_directories
from fsdp_shard.evaluation.report.report_data import Cell, Table, loss_unit, number, text
from fsdp_shard.evaluation.report.run_files import Row, Run, as_number, last_of, values_of
from fsdp_shard.evaluation.report.setting_changes import courses
from fsdp_shard.evaluation.report.tables import escape_markdown, markdown_table
from fsdp_shard.models import CAUSAL, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import format_number, installed_versions, redact, redact_setting

_MAX_ROWS = 12  # of the curve
_MAX_VALUE = 200  # characters of a setting
_PACKAGES = ("fsdp-shard", "torch", "transformers", "safetensors", "peft")
_PRIVATE = frozenset({"launch.rendezvous", "data.cache_dir"})  # settings that reveal the setup of machines
_ELSEWHERE = _PRIVATE | {"run_dir", "model.path", "data.path", "model.revision"}  # shown elsewhere, or not at all
_TASKS = {  # by model.task: the transformers class that loads it, and the hub's name of the task
    CAUSAL: ("AutoModelForCausalLM", "text-generation"),
    SEQ2SEQ: ("AutoModelForSeq2SeqLM", "text2text-generation"),
    MASKED_LM: ("AutoModelForMaskedLM", "fill-mask"),
    SEQUENCE_CLASSIFICATION: ("AutoModelForSequenceClassification", "text-classification"),
}
_ADAPTER_TASKS = {  # by peft's name of a task, each with an AutoPeftModel class
    "CAUSAL_LM": CAUSAL,
    "SEQ_2_SEQ_LM": SEQ2SEQ,
    "SEQ_CLS": SEQUENCE_CLASSIFICATION,
}

_LICENSE = (
    "None is given here. How this model may be used depends on the licenses of its base model and data: add "
    "`license:` to the metadata at the top."
)


def make_card(subject: CardSubject) -> str:
    """Return the content of README.md."""
    figures = figures_of(subject)
    run = subject.run
    parts = [f"---\n{_metadata(subject, figures)}\n---\n\n{CARD_MARK}", f"# {_safe(subject.repo_id)}", _intro(subject)]
    parts += _section("Training", [_table(_training_table(subject, run))] if run else [])
    curve = _curve(subject, run) if run else None
    of_weights = " Of the weights themselves, not of their average." if subject.is_average else ""
    parts += _section("Loss", [_safe(curve.note + of_weights), _table(curve)] if curve else [])
    parts += _section("Evaluation", [_evaluation_note(subject), _table(figures_table(figures))] if figures else [])
    settings = _settings_table(subject, run) if run else None
    parts += _section("Settings", [_safe(settings.note), _table(settings)] if settings else [])
    parts += _section("Weights", [_table(_weights_table(subject))])
    parts += _section("How to load it", [_loading(subject)])
    parts += _section("License", [_LICENSE])
    return redact("\n\n".join(parts)) + "\n"


def is_card_of(content: str, subject: CardSubject) -> bool:
    """Whether a card was made for the same repository, branch and weights."""
    return all(part in content for part in (f"{_where(subject.target)})", subject.pushed_digest))


def _section(title: str, parts: Sequence[str]) -> list[str]:
    return [f"## {title}", *parts] if parts else []


def _metadata(subject: CardSubject, figures: Sequence[Figure]) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=subject.base_on_hub,
        library_name="peft" if subject.adapter_base else "transformers",
        pipeline_tag=_class(subject)[1],
        tags=["fsdp-shard"],
        model_name=subject.repo_id.rpartition("/")[2],
        eval_results=eval_results(figures, _class(subject)[1] or "text-generation") or None,
    )
    return str(data.to_yaml())


def _intro(subject: CardSubject) -> str:
    kind = "DoRA" if subject.adapter_config.get("use_dora") is True else "LoRA"
    what = f"An adapter ({kind})" if subject.adapter_base else "A model"
    base = subject.base_on_hub
    known = base or (last_part(subject.base.path) if subject.base else None)
    of_base = "" if known is None else f", fine-tuned from {_linked(base) if base else _safe(known)}"
    run = subject.run
    of_run = f" It is {_which(subject)}step {subject.num_steps:,} of the run {_safe(run.name)}." if run else ""
    earlier = _earlier_adapter(subject)
    not_counted = ", whose steps and tokens are not counted here"
    of_earlier = "" if earlier is None else f" Its training began with the adapter {_safe(earlier)}{not_counted}."
    return f"{what}{of_base}, pushed with fsdp-shard.{of_run}{of_earlier}"


def _earlier_adapter(subject: CardSubject) -> str | None:
    """The adapter that training started from: its hub id, or its path as shown in the card."""
    path = subject.base.adapter_path if subject.base else None
    return path if path is None or is_on_hub(path) else last_part(path)


def _which(subject: CardSubject) -> str:
    """Which weights of their step these are."""
    if not subject.is_average or subject.run is None:
        return ""
    decay = courses(subject.run.settings, subject.run.changes).get("train.ema_decay", "null")
    known = "" if decay == "null" else f" (`train.ema_decay` {_safe(decay)})"
    return f"the exponential moving average of the weights{known} up to "


def _linked(repo_id: str) -> str:
    return f"[{_safe(repo_id)}](https://huggingface.co/{repo_id})"


def _training_table(subject: CardSubject, run: Run) -> Table:
    step = subject.num_steps or 0
    rows = _up_to(subject, run.steps)
    tokens = as_number(run.state.get("num_tokens")) or last_of(rows, "total_tokens")
    skipped = as_number(run.state.get("num_skipped")) or last_of(rows, "skipped")
    seconds, missing = sum(values_of(rows, "step_seconds")), _num_missing_steps(rows)
    base = subject.base
    data, model = run.settings.get("data.path"), base.path if base else run.settings.get("model.path")
    data_digest = run.state.get("data")
    shown_seconds = format_number(round(seconds)) if seconds else None
    facts = {
        "base model": subject.base_on_hub or (model and last_part(model)),
        "fingerprint of the base model": base.fingerprint if base else None,
        "earlier adapter": _earlier_adapter(subject),
        "fingerprint of the earlier adapter": base.adapter if base else None,
        "data": None if data in (None, "null") else shown_setting("data.path", data),
        "fingerprint of the data": data_digest if isinstance(data_digest, str) else None,
        "step": f"{step:,}",
        "skipped steps (loss or gradients not finite)": f"{skipped:,.0f}" if skipped else None,
        "tokens": f"{tokens:,.0f}" if tokens else None,
        f"seconds of training{f' after step {missing:,}' if missing else ''}": shown_seconds,
        "status of the run": run.status,
    }
    return _facts(facts)


def _weights_table(subject: CardSubject) -> Table:
    found = {
        "digest of the weights (xxh3_128)": subject.pushed_digest,
        "architecture": ", ".join(subject.architectures) or None,
    }
    versions = {"Python": platform.python_version(), **installed_versions(_PACKAGES)}
    return _facts(found | {f"{name} where it was pushed": version for name, version in versions.items()})


def _facts(facts: dict[str, str | None]) -> Table:
    rows = [[text(name), _value(value)] for name, value in facts.items() if value is not None]
    return Table("facts", "", ("what", "value"), rows)


def _evaluation_note(subject: CardSubject) -> str:
    evaluated = [run.settings for run in subject.evaluations if "loss" in run.result]
    unit = loss_unit([*([subject.run.settings] if subject.run else []), *evaluated])
    return f"Losses in {unit}. Compare figures of the same data and settings only."


def _up_to(subject: CardSubject, rows: Sequence[Row]) -> list[Row]:
    """The rows up to and including the step."""
    return [row for row in rows if (row["step"] or 0) <= (subject.num_steps or 0)]


def _num_missing_steps(rows: Sequence[Row]) -> int:
    """Number of steps before the first row: those of a run that continued in another directory."""
    return int(rows[0]["step"] or 1) - 1 if rows else 0


def _curve(subject: CardSubject, run: Run) -> Table | None:
    """The training loss, as means of the steps since the previous row, with the last held-out loss among them."""
    steps, evaluated = _up_to(subject, run.steps), _up_to(subject, run.held_out)
    held_out = [(row["step"] or 0.0, value) for row in evaluated if (value := row.get("loss")) is not None]
    if not steps:
        return None
    rows, before = [], -1.0
    start = [(0.0, None)] if held_out and held_out[0][0] == 0 else []
    for step, loss in [*start, *_means(steps)]:
        inside = [value for at, value in held_out if before < at <= step]
        rows.append([number(int(step)), number(loss), number(inside[-1] if inside else None)])
        before = step
    note = f"In {loss_unit([run.settings])}. The training loss is the mean of the steps since the row before."
    if len(values_of(steps, "loss")) < len(steps):
        note += " Steps whose loss was not finite are left out of it."
    if missing := _num_missing_steps(steps):
        note += f" The losses up to step {missing:,} are not known: they are in no file of the run's directory."
    return Table("curve", "", ("step", "training loss", "held-out loss"), rows, note)


def _means(steps: Sequence[Row]) -> list[tuple[float, float | None]]:
    """The last step of each of up to _MAX_ROWS parts, and the mean of its finite losses, or None."""
    width = -(-len(steps) // _MAX_ROWS)
    parts = [steps[start : start + width] for start in range(0, len(steps), width)]
    losses = [values_of(part, "loss") for part in parts]
    return [
        (part[-1]["step"] or 0.0, statistics.fmean(of_part) if of_part else None)
        for part, of_part in zip(parts, losses, strict=True)
    ]


def _settings_table(subject: CardSubject, run: Run) -> Table | None:
    shown = courses(run.settings, run.changes, _without_secrets)
    changed = {change.name for change in run.changes or ()} - _PRIVATE
    differing = {name for name, value in run.settings.items() if value != subject.defaults.get(name)} - _ELSEWHERE
    rows = [[text(name), _value(value)] for name, value in shown.items() if name in differing | changed]
    note = f"Those that are not the defaults of fsdp-shard{', or that have changed' if changed else ''}."
    if run.changes is None:
        note += " They are those of this step: whether earlier ones had others is not recorded."
    return Table("settings", "", ("setting", "value"), rows, note) if rows else None


def _without_secrets(name: str, value: str) -> str:
    """A setting as the card shows it. A number is never a secret, whatever its name, such as train.sample_tokens."""
    return value if value.isdecimal() else shown_setting(name, redact_setting(name, value))


def _value(value: str) -> Cell:
    shown = one_line(without_directories(value))
    return text(shown if len(shown) <= _MAX_VALUE else f"{shown[:_MAX_VALUE]}...")


def _class(subject: CardSubject) -> tuple[str, str | None]:
    """The transformers class that loads the model with its head, and the hub's name of its task."""
    import transformers

    name = subject.architectures[0] if subject.architectures else ""
    settings = subject.run.settings if subject.run else {}
    task = settings.get("model.task") or _task_of(name) or _ADAPTER_TASKS.get(subject.adapter_task or "")
    is_model = hasattr(getattr(transformers, name, None), "from_pretrained")
    return _TASKS.get(task or "", (name if is_model else "AutoModel", None))


def _task_of(architecture: str) -> str | None:
    """The `model.task` of a class, by the end of its name or transformers' lists; None if it has no such head."""
    from transformers.models.auto import modeling_auto

    listed = {
        CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        SEQ2SEQ: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MASKED_LM: modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    by_end = (task for task, (loader, _) in _TASKS.items() if architecture.endswith(loader.removeprefix("AutoModel")))
    return next(by_end, None) or next((task for task, names in listed.items() if architecture in names.values()), None)


def _loading(subject: CardSubject) -> str:
    base, loader, where = subject.adapter_base, _class(subject)[0], _where(subject.target)
    imports, made = [f"from transformers import {loader}"], [f"model = {loader}.from_pretrained({where})"]
    of_adapter = _ADAPTER_TASKS.get(subject.adapter_task or "")
    if base and of_adapter is not None and _TASKS[of_adapter][0] == loader:
        peft_loader = loader.replace("AutoModel", "AutoPeftModel")
        imports, made = [f"from peft import {peft_loader}"], [f"model = {peft_loader}.from_pretrained({where})"]
    elif base:
        imports = ["from peft import PeftModel", *imports]
        made = [f'base = {loader}.from_pretrained("{base}")', f"model = PeftModel.from_pretrained(base, {where})"]
    lines = ["```python", *imports, "", *made, "```"]
    if loader.endswith("ForCausalLM") and subject.target.revision is None:
        on = f" base={base}" if base else ""
        lines += ["", "```", f'fsdp-shard generate checkpoint={subject.repo_id}{on} prompt="Once upon a time"', "```"]
    return "\n".join(lines)


def _where(target: HubTarget) -> str:
    """The arguments of from_pretrained."""
    return f'"{target.repo_id}"' + (f', revision="{target.revision}"' if target.revision else "")


def _safe(shown: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    return _without_links(escape_markdown(one_line(shown)))


def _table(table: Table) -> str:
    return _without_links(markdown_table(table))


def _without_links(shown: str) -> str:
    """Escaped text in which no address turns into a link."""
    return shown.replace("://", ":\\//").replace("www.", "www\\.")
