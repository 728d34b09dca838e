"""Trackers, profiles, MFU and determinism by themselves; `finetune` with them is in tests/end_to_end/test_watch.py."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, Interrupted, LossError
from fsdp_shard.models import ModelConfig
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.logging import trackers as trackers_module
from fsdp_shard.training.logging.mfu import flops_per_token, num_matmul_params, trains_every_token
from fsdp_shard.training.logging.profiler import profile_step
from fsdp_shard.training.logging.trackers import Trackers, check_trackers, public_settings
from fsdp_shard.training.seeding import deterministic_algorithms
from fsdp_shard.utils import check
from tests.support.event_files import scalars
from tests.support.tiny import llama_config


def test_figures_reach_tensorboard(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with Trackers(
        ["tensorboard"], "project", tmp_path, {"optim.lr": 0.5, "resume": "auto", "model.path": None}
    ) as found:
        found.log("train", {"step": 1, "loss": 2.5, "grad_norm": None})
        found.log("train", {"step": 2, "loss": 2.25, "grad_norm": 1.0, "sources": {"web": {"tokens": 8}}})
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(1, 2.5), (2, 2.25)],
        "train/grad_norm": [(2, 1.0)],
        "train/sources/web/tokens": [(2, 8.0)],
    }
    (settings,) = (tmp_path / "tensorboard").glob("*/hparams.yml")
    assert "optim.lr: 0.5" in settings.read_text()
    assert torch.get_num_threads() == threads


def test_a_tracker_that_fails(tmp_path: Path) -> None:
    """At the start it is an error; later it is left out, and told of once."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"tensorboard could not be started: NotADirectoryError.* remove it"),
        Trackers(["tensorboard"], "project", tmp_path / "file", {}),
    ):
        pass
    notes: list[str] = []
    with Trackers(["tensorboard"], "project", tmp_path, {}, notes.append) as found:
        found.log("train", {"step": "no step", "loss": 2.5})
        found.log("train", {"step": 2, "loss": 2.5})
    assert len(notes) == 1
    assert notes[0].startswith("tensorboard failed and is no longer updated")
    assert scalars(tmp_path / "tensorboard") == {}


def _wait_for_the_next_second() -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second they were made in."""
    time.sleep(1 - time.time() % 1)


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    for resumed, loss in ((None, 1.0), (1, 2.0)):
        with Trackers(["tensorboard"], "project", tmp_path, {}, resumed_step=resumed) as found:
            for step in range((resumed or 0) + 1, 4):
                found.log("train", {"step": step, "loss": loss})
        _wait_for_the_next_second()
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(1, 1.0), (2, 2.0), (3, 2.0)]}


def test_a_run_that_starts_over_shows_its_own_steps_only(tmp_path: Path) -> None:
    for steps, loss in ((range(6), 1.0), (range(3), 2.0)):
        with Trackers(["tensorboard"], "project", tmp_path, {}) as found:
            for step in steps:
                found.log("train", {"step": step, "loss": loss})
        _wait_for_the_next_second()
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(0, 2.0), (1, 2.0), (2, 2.0)]}


def test_mlflow_has_one_run_of_a_resumed_one_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    ends: list[tuple[BaseException | None, str]] = [
        (Interrupted("Stopped.", signal_number=15), "KILLED"),
        (LossError("loss nan"), "FAILED"),
        (None, "FINISHED"),
    ]
    for number, (error, status) in enumerate(ends):
        settings = {"train.steps": number}  # mlflow refuses other parameters for a run
        trackers = Trackers(["mlflow"], "project", tmp_path, settings, resumed_step=number or None)
        with suppress(Interrupted, LossError), trackers as found:
            found.log("held_out", {"step": number, "sets": {"a&b (new)": {"loss": 2.5}}})
            found.log("samples", {"step": number, "hello": "hello, world"})
            if error is not None:
                raise error
        (run,) = mlflow.search_runs(experiment_names=["project"], output_format="list")
        assert run.info.status == status
        assert run.data.metrics == {"held_out/sets/a_b _new_/loss": 2.5}
        known = json.loads((tmp_path / "trackers.json").read_text())
        assert known == {"run_dir": str(tmp_path), "mlflow": run.info.run_id}
    shutil.copytree(tmp_path, tmp_path / "copy")
    with Trackers(["mlflow"], "project", tmp_path / "copy", {}, resumed_step=2):
        pass
    assert len(mlflow.search_runs(experiment_names=["project"], output_format="list")) == 2


_LOG_TO_TRACKIO = """
import sys
from pathlib import Path
from fsdp_shard.training.logging.trackers import Trackers

first, second = (Path(sys.argv[1]) / sweep / "0" for sweep in ("a", "b"))
for directory, resumed_step, steps in ((first, None, (1, 2)), (second, None, (1,)), (first, 2, (3,))):
    directory.mkdir(parents=True, exist_ok=True)
    with Trackers(["trackio"], "project", directory, {}, resumed_step=resumed_step) as found:
        for step in steps:
            found.log("train", {"step": step, "loss": 1.0})
"""


def test_trackio_continues_the_run_of_this_directory(tmp_path: Path) -> None:
    """Although another directory of that name is newer, as in a second sweep."""
    pytest.importorskip("trackio")
    variables = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}  # which it reads when it is imported
    subprocess.run([sys.executable, "-c", _LOG_TO_TRACKIO, tmp_path], env=variables, check=True)
    rows: list[tuple[str, int]] = []
    for file in (tmp_path / "trackio").rglob("*.db"):
        with closing(sqlite3.connect(file)) as database:
            rows += database.execute("select run_id, step from metrics order by rowid")
    assert [step for _, step in rows] == [1, 2, 1, 3]
    assert rows[0][0] == rows[1][0] == rows[3][0] != rows[2][0]


def test_wandb_has_steps_of_its_own() -> None:
    """So that figures of steps that are trained again after a resume are not dropped."""
    calls: list[Any] = []
    run = SimpleNamespace(define_metric=lambda *args, **options: calls.append((args, options)))
    tracker = SimpleNamespace(run=run, log=lambda *args, **options: calls.append((args, options)))
    kind = trackers_module._KINDS["wandb"]
    kind.begin(tracker)
    kind.log(tracker, {"train/loss": 1.0}, 3)
    assert calls == [(("*",), {"step_metric": "step"}), (({"train/loss": 1.0, "step": 3},), {})]


def test_wandb_uploads_no_command_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp-shard", "finetune", "data.path=https://a/b?X-Amz-Signature=abcdef"])
    assert trackers_module._wandb_settings() == {"settings": {"x_disable_meta": True}}
    monkeypatch.setattr(sys, "argv", ["fsdp-shard", "finetune", "data.path=https://a/b"])
    assert trackers_module._wandb_settings() == {}


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    with Trackers([], "project", tmp_path, {}) as found:
        found.log("train", {"step": 1, "loss": 2.5})
    assert list(tmp_path.iterdir()) == []


def test_trackers_that_cannot_be() -> None:
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match=r"tensorbord is not one of tensorboard, wandb.*did you mean tensorboard"):
        check_trackers(["tensorbord"])
    missing = next(name for name in ("trackio", "mlflow", "wandb") if not _installed(name))
    with pytest.raises(ConfigError, match=rf"needs {missing}, which is not installed.*\[{missing}\]"):
        check_trackers(["tensorboard", missing])


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_no_secret_is_passed_on() -> None:
    config = FinetuneConfig()
    config.model.path = "https://someone:pass@host/model"
    config.data = DataConfig(path="hf_" + "a1" * 17)
    found = public_settings(config)
    assert found["model.path"] == "https://***@host/model"
    assert found["data.path"] == "hf_***"
    assert found["train.global_batch_size"] == 8
    assert found["train.profile"] == "[]"
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in found.values())

    from dataclasses import make_dataclass

    names = ["hub_token", "token", "api_key", "password", "num_tokens_seen", "tokenizer", "key_value"]
    secrets = make_dataclass("Secrets", [(name, str) for name in names])("a", "b", "c", "d", "e", "f", "g")
    assert [name for name, value in public_settings(secrets).items() if value == "***"] == names[:4]


def test_only_the_named_steps_are_profiled(alone: DistributedContext, tmp_path: Path) -> None:
    import gzip

    weight = torch.randn(64, 64, requires_grad=True)
    for step in (1, 2, 3):
        with profile_step([2], str(tmp_path), alone, step):
            (weight @ weight).sum().backward()
        assert (tmp_path / "profile").exists() == (step >= 2)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step-00000002-rank-0.json.gz",
        "step-00000002-rank-0.txt",
    ]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "step-00000002-rank-0.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::matmul") == 1, "of one step"
    assert "[memory]" in names
    assert "By memory" in (tmp_path / "profile" / "step-00000002-rank-0.txt").read_text()


def test_steps_to_profile_are_steps_of_the_run() -> None:
    check(TrainConfig(steps=12, profile=[1, 12]))
    with pytest.raises(ConfigError, match="names step 13, but steps go from 1 to steps=12"):
        check(TrainConfig(steps=12, profile=[10, 13]))


def test_operations_of_a_token() -> None:
    """Counted by torch itself in a forward and a backward pass, of which the first layer's input needs no gradient."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config = llama_config(tied=False, layers=3)
    config.num_key_value_heads = 3
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    num_params = num_matmul_params(config, sum(p.numel() for p in model.parameters()))
    expected = flops_per_token(config, num_params, 64)
    assert expected is not None
    assert counter.get_total_flops() / 64 == pytest.approx(expected, rel=0.02)
    for experts in (
        {"num_local_experts": 8},
        {"moe_num_experts": 8},
        {"ffn_config": SimpleNamespace(moe_num_experts=8)},
    ):
        assert flops_per_token(llama_config_with(**experts), num_params, 64) is None
    assert flops_per_token(PretrainedConfig(), 1, 64) is None


def llama_config_with(**settings: Any) -> Any:
    config = llama_config()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def test_utilization_is_known_where_every_token_is_trained() -> None:
    def known(task: str = "causal_lm", **data: Any) -> bool:
        return trains_every_token(FinetuneConfig(model=ModelConfig(path="m", task=task), data=DataConfig(**data)))

    assert known(path="a.txt")
    assert known(path="a.txt", packing=True)
    assert not known(path="a.jsonl", kind="instruction")
    assert not known(path="a.txt", task="masked_lm")
    assert not known(path="", mixture={"a": {"path": "a.txt"}, "b": {"path": "b.jsonl", "kind": "chat"}})


def test_deterministic_algorithms_and_back() -> None:
    def state() -> tuple[Any, ...]:
        cudnn = torch.backends.cudnn
        deterministic = torch.are_deterministic_algorithms_enabled()
        return deterministic, cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    before = state()
    with deterministic_algorithms(True):
        assert state() == (True, True, ":4096:8")
        assert math.isnan(torch.empty(7).sum().item()), "what would be left over from before is marked"
    assert state() == before
    with deterministic_algorithms(False):
        assert state() == before
