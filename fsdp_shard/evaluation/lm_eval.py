"""Tasks of EleutherAI's lm-evaluation-harness, for a model that is already loaded.

The harness defines the questions, the prompts, the scoring and the seeds (Gao et al. 2024,
doi:10.5281/zenodo.12608602), so results are comparable with published ones.
"""

import importlib.metadata
import inspect
import json
import logging
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_shard.checkpoint import model_digests
from fsdp_shard.distributed import run_on_main
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.evaluation.config import Figures
from fsdp_shard.evaluation.earlier_results import SAMPLES, remove_earlier
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.harness_model import wrap_for_harness
from fsdp_shard.evaluation.provenance import provenance
from fsdp_shard.utils import format_count, json_digest, nearest, only_errors_of, shipped_directory

TaskManager = Any  # of the harness, which may not be installed


@dataclass(frozen=True, kw_only=True)
class LmEval(EvaluationBase):
    """An evaluation by the harness; `loaded` is the result of `manager.load`."""

    manager: TaskManager
    loaded: Mapping[str, Any]

    @property
    def num_questions(self) -> dict[str, int]:
        """Number of questions of each task."""
        most = self.settings.lm_eval.limit or sys.maxsize
        return {name: min(len(task.eval_docs), most) for name, task in self.loaded["tasks"].items()}

    def describe(self) -> str:
        """Number of questions and tasks."""
        limit = self.settings.lm_eval.limit
        asked = self.num_questions.values()
        part = "" if limit is None else f" (lm_eval.limit={limit}: not a figure to publish)"
        drawn = "\nexamples before questions are drawn on each rank, so they depend on the number of ranks"
        own = drawn if self._draws_on_each_rank else ""
        return f"{sum(asked)} questions of {format_count(len(asked), 'task')}{part}{own}"

    def measure(self, load: LoadModel) -> Figures:
        """Ask the model all questions; `row["results"]` uses the harness's names: {task: {"acc,none": 0.5, ...}}."""
        from lm_eval import simple_evaluate
        from lm_eval.utils import make_table

        if self.ranks.is_main:
            remove_earlier(self.run_dir)
        asked, model = self.settings.lm_eval, load(self.settings.source)
        known = run_on_main(self.ranks, self._provenance)
        start = time.perf_counter()
        with only_errors_of("lm_eval"):  # it warns about every model that is already loaded
            wrapped = wrap_for_harness(model, self.tokenizer, self.settings.batch_size, self.ranks)
        with only_errors_of("lm_eval", logging.WARNING):  # such as about truncated prompts
            results: Any = simple_evaluate(
                wrapped,
                use_cache=self._cache(known) if asked.cache else None,
                tasks=asked.names,  # loaded already
                num_fewshot=asked.num_fewshot,
                limit=asked.limit,
                log_samples=asked.save_samples,
                apply_chat_template=asked.chat_template,
                task_manager=self.manager,
            )
        seconds = time.perf_counter() - start
        if not self.ranks.is_main:
            return Figures("", {})  # the harness collects the results of all ranks on rank 0
        for name, rows in results.get("samples", {}).items():
            in_order = sorted(rows, key=lambda row: int(row["doc_id"]))  # with several ranks
            _write_samples(self.run_dir / SAMPLES / f"{name.replace('/', '_')}.jsonl", in_order)
        groups = [make_table(results, "groups")] if results.get("groups") else []
        row = {
            "results": results["results"],
            "groups": results.get("groups", {}),
            "num_samples": {name: counts["effective"] for name, counts in results["n-samples"].items()},
            "num_fewshot": results["n-shot"],
            "versions": results["versions"],
            "lm_eval": importlib.metadata.version("lm_eval"),
            "seconds": seconds,
            "provenance": known,
        }
        return Figures("\n".join([make_table(results).rstrip(), *groups]).rstrip(), _plain(row))

    def _provenance(self) -> dict[str, Any]:
        settled: dict[str, Any] = {"lm_eval": asdict(self.settings.lm_eval)}
        if self._draws_on_each_rank:
            settled["num_ranks"] = self.ranks.world_size
        return provenance(self, settled)

    @property
    def _draws_on_each_rank(self) -> bool:
        """Whether ranks use other few-shot examples than one process, as each rank draws those of its questions."""
        asked = self.settings.lm_eval.num_fewshot
        counts = [task.config.num_fewshot if asked is None else asked for task in self.loaded["tasks"].values()]
        return self.ranks.world_size > 1 and any(counts)

    def _cache(self, known: dict[str, Any]) -> str:
        """The prefix of the files that cache answers of these weights under these settings."""
        settings = {"dispatch": known["settings"]["dispatch"], "lm_eval": importlib.metadata.version("lm_eval")}
        model, versions = model_digests(known["weights"]), known["versions"]
        parts = [model, known["generation_config"], known["tokenizer"], settings, versions, self.settings.batch_size]
        digest = json_digest(parts)
        return str(self.run_dir / "lm_eval_cache" / digest)


def open_tasks(base: EvaluationBase) -> LmEval:
    """Load the tasks that `settings.lm_eval` names, with their questions.

    Raises:
        ConfigError: A task does not exist, is not supported here, or has fewer questions than there are ranks.
        DataError: The questions cannot be read.
    """
    asked, ranks = base.settings.lm_eval, base.ranks
    if asked.include_path is not None and not Path(asked.include_path).is_dir():
        raise ConfigError(
            f"lm_eval.include_path={asked.include_path} is not a directory; give one with YAML files of tasks."
        )
    if asked.chat_template and not base.tokenizer.chat_template:
        raise ConfigError("lm_eval.chat_template=true, but the model's tokenizer has no chat template; remove it.")
    with only_errors_of("lm_eval"):
        own = [asked.include_path] if asked.include_path is not None else []
        manager = _task_manager([str(shipped_directory("conf") / "lm_eval"), *own])
        loaded = _load(manager, _matching_tasks(asked.names, manager))
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(f"lm_eval.tasks: {name} runs code that the model writes, which evaluate never does.")
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"lm_eval.tasks: {name} asks about images, and evaluate asks text questions only.")
        if asked.num_fewshot and task.config.num_fewshot == 0:  # the harness ignores it then
            raise ConfigError(
                f"lm_eval.num_fewshot={asked.num_fewshot} has no effect on {name}, which is defined without examples; "
                f"remove it, or evaluate {name} separately."
            )
    found = LmEval(**vars(base), manager=manager, loaded=loaded)
    rolling = [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE == "loglikelihood_rolling"]
    if asked.cache and rolling and ranks.world_size > 1:
        raise ConfigError(
            f"lm_eval.cache=true cannot be used with {ranks.world_size} ranks for {rolling[0]}, a task of "
            f"loglikelihood_rolling: the harness has ranks wait for each other there. Remove it, or start one rank."
        )
    for name, count in found.num_questions.items():
        if count < ranks.world_size:
            raise ConfigError(
                f"lm_eval.tasks: {name} asks {format_count(count, 'question')}, which {ranks.world_size} ranks cannot "
                f"divide; start fewer ranks (launch.ranks)."
            )
    return found


def _task_manager(directories: list[str]) -> TaskManager:
    """The harness's task manager for its tasks and those in `directories`, which loads tasks only once.

    Some tasks shuffle their answers when they are loaded, and again each time their questions are listed. The harness
    seeds Python's and numpy's generators, and then loads tasks. The first `load` does both, and the one by the harness
    leaves the generators as the first one has.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    seeds = inspect.signature(simple_evaluate).parameters

    class LoadsOnce(TaskManager):  # type: ignore[misc]  # the harness has no types
        known: tuple[Any, Any, Any] | None = None

        def load(self, task_list: Any) -> Any:
            if self.known is None:
                random.seed(seeds["random_seed"].default)
                np.random.seed(seeds["numpy_random_seed"].default)
                self.known = super().load(task_list), random.getstate(), np.random.get_state()
            loaded, python_state, numpy_state = self.known
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            return loaded

    return LoadsOnce(include_path=directories)


def _matching_tasks(names: list[str], manager: TaskManager) -> list[str]:
    """The tasks that `names` match, each once."""
    found: dict[str, None] = {}
    for name in names:
        if not (matching := manager.match_tasks([name])):
            near = nearest(name, manager.all_tasks)
            raise ConfigError(f"lm_eval.tasks: there is no task {name}{near}; `lm_eval ls tasks` lists all.")
        found.update(dict.fromkeys(matching))
    return list(found)


def _load(manager: TaskManager, names: list[str]) -> Any:
    try:
        return manager.load(names)
    except Exception as error:  # from `datasets`, the hub, a YAML file or a task's own code
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"lm_eval.tasks={','.join(names)}: the questions cannot be read: {type(error).__name__}: {reason}. "
            f"Check that the hub can be reached, or give tasks with your own data by lm_eval.include_path."
        ) from error


def _write_samples(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _plain(value: dict[str, Any]) -> Any:
    """Convert `value` to JSON types: numpy numbers to Python's, and those that are not finite to null."""
    return json.loads(json.dumps(value, default=lambda number: number.item()), parse_constant=lambda name: None)
