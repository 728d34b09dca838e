"""Runs the shipped recipes from Python, with the settings of the command line; returns the figures."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsdp_shard.checkpoint import SourceSettings
from fsdp_shard.cli.run_recipe import Recipe, load_recipe, run_jobs
from fsdp_shard.config import COMMANDS, GenerateConfig, PlanConfig, RunConfig, refuse_flags
from fsdp_shard.distributed import joined_rank
from fsdp_shard.errors import ConfigError, RunError
from fsdp_shard.planning import PlanResult, check_plan, plan_run
from fsdp_shard.utils import RESULT, shipped_directory

_running = threading.RLock()  # what a run uses is the process's: generators of random numbers, the group of its ranks


def finetune(settings: Sequence[str]) -> dict[str, Any]:
    """Fine-tune a model with `recipes/finetune.py`, like `fsdp-shard finetune`.

    If torchrun, srun or Ray Train started this process as one of several ranks, call it on all of them, and it joins
    them. Otherwise, `launch.ranks=2` and `launch.max_restarts=1` start ranks: new processes that import the calling
    script, whose own work must therefore be under `if __name__ == "__main__":`.

    Args:
        settings: Settings as on the command line, such as "model.path=DIR"; a user's preset, a .yaml file, may
            be the first.

    Returns:
        The figures of result.json, such as `final_loss` and `checkpoint`; with several ranks, only the first receives
        them.

    Raises:
        FsdpShardError: The error that the command would report; Interrupted if the run was asked to stop and has saved
            a step.

    Example:
        >>> import fsdp_shard as fs
        >>> figures = fs.finetune([f"model.path={model}", f"data.path={text}", "train.steps=2", f"run_dir={run_dir}"])
        >>> figures["steps"]
        2
    """
    return _figures(_run("finetune", settings))


def evaluate(settings: Sequence[str]) -> dict[str, Any]:
    """Evaluate a checkpoint of any format with `recipes/evaluate.py`, like `fsdp-shard evaluate`.

    Args:
        settings: Settings as on the command line, such as "checkpoint=RUN@best" and "data.path=FILE". Without
            `run_dir`, no file is left.

    Returns:
        The figures of result.json: `perplexity`, `loss` and `num_tokens`, the `results` of tasks, or the rows of
            `speed`.

    Raises:
        FsdpShardError: What the command would report.

    Example:
        >>> import fsdp_shard as fs
        >>> figures = fs.evaluate([f"checkpoint={model}", f"data.path={text}"])
        >>> [name for name in ("perplexity", "loss", "bits_per_byte") if figures[name] > 0]
        ['perplexity', 'loss', 'bits_per_byte']
    """
    with TemporaryDirectory(prefix="fsdp-shard-") as directory:
        return _figures(_run("evaluate", settings, directory))


def generate(settings: Sequence[str]) -> dict[str, Any]:
    """Generate text from a checkpoint of any format with `recipes/generate.py`, like `fsdp-shard generate`.

    Args:
        settings: Settings as on the command line, such as "checkpoint=RUN" and "prompt=Hello, world". Without
            `run_dir` and `output`, no file is left.

    Returns:
        The figures of result.json, and `completions`: a dict for each prompt, in order, with `prompt`, `completion` and
        `num_new_tokens`. `output` is the file of completions, empty if none is left.

    Raises:
        FsdpShardError: What the command would report.

    Example:
        >>> import fsdp_shard as fs
        >>> made = fs.generate([f"checkpoint={model}", "prompt=Once", "generation.max_new_tokens=3"])
        >>> [row["prompt"] for row in made["completions"]]
        ['Once']
    """
    with TemporaryDirectory(prefix="fsdp-shard-") as directory:
        figures = _figures(_run("generate", settings, directory))
        if not figures:
            return {"completions": []}
        file = Path(figures["output"])
        rows = [json.loads(row) for row in file.read_bytes().splitlines()]  # text has other ends of lines, too
        kept = "" if file.is_relative_to(directory) else figures["output"]
        return figures | {"output": kept, "completions": rows}


def plan(settings: Sequence[str]) -> dict[str, Any]:
    """Plan the memory and the step time of a run from its configs alone, like `fsdp-shard plan`; writes no files.

    With `device.memory` or a preset, a run that does not fit starts a search for settings that fit, which may take
    minutes. Leave both out to compare only `peak_bytes` of several plans.

    Args:
        settings: Settings as on the command line, such as "model.path=DIR", "launch.ranks=8" and "device=h100"; with
            "run_dir=RUN", the plan of resuming that run.

    Returns:
        The figures that the command writes to result.json. Among them are `peak_bytes` of the rank with most, and
        `per_rank`; `fits`, None if the memory of the devices is not known; `refused`, the error with which `finetune`
        would refuse the settings, or None; `advice`, settings that fit; and `step` with `tokens`, `flops` and, for a
        known device, `time`: `seconds`, `tokens_per_second` and `bound_by`. A run that does not fit is not an error.

    Raises:
        FsdpShardError: What the command would report.

    Example:
        >>> import fsdp_shard as fs
        >>> figures = fs.plan([f"model.path={model}", "launch.ranks=2", "launch.device=cpu"])
        >>> figures["peak_bytes"] > 0
        True
    """
    plans: list[PlanResult] = []

    def work(config: PlanConfig) -> None:
        plans.append(plan_run(config))
        if config.kept_run_dir is not None and not plans[0].resumes:
            raise ConfigError(f"run_dir={config.run_dir} has no run to resume, and fs.plan writes no files; remove it.")

    _run("plan", settings, recipe=Recipe(PlanConfig, work, check_plan, writes_config=True))
    return dict(plans[0].figures)


def _run(
    command: str, settings: Sequence[str], run_dir: str | None = None, recipe: Recipe[Any] | None = None
) -> RunConfig:
    """Run a recipe in this process, or in ranks that it starts.

    Args:
        command: The command.
        settings: Its settings.
        run_dir: The run directory if neither the settings nor a preset among them defines one.
        recipe: The recipe; by default the shipped one.

    Returns:
        The config.
    """
    refuse_flags(settings, command)

    def find() -> Recipe[Any]:
        return recipe or load_recipe(shipped_directory("recipes") / f"{command}.py")

    def settle(config: RunConfig) -> None:
        if isinstance(config, GenerateConfig) and config.is_conversation:
            raise ConfigError(
                "chat=true alone is a conversation, which is for the terminal; add prompt=TEXT or prompts=FILE."
            )
        if run_dir is not None and config.is_default_run_dir:
            config.run_dir, config.is_default_run_dir = run_dir, False
            if isinstance(config, SourceSettings):
                config.leaves_files = False

    try:
        with _running, _as_in_a_process_of_its_own():
            jobs = run_jobs(COMMANDS[command], find, settings, command, owns_process=False, settle=settle)
    except SystemExit as leaving:
        raise RunError("Another rank found an error, and reports it.") from leaving
    finally:
        if COMMANDS[command].rank_mode == "started":
            gc.collect()  # reference cycles hold the model, the optimizer, process groups and data workers
    return jobs[0].config


@contextmanager
def _as_in_a_process_of_its_own() -> Iterator[None]:
    """Run with torch's defaults instead of the caller's, and preserve the caller's random state.

    A command is what its settings say: its figures do not depend on the default dtype or device of who calls it, nor
    on autocast, and it seeds all generators.
    """
    import numpy as np
    import torch

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    states = random.getstate(), np.random.get_state()
    on_gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=on_gpus),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        nullcontext() if device.type == "cpu" else torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _figures(config: RunConfig) -> dict[str, Any]:
    """Read the figures that the first rank writes last; other ranks may be here earlier."""
    if joined_rank() > 0:
        return {}
    found: dict[str, Any] = json.loads((Path(config.run_dir) / RESULT).read_text(encoding="utf-8"))
    return found
