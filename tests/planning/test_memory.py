"""Memory plans: sizes that are known, real optimizers and activations, and each setting that changes a figure."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, PretrainedConfig, T5Config, ViTConfig

from fsdp_shard.config import OPTIONS
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import ModelConfig, build_on_meta
from fsdp_shard.planning import optimizer as planned_optimizer
from fsdp_shard.planning.activations import head_bytes, measure_activations
from fsdp_shard.planning.memory import MemoryPlan, PlannedRun, plan_memory
from fsdp_shard.planning.optimizer import optimizer_bytes
from fsdp_shard.planning.report import plan_report
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config, ShardConfig, recompute_blocks
from fsdp_shard.training import (
    OBJECTIVES,
    AdamW8bitConfig,
    AdamWConfig,
    AdapterConfig,
    LoraConfig,
    ObjectiveConfig,
    TrainConfig,
    linear_cross_entropy,
)
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


def planned(**settings: Any) -> PlannedRun:
    """A run of the tiny model; `settings` replace its fields."""
    run = PlannedRun(ModelConfig(path="x"), Fsdp2Config(), TrainConfig(), AdamWConfig(), 64, 1)
    return replace(run, **settings)


def plan(config: PretrainedConfig | None = None, **settings: Any) -> MemoryPlan:
    return plan_memory(config or llama_config(), planned(**settings))


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


@pytest.mark.parametrize("option", OPTIONS["optim"])
def test_the_optimizer_has_what_the_real_one_has(option: str) -> None:
    if option == "adamw8bit":
        pytest.importorskip("torchao")
    model, config = llama(), OPTIONS["optim"][option]()
    params = dict(model.named_parameters())
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer = config.build(params, shapes)
    optimizer.step()
    real = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    assert optimizer_bytes(config, shapes, shapes, dict.fromkeys(shapes, torch.float32)) == real
    assert plan(optim=config).per_rank[0].optimizer_bytes == real
    ranks = plan(optim=config, num_ranks=2).per_rank
    assert sum(rank.optimizer_bytes for rank in ranks) == pytest.approx(real, abs=4 * len(params))  # steps are twice


def test_an_average_of_what_is_trained_is_kept_in_float32() -> None:
    model = ModelConfig(path="x", dtype="bfloat16")
    for adapter, share in ((LoraConfig(), 1), (AdapterConfig(), 2)):  # factors are float32
        settings: dict[str, Any] = {"model": model, "num_ranks": 2, "adapter": adapter}
        without, averaged = (plan(train=TrainConfig(ema_decay=decay), **settings) for decay in (None, 0.9))
        for one, two in zip(without.per_rank, averaged.per_rank, strict=True):
            assert one.average_bytes == 0
            assert two.average_bytes == share * two.gradients_bytes
            assert two.peak_bytes == (one.peak_bytes or 0) + two.average_bytes
    assert "average" in plan_report(averaged, None)
    assert "average" not in plan_report(without, None)


def test_8_bit_state_counts_in_8_bits() -> None:
    pytest.importorskip("torchao")
    shapes = {"weight": (64, 128)}
    in_full, quantized = (
        optimizer_bytes(c, shapes, shapes, dict.fromkeys(shapes, torch.float32))
        for c in (AdamWConfig(), AdamW8bitConfig())
    )
    assert in_full == 2 * 4 * 64 * 128 + 4
    tables = 2 * 256 * 4
    assert quantized == 2 * (64 * 128 + 4 * 64 * 128 // 256) + tables + 4


def saved_bytes(rows: int, length: int, dtype: torch.dtype, *, checkpointing: bool) -> int:
    """Storages that autograd really keeps in a forward pass, beside parameters and buffers."""
    model = llama(layers=3).to(dtype).train()
    if checkpointing:
        recompute_blocks(model, Fsdp2Config(activation_checkpointing=True))
    known = {tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]}
    storages: set[torch.UntypedStorage] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages.update({tensor.untyped_storage()} - known)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.zeros((rows, length), dtype=torch.long), use_cache=False)
    del output
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize(("rows", "length", "dtype"), [(1, 96, torch.bfloat16), (3, 40, torch.float32)])
def test_activations_are_what_autograd_keeps(rows: int, length: int, dtype: torch.dtype) -> None:
    model = build_on_meta(llama_config(layers=3), dtype)
    found = measure_activations(model, Fsdp2Config(), rows, length)
    assert found.saved_bytes == saved_bytes(rows, length, dtype, checkpointing=False)
    assert found.logits_bytes == rows * length * 257 * dtype.itemsize


def test_recomputed_blocks_keep_their_inputs_and_one_block() -> None:
    rows, length, dtype = 2, 64, torch.float32

    def measured(layers: int, kind: bool | int | str) -> int:
        model = build_on_meta(llama_config(layers=layers), dtype)
        return measure_activations(model, Fsdp2Config(activation_checkpointing=kind), rows, length).saved_bytes

    hidden = rows * length * 36 * dtype.itemsize
    assert measured(4, True) - measured(3, True) == hidden
    one_block = measured(4, False) - measured(3, False)
    real = saved_bytes(rows, length, dtype, checkpointing=True)
    assert measured(3, True) == pytest.approx(real + one_block, rel=0.05)
    # Each second block: the other two thirds are kept as they are.
    assert measured(3, 2) == pytest.approx(2 * one_block + real + one_block - 2 * hidden, rel=0.05)
    # What selective recomputation keeps: 36 + 12 + 12 for the heads, 36 for attention and again for its output, 85 + 85
    # for the gate, 36 for the end; 3 for the log-sum-exp of each head.
    results = rows * length * (36 + 12 + 12 + 36 + 36 + 85 + 85 + 36 + 3) * dtype.itemsize
    assert measured(4, "selective") - measured(3, "selective") == hidden + results


def test_offloaded_activations_are_not_on_the_device() -> None:
    def measured(layers: int, offload: bool) -> int:
        model = build_on_meta(llama_config(layers=layers), torch.float32)
        return measure_activations(model, Fsdp2Config(activation_offload=offload), 2, 64).saved_bytes

    assert measured(4, True) == measured(3, True) < measured(3, False)
    # Two blocks: one runs its backward pass, and those of the next come back.
    assert measured(3, True) - measured(1, True) == pytest.approx(measured(3, False) - measured(2, False), rel=0.05)


def test_settings_change_what_they_should() -> None:
    base = plan(num_ranks=2).per_rank[0]
    assert base.peak_bytes == base.state_bytes + base.unsharded_bytes + (base.activations_bytes or 0)

    kept = plan(num_ranks=2, shard=Fsdp2Config(reshard_after_forward=False)).per_rank[0]
    assert kept.unsharded_bytes == base.unsharded_bytes, "of two layers both are gathered at one time anyway"
    deep = [plan(llama_config(layers=6), shard=Fsdp2Config(reshard_after_forward=r)).per_rank[0] for r in (True, False)]
    layer = 2 * (36 * 36 * 2 + 12 * 36 * 2 + 3 * 85 * 36 + 72)
    assert deep[1].unsharded_bytes - deep[0].unsharded_bytes == 4 * layer

    accumulating = TrainConfig(global_batch_size=8, micro_batch_size=1)
    late = plan(num_ranks=2, train=accumulating, shard=Fsdp2Config(sync_every_micro_batch=False)).per_rank[0]
    assert late.unsharded_bytes - base.unsharded_bytes == plan().bytes_by_dtype["float32"]

    offloaded = plan(num_ranks=2, shard=Fsdp2Config(cpu_offload=True)).per_rank[0]
    assert offloaded.host_bytes == base.state_bytes
    assert offloaded.peak_bytes == base.unsharded_bytes + (base.activations_bytes or 0)

    assert base.staging_bytes == base.parameters_bytes + base.optimizer_bytes
    assert plan(num_ranks=2, saves_asynchronously=False).per_rank[0].staging_bytes == 0

    half = plan(num_ranks=2, model=ModelConfig(path="x", dtype="bfloat16")).per_rank[0]
    assert half.parameters_bytes * 2 == base.parameters_bytes

    wide = plan(num_ranks=2, train=TrainConfig(micro_batch_size=4)).per_rank[0]
    assert (wide.activations_bytes or 0) > 3 * (base.activations_bytes or 0)
    recomputed = plan(num_ranks=2, shard=Fsdp2Config(activation_checkpointing=True)).per_rank[0]
    assert (recomputed.activations_bytes or 0) < (base.activations_bytes or 0)


def test_what_is_whole_for_a_while() -> None:
    config = llama_config(layers=6)

    def unsharded(shard: ShardConfig, **settings: Any) -> int:
        return plan(config, num_ranks=4, shard=shard, **settings).per_rank[0].unsharded_bytes

    base, layer = unsharded(Fsdp2Config()), 2 * (36 * 36 * 2 + 12 * 36 * 2 + 3 * 85 * 36 + 72)
    assert unsharded(Fsdp2Config(prefetch_forward=3)) - base == 2 * layer, "three ahead instead of one"
    assert unsharded(Fsdp2Config(prefetch_backward=2)) - base == layer
    assert unsharded(Fsdp2Config(reshard_after_forward=2)) - base == 6 * layer // 2
    # Nine kilobytes of embedding in the root, norms gathered in float32: what they gain beside bfloat16.
    norms = unsharded(Fsdp2Config(norms_in_float32=True))
    assert 0 < abs(norms - base) < layer
    whole = plan(config, num_ranks=4, shard=DdpConfig()).per_rank
    assert {rank.parameters_bytes for rank in whole} == {plan(config).bytes_by_dtype["float32"]}
    assert whole[0].unsharded_bytes == 0
    with pytest.raises(ConfigError, match=r"reshard_after_forward=3 must divide the 4 ranks"):
        unsharded(Fsdp2Config(reshard_after_forward=3))


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


class Live(TorchDispatchMode):
    """The most bytes of storages that were there at one time, of those made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def known(self, *tensors: torch.Tensor) -> None:
        self._known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _count(self, tensor: torch.Tensor) -> None:
        key, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if key in self._known or tensor._is_view() or not size:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("rows", [40, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_head_takes_what_it_takes(
    dtype: torch.dtype, rows: int, is_capped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("training.loss.linear_cross_entropy", "planning.activations"):
        monkeypatch.setattr(f"fsdp_shard.{module}.LOSS_CHUNK_BYTES", 4 * 3000 * 100)  # 100 rows
    hidden, weight = (torch.randn(n, 64, dtype=dtype, requires_grad=True) for n in (rows, 3000))
    labels = torch.randint(0, 3000, (rows,))
    with Live() as live:
        live.known(hidden, weight, labels)
        loss = linear_cross_entropy(hidden, weight, None, labels, 1.0, 30.0 if is_capped else None)
    del loss
    assert head_bytes(rows, (3000, 64), dtype, is_capped=is_capped) == pytest.approx(live.most, rel=0.03)


def test_the_loss_in_chunks_takes_the_place_of_logits() -> None:
    def kept(length: int, chunked: bool | str, vocabulary: int = 257) -> int:
        config = llama_config()
        config.vocab_size = vocabulary
        settings = ModelConfig(path="x", chunked_loss=chunked)
        return plan(config, model=settings, sequence_length=length).per_rank[0].activations_bytes or 0

    logits, hidden = 512 * 257 * 2, 512 * 36 * 2  # the hidden state is kept for the gradient of the head
    in_chunks = head_bytes(512, (257, 36), torch.bfloat16)
    assert kept(512, "auto") == kept(512, False)
    assert kept(512, False) - kept(512, True) == 2 * logits + hidden - in_chunks
    large = [kept(4096, chunked, 1 << 17) for chunked in ("auto", True, False)]
    assert large[0] == large[1] < large[2] / 4
    with pytest.raises(ModelError, match="chunked_loss=true does not work"):
        plan(COHERE, model=ModelConfig(path="x", chunked_loss=True))


def test_pairs_are_two_rows_and_a_frozen_copy_is_one_more_shard() -> None:
    objective: Any = OBJECTIVES["dpo"]
    pairs, rows = plan(objective=objective(), num_ranks=2), plan(train=TrainConfig(micro_batch_size=2), num_ranks=2)
    # The loss head takes the place of the logits, which the rows of a small vocabulary have.
    whole = plan(objective=objective(), num_ranks=2, model=ModelConfig(path="x", chunked_loss=False))
    assert whole.per_rank[0].activations_bytes == rows.per_rank[0].activations_bytes
    assert pairs.per_rank[0].activations_bytes != rows.per_rank[0].activations_bytes
    assert pairs.per_rank[0].reference_bytes == 0
    sharded = plan(objective=objective(reference="sharded"), num_ranks=2).per_rank[0]
    assert sharded.reference_bytes >= sharded.parameters_bytes > 0
    assert sharded.peak_bytes == (pairs.peak_bytes or 0) + sharded.reference_bytes
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
    assert found.per_rank[0].unsharded_bytes < whole.per_rank[0].unsharded_bytes
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
    for figure in ("gradients_bytes", "optimizer_bytes"):
        sums = [sum(getattr(rank, figure) for rank in each.per_rank) for each in (found, plain)]
        assert sums[0] == pytest.approx(sums[1], abs=256)
    assert found.per_rank[0].activations_bytes == plain.per_rank[0].activations_bytes
