"""Traced steps: the bytes of real ranks, at any number of ranks, without their memory, and nothing else changed."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig

from fsdp_shard.config import OPTIONS
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import PlannedRun, StepTrace, plan_memory, trace_step
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.training import OBJECTIVES, AdamWConfig, LoraConfig, ObjectiveConfig, TrainConfig
from fsdp_shard.utils import format_size, resident_bytes
from tests.support.live_bytes import measure_run
from tests.support.runs import run_recipe
from tests.support.sampled import sampled
from tests.support.tiny import llama_config

FOUR = TrainConfig(global_batch_size=4)
CHUNKED = ModelConfig(path="x", chunked_loss=True)
LORA = LoraConfig(rank=4)
DPO: Callable[..., ObjectiveConfig] = OBJECTIVES["dpo"]
NF4 = LoraConfig(rank=4, quantize="nf4")
MUON, ADAFACTOR, SGD = (OPTIONS["optim"][name]() for name in ("muon", "adafactor", "sgd"))
TENSOR = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}

# Names of settings that were measured on real ranks -> the settings.
RUNS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp1": {"shard": Fsdp1Config()},
    "ddp": {"shard": DdpConfig(), "train": FOUR},
    "replicas": {"shard": Fsdp2Config(replicas=2), "num_ranks": 4, "train": FOUR},
    "reshard over 2": {"shard": Fsdp2Config(reshard_after_forward=2), "num_ranks": 4, "train": FOUR},
    "muon": {"optim": MUON},
    "recomputed": {"shard": Fsdp2Config(activation_checkpointing=True)},
    "every second": {"shard": Fsdp2Config(activation_checkpointing=2), "sequence_length": 64},
    "selective": {"shard": Fsdp2Config(activation_checkpointing="selective"), "sequence_length": 64},
    "accumulating": {"shard": Fsdp2Config(sync_every_micro_batch=False), "train": TrainConfig(global_batch_size=8)},
    "accumulating shards": {"train": TrainConfig(global_batch_size=6)},
    "packed": {"is_packed": True, "sequence_length": 64},
    "loss in chunks": {"model": CHUNKED, "sequence_length": 64},
    "average": {"train": TrainConfig(global_batch_size=2, ema_decay=0.9)},
    "lora": {"adapter": LORA},
    "nf4": {"adapter": NF4, "sequence_length": 64},
    "nf4 fsdp1": {"adapter": NF4, "shard": Fsdp1Config()},
    "kept and prefetched": {"shard": Fsdp2Config(reshard_after_forward=False, prefetch_forward=2)},
    "adafactor": {"optim": ADAFACTOR},
    "fsdp1, adafactor": {"optim": ADAFACTOR, "shard": Fsdp1Config()},
    "sgd": {"optim": SGD},
    "reference": {"objective": DPO(reference="sharded")},
    "reference without adapter": {"objective": DPO(), "adapter": LORA},
    "tensor": {"shard": Fsdp2Config(tensor_parallel=2), "num_ranks": 4, "layout": TENSOR},
    "ulysses": {"shard": Fsdp2Config(context_parallel=2), "layout": TENSOR, "train": TrainConfig(global_batch_size=1)},
    "experts": {"layout": {"num_local_experts": 4}, "sequence_length": 64},
    "experts in float32": {
        "shard": Fsdp2Config(param_dtype="float32"),
        "layout": {"num_local_experts": 4},
        "sequence_length": 64,
    },
    "expert parallel": {
        "shard": Fsdp2Config(expert_parallel=2),
        "layout": {"num_local_experts": 4},
        "sequence_length": 64,
    },
    "ring": {
        "shard": Fsdp2Config(context_parallel=2, context_method="ring"),
        "sequence_length": 64,
        "train": TrainConfig(global_batch_size=1),
    },
    "packed pairs": {"objective": OBJECTIVES["simpo"](), "is_packed": True, "sequence_length": 64},
}


def tiny(**layout: Any) -> PretrainedConfig:
    """A Llama of 4 layers, whose gate has 85 rows unless `layout` says otherwise; with experts, a Mixtral of 3."""
    if "num_local_experts" in layout:
        return MixtralConfig(
            architectures=["MixtralForCausalLM"], hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=128, max_position_embeddings=128,
            num_experts_per_tok=2, dtype="float32", **layout,
        )  # fmt: skip
    config = llama_config(layers=4)
    config.hidden_size, config.vocab_size = 48, 128
    for name, value in layout.items():
        setattr(config, name, value)
    if layout:
        config.intermediate_size = 128
    return config


def planned(**settings: Any) -> PlannedRun:
    run = PlannedRun(ModelConfig(path="x"), Fsdp2Config(), TrainConfig(global_batch_size=2), AdamWConfig(), 16, 2)
    return replace(run, **settings)


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(RUNS, 5))
def test_a_trace_has_the_bytes_of_real_ranks(name: str) -> None:
    """And so has the formula, which is never below."""
    settings = dict(RUNS[name])
    config, run = tiny(**settings.pop("layout", {})), planned(**settings)
    ranks = (0, run.num_ranks - 1)
    traces = [trace_step(config, run, rank) for rank in ranks]
    measured = measure_run(config, run)
    reals = [measured[rank] for rank in ranks]
    plan = plan_memory(config, run)
    for real, trace in zip(reals, traces, strict=True):
        assert trace.peak_bytes <= (plan.per_rank[trace.rank].peak_bytes or 0) <= 1.03 * trace.peak_bytes
        assert trace.peak_bytes == pytest.approx(real.peak, rel=0.01)
        state = (real.parameters, real.gradients, real.optimizer)
        assert tuple(trace.state_bytes[term] for term in ("parameters", "gradients", "optimizer")) == state
        assert trace.peak_by_phase["forward"] == pytest.approx(real.by_phase["forward"], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("is_packed", [False, True])
def test_labeled_answers_are_traced(is_packed: bool) -> None:
    train = TrainConfig(global_batch_size=8, micro_batch_size=4)
    run = planned(objective=OBJECTIVES["kto"](), is_packed=is_packed, sequence_length=64, train=train)
    trace = trace_step(tiny(), run)
    assert trace.peak_bytes <= (plan_memory(tiny(), run).per_rank[0].peak_bytes or 0) <= 1.03 * trace.peak_bytes


@pytest.fixture(scope="module")
def traced() -> StepTrace:
    return trace_step(tiny(), planned())


def test_a_peak_is_made_of_named_terms(traced: StepTrace) -> None:
    assert list(traced.peak_by_phase) == ["forward", "loss", "backward", "reduce", "optimizer"]
    assert traced.peak_bytes == max(traced.peak_by_phase.values()) == sum(traced.peak.terms.values())
    assert traced.peak.where.startswith("model.layers.")
    assert traced.peak.terms["optimizer"] == traced.state_bytes["optimizer"]
    assert traced.peak.terms["parameters"] == traced.state_bytes["parameters"]
    in_forward = [snapshot.where for snapshot in traced.snapshots if snapshot.phase == "forward" and snapshot.where]
    layers = [f"model.layers.{number}" for number in range(4)]
    assert [where for where in in_forward if "layers" in where] == layers * 2, "two steps"
    assert all(snapshot.terms["gathered"] > 0 for snapshot in traced.snapshots if snapshot.where in layers)


@pytest.mark.long
def test_a_thousand_ranks_are_traced_as_two_are(traced: StepTrace) -> None:
    many = planned(num_ranks=1024, train=TrainConfig(global_batch_size=1024))
    first, last = trace_step(tiny(), many), trace_step(tiny(), many, 1023)
    assert [(m.phase, m.where) for m in first.snapshots] == [(m.phase, m.where) for m in traced.snapshots]
    rows = plan_memory(tiny(), many).per_rank
    assert (first.state_bytes["parameters"], last.state_bytes["parameters"]) == (
        rows[0].parameters_bytes, rows[1023].parameters_bytes
    )  # fmt: skip
    replicas = trace_step(tiny(), replace(many, shard=Fsdp2Config(replicas=512)))
    assert replicas.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.001), "sharded over 2 as well"
    with pytest.raises(ConfigError, match="There is no rank 1024 of 1024"):
        trace_step(tiny(), many, 1024)


def test_offloaded_state_is_in_host_memory(traced: StepTrace) -> None:
    found = trace_step(tiny(), planned(shard=Fsdp2Config(cpu_offload=True)))
    assert found.host_bytes == sum(traced.state_bytes.values()) == sum(found.state_bytes.values())
    assert not found.peak.terms.keys() & {"parameters", "optimizer", "gradients"}
    # What is computed with stays on the device, and the shards of a unit while they are copied there.
    assert found.peak_bytes < traced.peak_bytes - traced.peak.terms["optimizer"] - traced.peak.terms["parameters"] / 2
    assert any("copies of what is offloaded" in snapshot.terms for snapshot in found.snapshots)


@pytest.mark.long
def test_more_micro_batches_than_three_change_nothing() -> None:
    few, many = (planned(train=TrainConfig(global_batch_size=2 * number)) for number in (3, 64))
    assert trace_step(tiny(), few) == trace_step(tiny(), many)


def test_this_process_stays_as_it_was() -> None:
    torch.manual_seed(7)
    state, threads, running = torch.get_rng_state(), torch.get_num_threads(), threading.active_count()
    trace_step(tiny(), planned())
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_num_threads(), threading.active_count(), dist.is_initialized()) == (threads, running, False)
    assert torch.ones(2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard": Fsdp2Config(compile=True)}, "cannot be used with shard.compile"),
        ({"shard": Fsdp1Config(reshard_after_forward=False)}, "trace shard=fsdp2 instead"),
        ({"shard": Fsdp1Config(cpu_offload=True)}, "trace shard=fsdp2 instead"),
        ({"shard": Fsdp2Config(activation_offload=True)}, "from which nothing is offloaded"),
        ({"objective": OBJECTIVES["distill"]()}, "the teacher is another model"),
        ({"shard": Fsdp2Config(replicas=3)}, "does not divide the 2 ranks"),
        ({"adapter": LoraConfig(target_modules=["q_prj"])}, "target_modules has q_prj"),
    ],
)
def test_what_cannot_be_traced_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace_step(tiny(), planned(**settings))


_WITH_A_DEVICE = """
import sys, torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
import fsdp_shard as fs
if __name__ == "__main__":
    register("other")  # with another device than the CPU, as with a GPU, autograd has threads of its own
    torch.ones(2, requires_grad=True).sum().backward()
    settings = ["launch.ranks=2", "launch.device=cpu", "data.sequence_length=16", "trace=true"]
    print(fs.plan([f"model.path={sys.argv[1]}", *settings])["trace"]["peak_bytes"])
"""


@pytest.mark.long
def test_a_machine_with_another_device_traces_too(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(_WITH_A_DEVICE, encoding="utf-8")
    command = [sys.executable, "script.py", "model"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > 0


def test_an_interrupted_trace_leaves_no_process() -> None:
    """Python waits for its processes before it exits: SIGTERM and Ctrl-C would do nothing until the trace is over."""
    deep = tiny(num_hidden_layers=200)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        trace_step(deep, planned(sequence_length=128))
    children = multiprocessing.active_children()
    for child in children:
        child.join(10)  # it was killed, and has to end
    left = [child for child in children if child.is_alive()]
    for child in left:
        child.kill()
    assert not left


@pytest.mark.long
def test_a_plan_shows_formula_and_trace(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    given = (f"model.path={tmp_path / 'model'}", "launch.ranks=4", "data.sequence_length=32")
    ended = run_recipe("plan", tmp_path / "run", *given, "trace=true")
    assert ended.status == 0, ended.err
    result = ended.result
    traced, planned_bytes = result["trace"], result["per_rank"][0]["peak_bytes"]
    assert traced["peak_bytes"] == max(traced["peak_by_phase"].values()) == sum(traced["terms"].values())
    assert traced["planned_peak_bytes"] == planned_bytes
    assert traced["state_bytes"]["optimizer"] == result["per_rank"][0]["optimizer_bytes"]
    difference = planned_bytes / traced["peak_bytes"] - 1
    assert 0 <= difference < 0.03
    assert f"the formula has {format_size(planned_bytes)}, {difference:+.1%}." in ended.out
    assert "unreduced gradients" in ended.out
    assert "trace" not in run_recipe("plan", tmp_path / "plain", *given).result


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_of_70_billion_parameters_is_traced_in_little_memory() -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    run = planned(
        shard=Fsdp2Config(activation_checkpointing=True), num_ranks=64, sequence_length=4096,
        train=TrainConfig(global_batch_size=64),
    )  # fmt: skip
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        before = resident_bytes()  # what this process has of the one that runs the tests, which its own child has, too
        trace = trace_step(config, run)
        sender.send((trace, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 - before))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert receiver.poll(1500)
    trace, grown = receiver.recv()
    process.join()
    assert grown < 1.2 * 1024**3
    assert trace.state_bytes["parameters"] == pytest.approx(70.55e9 * 4 / 64, rel=0.001)
    assert trace.peak_bytes > sum(trace.state_bytes.values()) - trace.state_bytes["gradients"]
