"""Settings of `finetune` on a GPU: each trains, and its losses in float32 are those on the CPU."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_shard as fs
from fsdp_shard.config import compose_jobs
from tests.gpu.child import Bench, apart
from tests.gpu.device import IS_REHEARSAL
from tests.gpu.models import written

check = pytest.mark.check
_REHEARSED = ("plain", "dpo", "distill computed")

_DRAWN = ("neftune",)  # their losses differ from the CPU's, as other random numbers are drawn
_HALF = ("norms_in_float32",)  # these compute in bfloat16
# The CPU has its losses without these: the first two need a GPU, and it compiles for a minute.
_ONLY_ON_GPUS = ("shard.activation_offload=true", "shard.cpu_offload=true", "shard.compile=true")
_SETTINGS: dict[str, list[str]] = {
    "plain": [],
    "fsdp1": ["shard=fsdp1"],
    "ddp": ["shard=ddp"],
    "packing": ["data.packing=true"],
    "logits": ["model.chunked_loss=false"],
    "chunks": ["model.chunked_loss=true"],
    "eager attention": ["model.attention=eager"],
    "checkpointing": ["shard.activation_checkpointing=true"],
    "selective": ["shard.activation_checkpointing=selective"],
    "activation_offload": ["shard.activation_offload=true"],
    "cpu_offload": ["shard.cpu_offload=true"],
    # In one micro-batch: this wrapper keeps the gradients of the last only.
    "fsdp1 cpu_offload": ["shard=fsdp1", "shard.cpu_offload=true", "optim=muon", "train.micro_batch_size=4"],
    "norms_in_float32": ["shard.norms_in_float32=true"],
    "accumulation": ["train.micro_batch_size=1", "shard.sync_every_micro_batch=false"],
    "compile": ["shard.compile=true"],
    "ema": ["train.ema_decay=0.9"],
    "neftune": ["train.neftune_alpha=5"],
    "adafactor": ["optim=adafactor"],
    "muon": ["optim=muon"],
    "sgd": ["optim=sgd"],
    "adamw8bit": ["optim=adamw8bit"],
    "lora": ["adapter=lora"],
    "dora": ["adapter=lora", "adapter.dora=true"],
    "pissa": ["adapter=lora", "adapter.init=pissa"],
    "nf4": ["adapter=lora", "adapter.quantize=nf4"],
    "int8": ["adapter=lora", "adapter.quantize=int8"],
    "dpo": ["objective=dpo"],
    "dpo sharded": ["objective=dpo", "objective.reference=sharded"],
    "dpo lora": ["objective=dpo", "adapter=lora"],
    "orpo": ["objective=orpo"],
    "kto": ["objective=kto"],
    "simpo": ["objective=simpo"],
    "reward": ["objective=reward", "model.task=sequence_classification", "model.labels=[reward]"],
    "distill": ["objective=distill", "objective.top_k=20"],
    "distill computed": ["objective=distill", "objective.top_k=20", "objective.teacher_logits=computed"],
}


def _data(bench: Bench) -> dict[str, str]:
    """A text and pairs of answers; their paths."""
    draw = random.Random(0)
    paths = {name: str(bench.directory / name) for name in ("words.txt", "pairs.jsonl")}

    def words(count: int) -> str:
        return " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(count))

    rows = [{"prompt": words(3), "chosen": words(4), "rejected": words(4)} for _ in range(16)]
    Path(paths["pairs.jsonl"]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path(paths["words.txt"]).write_text("\n\n".join(words(40) for _ in range(20)), encoding="utf-8")
    return paths


def _overrides(name: str, kind: str, model: Path, data: Mapping[str, str], directory: Path) -> list[str]:
    own = [setting for setting in _SETTINGS[name] if kind != "cpu" or setting not in _ONLY_ON_GPUS]
    is_preference = any(f"objective={word}" in own for word in ("dpo", "orpo", "kto", "simpo", "reward"))
    common = [
        f"model.path={model}",
        f"data.path={data['pairs.jsonl' if is_preference else 'words.txt']}",
        f"data.cache_dir={directory}/tokens {name} {kind}",
        "data.sequence_length=48",
        "train.steps=3",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "optim.lr=1e-3",
        "checkpoint.every=3",
        f"launch.device={kind}",
        f"run_dir={directory}/{name} {kind}",
    ]
    if is_preference:
        common.append("data.kind=preference")
    if name not in ("ddp", *_HALF):
        common.append("shard.param_dtype=float32")
    if "objective=distill" in own:
        common.append(f"objective.teacher={model}")
    return [*common, *own]


def _train_all(jobs: Mapping[str, tuple[list[str], Path]], out: Connection) -> None:
    """Train one after the other in this process, and send the losses of each, or what is wrong."""
    for name, (overrides, run_dir) in jobs.items():
        out.send((name, *_trained(overrides, run_dir)))
    out.close()
    os._exit(0)


def _trained(overrides: list[str], run_dir: Path) -> tuple[list[float], str]:
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):  # noqa: SIM117
            with contextlib.redirect_stdout(nowhere):
                fs.finetune(overrides)
        rows = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(row)["loss"] for row in rows], ""
    except BaseException:
        return [], traceback.format_exc().strip().splitlines()[-1]


def _results(jobs: Mapping[str, Mapping[str, tuple[list[str], Path]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The losses and the problem of each job on each kind of device; a process each, as one takes long to start."""
    context: Any = multiprocessing.get_context(multiprocessing.current_process().name.partition(":")[0])
    running: dict[str, Connection] = {}
    for kind, its in jobs.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train_all, args=(its, sender), name=multiprocessing.current_process().name)
        process.start()
        sender.close()
        running[kind] = receiver
    found: dict[str, dict[str, Any]] = {}
    while running:
        ready = multiprocessing.connection.wait(list(running.values()))
        for kind, receiver in [(kind, each) for kind, each in running.items() if each in ready]:
            try:
                name, losses, problem = receiver.recv()
            except EOFError:
                del running[kind]
                continue
            of_name = found.setdefault(name, {})
            of_name[kind] = losses, problem
            if len(of_name) == len(jobs):
                yield name, of_name


@check(seconds=200, concurrent="all")
def test_settings_have_the_losses_of_the_cpu(bench: Bench) -> None:
    if not all(bench.has("settings", package) for package in ("hydra", "omegaconf", "datasets", "pyarrow", "pandas")):
        return
    model, data = apart(written, bench.directory, "5M", None, bench.device.torch_device), _data(bench)
    names = [name for name in _SETTINGS if not IS_REHEARSAL or name in _REHEARSED]
    kinds = ["cpu"] if IS_REHEARSAL else ["cpu", bench.device.type]
    jobs = {
        kind: {
            name: (_overrides(name, kind, model, data, bench.directory), bench.directory / f"{name} {kind}")
            for name in names
        }
        for kind in kinds
    }
    finished = 0
    for name, found in _results(jobs):
        finished += 1
        (expected, problem), (losses, other) = found["cpu"], found[kinds[-1]]
        wrong = other or problem
        if "not installed" in wrong:
            bench.record(f"setting {name}", None, note=wrong)
            continue
        if wrong:
            bench.record(f"setting {name}", math.inf, "relative", at_most=1e-3, note=wrong[:400], exact=True)
            continue
        assert len(losses) == 3, losses
        worst = max(abs(one - two) / abs(two) for one, two in zip(losses, expected, strict=True))
        limit = {**dict.fromkeys(_DRAWN), **dict.fromkeys(_HALF, 1e-2)}.get(name, 1e-3)
        bench.record(f"setting {name}: losses beside the CPU", worst, "relative", at_most=limit, exact=True)
    bench.record("settings that were tried", finished, f"of {len(names)}", at_least=len(names), exact=True)


@pytest.mark.long
def test_a_gpu_takes_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `finetune` checks before it begins, without a GPU and for settings that the CPU is not given, too."""
    for module in ("hardware", "launcher"):
        monkeypatch.setattr(f"fsdp_shard.distributed.{module}.count_gpus", lambda: 1)
    model, data = written(tmp_path, "5M", None, torch.device("cpu")), _data(Bench(tmp_path))
    for name in _SETTINGS:
        if name == "adamw8bit" and find_spec("torchao") is None:
            continue
        (job,) = compose_jobs(fs.FinetuneConfig, _overrides(name, "cuda", model, data, tmp_path), "finetune")
        fs.check_finetune(job.config)
