"""Questions of EleutherAI's lm-evaluation-harness, put to a model that is already here.

Which questions there are, how they are asked and what counts as an answer is the harness's (Gao et al. 2024,
doi:10.5281/zenodo.12608602), with its own seeds, so that figures compare with those of others. Knows no checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.evaluation.config import EvaluateSettings, Figures, LmEvalConfig
from fsdp_shard.utils import nearest

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class LmEval:
    """An evaluation by the harness. `loaded` are its tasks, as `TaskManager.load` gives them."""

    def __init__(
        self,
        settings: LmEvalConfig,
        manager: TaskManager,
        loaded: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        samples_dir: Path,
    ) -> None:
        self._settings, self._manager, self._loaded = settings, manager, loaded
        self._tokenizer, self._batch_size, self._samples_dir = tokenizer, batch_size, samples_dir

    def describe(self) -> str:
        limit = self._settings.limit
        asked = [min(len(task.eval_docs), limit or len(task.eval_docs)) for task in self._loaded["tasks"].values()]
        part = "" if limit is None else f" (lm_eval.limit={limit}: no figure to publish)"
        return f"{sum(asked)} questions of {len(asked)} task{'s' if len(asked) > 1 else ''}{part}"

    def measure(self, model: PreTrainedModel) -> Figures:
        """Ask `model` all questions. `row["results"]` has the harness's own names: {task: {"acc,none": 0.5, ...}}."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.utils import make_table

        start = time.perf_counter()
        with _only_errors():
            results: Any = simple_evaluate(
                HFLM(pretrained=model, tokenizer=self._tokenizer, batch_size=self._batch_size),
                tasks=_top_level(self._loaded),
                num_fewshot=self._settings.num_fewshot,
                limit=self._settings.limit,
                log_samples=self._settings.save_samples,
                apply_chat_template=self._settings.chat_template,
                task_manager=self._manager,
            )
        seconds = time.perf_counter() - start
        for name, rows in results.get("samples", {}).items():
            _write_samples(self._samples_dir / f"{name.replace(os.sep, '_')}.jsonl", rows)
        groups = [make_table(results, "groups")] if results.get("groups") else []
        row = {
            "results": results["results"],
            "groups": results.get("groups", {}),
            "num_samples": {name: counts["effective"] for name, counts in results["n-samples"].items()},
            "num_fewshot": results["n-shot"],
            "versions": results["versions"],
            "lm_eval": importlib.metadata.version("lm_eval"),
            "seconds": seconds,
        }
        return Figures("\n".join([make_table(results).rstrip(), *groups]).rstrip(), _plain(row))


def open_tasks(
    settings: EvaluateSettings, run_dir: str, _: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> LmEval:
    """The tasks that `settings.lm_eval` names, with their questions.

    Raises ConfigError where there is no such task, or none that can be asked here; DataError where its questions cannot
    be had.
    """
    from lm_eval.tasks import TaskManager

    asked = settings.lm_eval
    if asked.include_path is not None and not Path(asked.include_path).is_dir():
        raise ConfigError(
            f"lm_eval.include_path={asked.include_path} is no directory; give one with tasks' YAML files."
        )
    if asked.chat_template and not tokenizer.chat_template:
        raise ConfigError("lm_eval.chat_template=true, but the model's tokenizer has no chat template; leave it out.")
    with _only_errors():
        manager = TaskManager(include_path=asked.include_path)
        loaded = _load(manager, _known(asked.names, manager))
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(f"lm_eval.tasks: {name} runs code that the model writes, which evaluate never does.")
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"lm_eval.tasks: {name} asks about pictures, and evaluate puts questions in words only.")
    return LmEval(asked, manager, loaded, tokenizer, settings.batch_size, Path(run_dir) / "samples")


def _known(names: list[str], manager: TaskManager) -> list[str]:
    """The tasks that `names` are or stand for, each once."""
    found: dict[str, None] = {}
    for name in names:
        if not (matching := manager.match_tasks([name])):
            near = nearest(name, manager.all_tasks)
            raise ConfigError(
                f"lm_eval.tasks: there is no task {name}{near}; `lm_eval ls tasks` lists those there are."
            )
        found.update(dict.fromkeys(matching))
    return list(found)


def _load(manager: TaskManager, names: list[str]) -> Mapping[str, Any]:
    loaded: Mapping[str, Any]
    try:
        loaded = manager.load(names)
    except Exception as error:  # whatever `datasets`, the hub, a YAML file or a task's own code has to say
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"lm_eval.tasks={','.join(names)}: the questions cannot be read: {type(error).__name__}: {reason}. Look "
            f"whether the hub can be reached, or give tasks with data of your own by lm_eval.include_path."
        ) from error
    return loaded


def _top_level(loaded: Mapping[str, Any]) -> list[Any]:
    """The loaded tasks and groups that are in no other group, to be handed to the harness as they are."""
    inside = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
    nested = {child.name for group in loaded["groups"].values() for child in group.get_all_groups()}
    groups = [group for name, group in loaded["groups"].items() if name not in nested]
    return [*groups, *(task for name, task in loaded["tasks"].items() if name not in inside)]


def _write_samples(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _plain(value: Any) -> Any:
    """`value` of what JSON has: numpy's numbers as Python's, and null for those that are none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _only_errors() -> Iterator[None]:
    """The harness logs warnings about what is meant here, such as a model that is not given by its name."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
