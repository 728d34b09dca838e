"""The settings that differ between the runs of a sweep, and a final table of their figures."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from fsdp_shard import checkpoint, config as configs, training
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import RESULT, format_size, format_table, in_yaml, is_remote, read_json, walk

if TYPE_CHECKING:  # `Job` imports Hydra, which --help does not need
    from fsdp_shard.config import Job, RunConfig

_WIDTH = 40  # of a value
# Settings that name what a run writes to, and what a later run of the sweep would do there.
_WRITTEN = {
    "checkpoint.remote": "resume from the checkpoints of the one before",
    "target": "replace the checkpoint of the one before",
    "output": "find the completions of the one before",
}


def varied_settings(jobs: Sequence[Job[Any]]) -> list[dict[str, str]]:
    """For each run, the settings and options that differ between runs, by name."""
    given = [dict(override.lstrip("+").split("=", 1) for override in job.overrides if "=" in override) for job in jobs]
    names = [name for name in given[0] if len({overrides.get(name) for overrides in given}) > 1]
    settings = [{name: in_yaml(value) for name, _, value in walk(job.config)} for job in jobs]
    return [
        # group=option is not a setting
        {name: shorten(values.get(name, overrides.get(name, "")), _WIDTH, placeholder="...") for name in names}
        for values, overrides in zip(settings, given, strict=True)
    ]


def refuse_other_sweep(jobs: Sequence[Job[Any]]) -> None:
    """Raise ConfigError if a run would continue one with other values of the varied settings: the table would be wrong.

    Args:
        jobs: The runs, before the first one begins.
    """
    for job, settings in zip(jobs, varied_settings(jobs), strict=True):
        config = job.config
        store = checkpoint.StepStore(Path(config.run_dir) / checkpoint.CHECKPOINTS)
        if not isinstance(config, configs.FinetuneConfig) or not config.writes or (step := store.latest()) is None:
            continue
        changes = training.settings_changed_since(config, store.path(step)) or []
        # adapter.path is recorded as the step that it resolved to, and a resume compares its values.
        other = [change for change in changes if change.split()[0] in settings.keys() - {"adapter.path"}]
        if other:
            raise ConfigError(
                f"Run {_number(job)} of this sweep would continue the run in run_dir={config.run_dir}, whose settings "
                f"were others ({', '.join(other)}), and the table would show figures of both as of one. Give the sweep "
                f"another run_dir."
            )


def refuse_shared(jobs: Sequence[Job[Any]]) -> None:
    """Raise ConfigError if runs write to the same place other than run_dir, which has the number of each run.

    Args:
        jobs: The runs, before the first begins.
    """
    for name, effect in _WRITTEN.items():
        settings = [{key: value for key, _, value in walk(job.config)} for job in jobs]
        given = [value for values in settings if (value := values.get(name)) is not None]
        locations = [
            value.rstrip("/") if is_remote(value) else os.path.abspath(os.path.expanduser(value)) for value in given
        ]
        for value, location in zip(given, locations, strict=True):
            if (count := locations.count(location)) > 1:
                raise ConfigError(
                    f"{name}={value} is that of {count} runs of this sweep, and each would {effect}. Start these runs "
                    f"one by one, each with another {name}."
                )


def sweep_table(jobs: Sequence[Job[Any]], failed: Collection[str]) -> str:
    """Format a row for each run: its varied settings, its headline figures, and its directory.

    Args:
        jobs: The finished runs.
        failed: The run_dir of each that failed.
    """
    # Even a plan that does not fit leaves its figures.
    has_result = [job.config.run_dir not in failed or job.config.rank_mode == "planned" for job in jobs]
    results = [_result(job.config) if has else {} for job, has in zip(jobs, has_result, strict=True)]
    figures = [name for name in jobs[0].config.headline if any(result.get(name) is not None for result in results)]
    changed = varied_settings(jobs)
    rows = [["run", *changed[0], *(name.removesuffix("_bytes") for name in figures), "status", "run_dir"]]
    for job, settings, result in zip(jobs, changed, results, strict=True):
        status = "failed" if job.config.run_dir in failed else "done"
        shown = [_format(name, result.get(name)) for name in figures]
        rows.append([_number(job), *settings.values(), *shown, status, job.config.run_dir])
    return "\n".join(format_table(rows))


def _number(job: Job[Any]) -> str:
    """The number of a run, after which its directory is named."""
    return Path(job.config.run_dir).name


def _result(config: RunConfig) -> dict[str, Any]:
    file = Path(config.run_dir) / RESULT
    return dict(read_json(file)) if file.is_file() else {}


def _format(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return format_size(value)
    return f"{value:.4g}" if isinstance(value, float) else in_yaml(value)
