"""Memory plans: sizes that are known, real optimizers and activations, and each setting that changes a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from transformers import CohereConfig, GptOssConfig, T5Config, ViTConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from fsdp_shard.config import OPTIONS
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import ModelConfig, build_on_meta
from fsdp_shard.planning.memory import plan_memory
from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan
from fsdp_shard.planning.plan_cache import PlanCache
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.report import plan_report
from fsdp_shard.planning.step import micro_batch, optimizer as planned_optimizer
from fsdp_shard.planning.step.micro_batch import BatchSize, planned_batch
from fsdp_shard.planning.step.optimizer import step_bytes
from fsdp_shard.planning.step.recording.events import DONE, END, POST_FORWARD, Event
from fsdp_shard.planning.step.recording.record_passes import record_passes
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config, ShardConfig, plan_units, recompute_blocks
from fsdp_shard.training import (
    OBJECTIVES,
    AdamW8bitConfig,
    AdamWConfig,
    AdapterConfig,
    LoraConfig,
    ObjectiveConfig,
    TrainConfig,
)
from tests.support.plans import plan, planned
from tests.support.tiny import llama, llama_config

COHERE = CohereConfig(
    architectures=["CohereForCausalLM"], hidden_size=32, intermediate_size=40, num_hidden_layers=1,
    num_attention_heads=2, vocab_size=257, logit_scale=0.5,
)  # fmt: skip
T5_3B = T5Config(
    architectures=["T5ForConditionalGeneration"],
    d_model=1024,
    d_kv=128,
    d_ff=16384,
    num_layers=24,
    num_heads=32,
    vocab_size=32128,
)


@pytest.fixture(scope="module")
def t5_3b() -> MemoryPlan:
    return plan(T5_3B, num_ranks=7, sequence_length=16)


def test_t5_3b_has_the_size_that_it_is_known_to_have(t5_3b: MemoryPlan) -> None:
    assert t5_3b.num_params == 2_851_598_336
    assert t5_3b.bytes_by_dtype["float32"] == 2_851_598_336 * 4
    assert t5_3b.bytes_by_dtype["float32"] / 1024**3 == pytest.approx(10.62, abs=0.01)
    assert t5_3b.bytes_by_dtype["bfloat16"] * 2 == t5_3b.bytes_by_dtype["float32"]
    assert [block.cls for block in t5_3b.blocks].count("T5Block") == 48
    assert sum(block.num_params for block in t5_3b.blocks) == t5_3b.num_params


def test_the_ranks_together_hold_the_model_once(t5_3b: MemoryPlan) -> None:
    assert sum(rank.parameters_bytes for rank in t5_3b.per_rank) == t5_3b.bytes_by_dtype["float32"]
    first, last = t5_3b.per_rank[0], t5_3b.per_rank[-1]
    assert last.parameters_bytes < first.parameters_bytes  # 1024 and 128 rows are not 7 equal parts
    assert 1.0 < t5_3b.balance < 1.02
    assert first.gradients_bytes == first.parameters_bytes
    # Two float32 states, and a float32 step count for each parameter.
    assert 2 * first.parameters_bytes < first.optimizer_bytes < 2 * first.parameters_bytes + 4 * 1000


@pytest.mark.parametrize(
    ("option", "given"), [*((option, {}) for option in OPTIONS["optim"]), ("sgd", {"momentum": 0.0})]
)
def test_the_optimizer_has_what_the_real_one_has(option: str, given: dict[str, Any]) -> None:
    if option == "adamw8bit":
        pytest.importorskip("torchao")
    model, config = llama(), OPTIONS["optim"][option](**given)
    params = dict(model.named_parameters())
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer = config.build(params, shapes)
    optimizer.step()
    real = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    assert (real > 0) == config.keeps_state
    assert step_bytes(config, shapes, shapes, dict.fromkeys(shapes, torch.float32))[0] == real
    assert plan(optim=config).per_rank[0].optimizer_bytes == real
    ranks = plan(optim=config, num_ranks=2).per_rank
    assert sum(rank.optimizer_bytes for rank in ranks) == pytest.approx(real, abs=4 * len(params))  # steps are twice


@pytest.mark.long
def test_an_average_of_what_is_trained_is_kept_in_float32() -> None:
    model = ModelConfig(path="x", dtype="bfloat16")
    for adapter, share in ((LoraConfig(), 1), (AdapterConfig(), 2)):  # factors are float32
        settings: dict[str, Any] = {"model": model, "num_ranks": 2, "adapter": adapter}
        without, averaged = (plan(train=TrainConfig(ema_decay=decay), **settings) for decay in (None, 0.9))
        for one, two in zip(without.per_rank, averaged.per_rank, strict=True):
            assert one.average_bytes == 0
            assert two.average_bytes == share * two.gradients_bytes
            assert two.peak_bytes == (one.peak_bytes or 0) + two.average_bytes
            assert two.peak is not None
            assert two.peak.terms["average"] == two.average_bytes
    assert "average" in plan_report(averaged, None)
    assert "average" not in plan_report(without, None)


def test_8_bit_state_counts_in_8_bits() -> None:
    pytest.importorskip("torchao")
    shapes = {"weight": (64, 128)}
    in_full, quantized = (
        step_bytes(c, shapes, shapes, dict.fromkeys(shapes, torch.float32))[0]
        for c in (AdamWConfig(), AdamW8bitConfig())
    )
    assert in_full == 2 * 4 * 64 * 128 + 4
    tables = 2 * 256 * 4
    assert quantized == 2 * (64 * 128 + 4 * 64 * 128 // 256) + tables + 4


def saved_bytes(rows: int, length: int, dtype: torch.dtype, *, checkpointing: bool) -> int:
    """Storages that autograd really keeps in a forward pass, beside parameters and buffers."""
    model: Any = llama(layers=3)
    model.to(dtype).train()
    if checkpointing:
        recompute_blocks(model, Fsdp2Config(activation_checkpointing=True))
    known = {tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]}
    storages: set[torch.UntypedStorage] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages.update({tensor.untyped_storage()} - known)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.zeros((rows, length), dtype=torch.long), use_cache=False)
    storages.add(output.logits.untyped_storage())
    del output
    return sum(storage.nbytes() for storage in storages)


def recording_of(layers: int, rows: int, length: int, dtype: torch.dtype, **settings: Any) -> list[Event]:
    """The recording of a micro-batch of the tiny model."""
    model = build_on_meta(llama_config(layers=layers), dtype)
    shard = Fsdp2Config(param_dtype=str(dtype).removeprefix("torch."), **settings)
    make = partial(planned_batch, model, ObjectiveConfig(), None, BatchSize(rows, length))
    return list(record_passes(model, shard, plan_units(model, shard), make).training)


def test_a_few_chunks_of_the_loss_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config()
    config.vocab_size = 4096
    run = PlannedRun(ModelConfig(), Fsdp2Config(), TrainConfig(global_batch_size=2), AdamWConfig(), 10_000, 2)
    plan = plan_memory(config, run)
    monkeypatch.setattr(micro_batch, "_MAX_CHUNKS", 10_000)
    assert plan_memory(config, run).per_rank == plan.per_rank


def kept_by_forward(recording: list[Event]) -> int:
    """Live bytes when the root is left."""
    end = next(number for number, event in enumerate(recording) if (event.kind, event.module) == (POST_FORWARD, ""))
    return sum(event.change for event in recording[: end + 1])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("rows", "length", "dtype"), [(1, 96, torch.bfloat16), (3, 40, torch.float32)])
def test_the_forward_pass_leaves_what_autograd_keeps(
    rows: int, length: int, dtype: torch.dtype, checkpointing: bool
) -> None:
    recording = recording_of(3, rows, length, dtype, activation_checkpointing=checkpointing)
    # Besides: the angles of positions, which recomputation keeps as arguments of blocks, and flat token ids.
    real = saved_bytes(rows, length, dtype, checkpointing=checkpointing)
    tokens = 8 * rows * length  # which are part of the batch
    assert real - tokens <= kept_by_forward(recording) <= real + 2 * 12 * length * dtype.itemsize + tokens


def test_the_recording_ends_with_nothing_alive() -> None:
    recording = recording_of(3, 2, 64, torch.float32)
    assert sum(event.change for event in recording) == 0
    assert sum(event.gradients for event in recording) == 4 * plan(llama_config(layers=3)).num_params
    assert [event.kind for event in recording][-2:] == [END, DONE]


@pytest.mark.long
def test_plans_that_share_what_was_recorded_are_those_of_each_run_alone() -> None:
    cache = PlanCache()
    dpo: Callable[..., ObjectiveConfig] = OBJECTIVES["dpo"]
    runs: list[dict[str, Any]] = [
        {},
        {"sequence_length": 32},
        {"model": ModelConfig(path="x", chunked_loss=True)},
        {"model": ModelConfig(path="x", dtype="bfloat16")},
        {"adapter": LoraConfig()},
        {"shard": Fsdp2Config(param_dtype="float32"), "on_gpu": True},
        {"shard": Fsdp2Config(param_dtype="float32")},
        {"shard": Fsdp2Config(activation_checkpointing=True)},
        {"shard": Fsdp1Config()},
        {"shard": Fsdp2Config(reshard_after_forward=False), "num_ranks": 2},
        {"shard": Fsdp2Config(context_parallel=2, context_method="ring"), "num_ranks": 2},
        {"objective": dpo(reference="sharded")},
        {"objective": dpo(reference="sharded"), "is_packed": True},
        {"train": TrainConfig(sample_prompts=["a prompt"], sample_tokens=4)},
    ]
    for settings in runs:
        assert plan_memory(llama_config(), planned(**settings), cache) == plan(**settings), settings


def test_selective_recomputation_of_changed_results_has_no_peak() -> None:
    config = GptOssConfig(
        architectures=["GptOssForCausalLM"], hidden_size=32, intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=64,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    found = plan_memory(config, planned(shard=Fsdp2Config(activation_checkpointing="selective")))
    assert found.problem
    assert "selective does not work for GptOssDecoderLayer" in found.problem
    assert plan_memory(config, planned(shard=Fsdp2Config(activation_checkpointing=True))).problem is None


@pytest.mark.long
@pytest.mark.parametrize("kind", [False, True, 2, "selective"])
def test_blocks_that_are_alike_are_run_three_times_and_repeated(kind: bool | int | str) -> None:
    nine, eleven = (recording_of(layers, 2, 64, torch.bfloat16, activation_checkpointing=kind) for layers in (9, 11))
    extra = [event for event in eleven if event.module not in {each.module for each in nine}]
    assert {event.module for event in extra} == {"model.layers.9", "model.layers.10"}
    assert len(eleven) - len(nine) == len(extra) == 8
    one = kept_by_forward(recording_of(2, 2, 64, torch.bfloat16, activation_checkpointing=kind))
    two = kept_by_forward(recording_of(4, 2, 64, torch.bfloat16, activation_checkpointing=kind))
    # Of an odd and an even block together, the same whether they were run or repeated.
    assert kept_by_forward(eleven) - kept_by_forward(nine) == two - one


@pytest.mark.long
def test_offloaded_activations_are_not_on_the_device() -> None:
    def most(layers: int, offload: bool) -> int:
        shard = Fsdp2Config(activation_offload=offload)
        found = plan(llama_config(layers=layers), shard=shard, sequence_length=128, on_gpu=True)
        return found.per_rank[0].activations_bytes or 0

    layers = [most(number, True) for number in (6, 8, 10)]
    assert layers[2] - layers[1] == layers[1] - layers[0]
    assert 0 <= layers[1] - layers[0] < (most(8, False) - most(6, False)) / 8
    assert layers[0] < most(6, False) / 2


@pytest.mark.long
def test_settings_change_what_they_should() -> None:
    base = plan(num_ranks=2).per_rank[0]
    assert base.peak is not None
    assert base.peak_bytes == base.peak.total_bytes == max(snapshot.total_bytes for snapshot in base.snapshots)
    phases = ["load", "forward", "loss", "backward", "reduce", "optimizer", "evaluation", "save"]
    assert list(dict.fromkeys(snapshot.phase for snapshot in base.snapshots)) == phases

    deep = [plan(llama_config(layers=6), shard=Fsdp2Config(reshard_after_forward=r)).per_rank[0] for r in (True, False)]
    layer = 2 * (36 * 36 * 2 + 12 * 36 * 2 + 3 * 85 * 36 + 72)
    assert 3 * layer < deep[1].unsharded_bytes - deep[0].unsharded_bytes < 6 * layer

    accumulating = TrainConfig(global_batch_size=8, micro_batch_size=1)
    late = plan(num_ranks=2, train=accumulating, shard=Fsdp2Config(sync_every_micro_batch=False)).per_rank[0]
    assert late.unsharded_bytes > plan().bytes_by_dtype["float32"]

    offloaded = plan(num_ranks=2, shard=Fsdp2Config(cpu_offload=True), on_gpu=True).per_rank[0]
    assert offloaded.host_bytes == base.state_bytes
    assert (offloaded.peak_bytes or 0) < (plan(num_ranks=2, on_gpu=True).per_rank[0].peak_bytes or 0)

    assert 0 <= base.staging_bytes - base.parameters_bytes - base.optimizer_bytes < 64 * 1024
    saved = [plan(num_ranks=2, saves_every=1, on_gpu=on_gpu).per_rank[0] for on_gpu in (False, True)]
    in_peak = [rank.rank_bytes.get("staging", 0) for rank in saved]
    assert in_peak == [base.staging_bytes, 0]  # a GPU has memory of its own
    assert saved[1].needed_host_bytes == base.staging_bytes
    assert plan(num_ranks=2, saves_asynchronously=False).per_rank[0].staging_bytes == 0
    for shard in (Fsdp2Config(), DdpConfig()):
        both, weights = (plan(num_ranks=2, shard=shard, saves_optimizer=saves).per_rank for saves in (True, False))
        copied = [sum(rank.staging_bytes for rank in ranks) for ranks in (both, weights)]
        num_copies = 1 if shard.is_sharded else 2
        assert copied[0] - copied[1] == sum(rank.optimizer_bytes for rank in both) // num_copies

    half = plan(num_ranks=2, model=ModelConfig(path="x", dtype="bfloat16")).per_rank[0]
    assert half.parameters_bytes * 2 == base.parameters_bytes

    wide = plan(num_ranks=2, train=TrainConfig(micro_batch_size=4)).per_rank[0]
    assert (wide.activations_bytes or 0) > 3 * (base.activations_bytes or 0)
    recomputed = plan(num_ranks=2, shard=Fsdp2Config(activation_checkpointing=True)).per_rank[0]
    assert (recomputed.activations_bytes or 0) < (base.activations_bytes or 0)


@pytest.mark.long
def test_what_is_whole_for_a_while() -> None:
    config = llama_config(layers=6)

    def gathered(shard: ShardConfig, phase: str, **settings: Any) -> int:
        snapshots = plan(config, num_ranks=4, shard=shard, **settings).per_rank[0].snapshots
        return max(snapshot.terms.get("gathered", 0) for snapshot in snapshots if snapshot.phase == phase)

    base = Fsdp2Config()
    layer = gathered(base, "backward") - gathered(Fsdp2Config(prefetch_backward=2), "backward")
    assert layer < 0, "two ahead instead of one"
    assert gathered(Fsdp2Config(prefetch_forward=3), "forward") > gathered(base, "forward")
    kept = [gathered(Fsdp2Config(reshard_after_forward=every), "loss") for every in (True, 2, False)]
    assert kept == sorted(set(kept))
    resharded = [Fsdp2Config(reshard_after_forward=every) for every in (True, 2)]
    buffers = [plan(config, num_ranks=4, on_gpu=True, shard=each).overhead["NCCL buffers"] for each in resharded]
    assert buffers[1] == 2 * buffers[0], "two more groups, one in each dimension of a mesh"
    whole = plan(config, num_ranks=4, shard=DdpConfig()).per_rank
    assert {rank.parameters_bytes for rank in whole} == {plan(config).bytes_by_dtype["float32"]}
    assert whole[0].unsharded_bytes == whole[0].gradients_bytes, "of earlier micro-batches, beside the buckets"
    once = plan(config, num_ranks=4, shard=DdpConfig(), train=TrainConfig(global_batch_size=4)).per_rank
    assert once[0].unsharded_bytes == 0
    with pytest.raises(ConfigError, match=r"reshard_after_forward=3 must divide the 4 ranks"):
        gathered(Fsdp2Config(reshard_after_forward=3), "loss")


@pytest.mark.parametrize("wrapper", [Fsdp1Config, Fsdp2Config])
def test_replicas_hold_the_model_once_each(wrapper: Any) -> None:
    two = plan(num_ranks=4, shard=wrapper(replicas=2))
    one = plan(num_ranks=2, shard=wrapper())
    assert [rank.parameters_bytes for rank in two.per_rank] == [r.parameters_bytes for r in one.per_rank] * 2
    with pytest.raises(ConfigError, match=r"shard\.replicas=2 does not divide the 3 ranks"):
        plan(num_ranks=3, shard=wrapper(replicas=2))


def test_whether_it_fits_is_asked_of_the_fullest_rank() -> None:
    found = plan(num_ranks=4)
    fullest = max(rank.peak_bytes or 0 for rank in found.per_rank)
    assert found.peak_bytes == fullest
    assert (found.fits(fullest), found.fits(fullest - 1), found.fits(None)) == (True, False, None)


def test_a_model_without_text_input_is_planned_without_activations() -> None:
    config = ViTConfig(
        architectures=["ViTForImageClassification"], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=40, image_size=32, patch_size=8, dtype="float32",
    )  # fmt: skip
    found = plan(config, num_ranks=2)
    assert found.per_rank[0].parameters_bytes > 0
    assert (found.peak_bytes, found.fits(10**9)) == (None, None)
    assert found.problem


def test_a_model_whose_backward_pass_raises_a_key_error_is_planned_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(gradient: torch.Tensor) -> Any:
        return dict[int, Any]()[len(gradient)]

    original = LlamaMLP.forward

    def forward(module: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = original(module, hidden)
        if output.requires_grad:
            output.register_hook(look_up)
        return output

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    found = plan(llama_config())
    assert found.per_rank[0].parameters_bytes > 0
    assert (found.peak_bytes, found.problem) == (None, "1")


def test_a_run_of_too_many_operators_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_shard.planning.step.recording.recorder._MAX_OPERATORS", 200)
    found = plan(llama_config())
    assert found.problem == "a micro-batch of this size is more than 200 operators on three blocks"
    assert found.peak_bytes is None
    assert found.per_rank[0].parameters_bytes > 0


@pytest.mark.long
def test_the_loss_in_chunks_takes_the_place_of_logits() -> None:
    def kept(length: int, chunked: bool | str, vocabulary: int = 257) -> int:
        config = llama_config()
        config.vocab_size = vocabulary
        settings = ModelConfig(path="x", chunked_loss=chunked)
        return plan(config, model=settings, sequence_length=length).per_rank[0].activations_bytes or 0

    assert kept(512, "auto") == kept(512, False)
    assert kept(512, True) != kept(512, False)
    large = [kept(4096, chunked, 1 << 17) for chunked in ("auto", True, False)]
    assert large[0] == large[1] < large[2] / 3
    with pytest.raises(ModelError, match="chunked_loss=true does not work"):
        plan(COHERE, model=ModelConfig(path="x", chunked_loss=True))


@pytest.mark.long
def test_pairs_are_two_rows_and_a_frozen_copy_is_one_more_shard() -> None:
    objective: Any = OBJECTIVES["dpo"]
    pairs, rows = plan(objective=objective(), num_ranks=2), plan(train=TrainConfig(micro_batch_size=2), num_ranks=2)
    assert pairs.per_rank[0].reference_bytes == 0
    assert (pairs.peak_bytes or 0) > (plan(num_ranks=2).peak_bytes or 0)
    assert rows.per_rank[0].reference_bytes == 0
    sharded = plan(objective=objective(reference="sharded"), num_ranks=2).per_rank[0]
    assert sharded.reference_bytes == sharded.parameters_bytes > 0
    assert (sharded.peak_bytes or 0) >= (pairs.peak_bytes or 0) + sharded.reference_bytes
    for other in (ObjectiveConfig(), objective(), OBJECTIVES["simpo"]()):
        assert plan(objective=other, adapter=LoraConfig()).per_rank[0].reference_bytes == 0


@pytest.mark.parametrize("option", ["adamw", "muon"])
def test_of_a_model_with_an_adapter_only_that_is_trained(option: str) -> None:
    optim = OPTIONS["optim"][option]()
    whole = plan(num_ranks=2, optim=optim)
    found = plan(num_ranks=2, optim=optim, adapter=LoraConfig(rank=4))
    # Rows and columns of the linear layers: attention 36 x 36, 12 x 36 twice and 36 x 36; MLP 85 x 36 three times.
    trained = 2 * 4 * (72 + 48 + 48 + 72 + 3 * 121)
    assert (found.num_trained, found.num_params) == (trained, whole.num_params + trained)
    assert whole.num_trained == whole.num_params
    assert sum(rank.gradients_bytes for rank in found.per_rank) == 4 * trained
    assert sum(rank.parameters_bytes for rank in found.per_rank) == 4 * found.num_params
    state = 4 * trained * (2 if option == "adamw" else 1)
    assert sum(rank.optimizer_bytes for rank in found.per_rank) == pytest.approx(state, abs=2 * 4 * 28)
    assert (found.peak_bytes or 0) < (whole.peak_bytes or 0)
    with pytest.raises(ConfigError, match=r"target_modules has q_prj, .* linear layers are q_proj"):
        plan(adapter=LoraConfig(target_modules=["q_prj"]))


def test_the_state_of_an_adapter_has_its_own_dtype() -> None:
    """peft keeps adapters in float32, whatever the base is in."""
    sizes = [
        plan(model=ModelConfig(path="x", dtype=dtype), adapter=LoraConfig(rank=4)).per_rank[0].optimizer_bytes
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes[0] == sizes[1] > 0


def test_planning_leaves_no_threads_that_forked_ranks_would_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    step = planned_optimizer._step
    monkeypatch.setattr(
        planned_optimizer, "_step", lambda *words: threads.append(torch.get_num_threads()) or step(*words)
    )
    torch.set_num_threads(2)
    try:
        plan()
        assert (threads[0], torch.get_num_threads()) == (1, 2), "the first is the one with values"
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_of_a_quantized_base_the_bytes_are_counted(wrapper: str) -> None:
    shard = OPTIONS["shard"][wrapper]()
    plain = plan(num_ranks=2, shard=shard, adapter=LoraConfig(rank=4))
    found = plan(num_ranks=2, shard=shard, adapter=LoraConfig(rank=4, quantize="nf4"))
    assert (found.num_params, found.num_trained) == (plain.num_params, plain.num_trained)
    weights = [36 * 36, 12 * 36, 12 * 36, 36 * 36, 36 * 85, 36 * 85, 36 * 85]
    saved = 2 * sum(4 * count - 36 * -(-count // 64) for count in weights)
    difference = sum(rank.parameters_bytes for rank in plain.per_rank) - sum(
        rank.parameters_bytes for rank in found.per_rank
    )
    assert difference == pytest.approx(saved, abs=2 * 14 * 16)  # what pads flat parameters
    assert [block.num_params for block in found.blocks] == [block.num_params for block in plain.blocks]
    assert found.blocks[1].num_bytes < plain.blocks[1].num_bytes / 2
    sums = [sum(rank.optimizer_bytes for rank in each.per_rank) for each in (found, plain)]
    assert sums[0] == pytest.approx(sums[1], abs=256)


@dataclass
class _Broken(ObjectiveConfig):
    """An objective with a mistake of its own."""

    def prepare(self, model: Any, batches: Any, reference: Any, context: Any) -> Any:
        return context.not_there


def test_a_mistake_in_an_objective_is_not_taken_for_a_model_that_cannot_run() -> None:
    with pytest.raises(AttributeError, match="not_there"):
        plan(objective=_Broken())


def test_host_memory_is_that_per_machine() -> None:
    shard = Fsdp2Config(cpu_offload=True, activation_offload=True)
    found = plan(llama_config(layers=6), num_ranks=4, shard=shard, on_gpu=True)
    each = found.per_rank[0]
    without = plan(llama_config(layers=6), num_ranks=4, shard=Fsdp2Config(cpu_offload=True), on_gpu=True).per_rank[0]
    assert each.needed_host_bytes > without.needed_host_bytes >= each.host_bytes + each.staging_bytes
    half = HostMemory(0, 2).needed_by(found)
    sizes = [rank.needed_host_bytes for rank in found.per_rank]
    assert (half, HostMemory(0, 4).needed_by(found)) == (max(sum(sizes[:2]), sum(sizes[2:])), sum(sizes))
    assert HostMemory(half, 2).fits(found)
    assert not HostMemory(half, 3).fits(found)
    text = plan_report(found, found.needed_bytes, HostMemory(half - 1, 2))
    assert "Does NOT fit in the host memory of a machine: 2 ranks need" in text.splitlines()[-1]
