"""The loss out of the head is the plain one, sharded or not, and the logits are never whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ModelError
from fsdp_shard.models import rebuild_buffers
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.loss.device_batch import DeviceBatch
from fsdp_shard.training.loss.forward_loss import forward_loss
from fsdp_shard.training.loss.linear_cross_entropy import head_returns_loss, linear_cross_entropy, use_loss_head
from fsdp_shard.training.loss.row_values import rows_per_chunk
from tests.support.ranks import on_ranks, update
from tests.support.tiny import token_batch

NUM_TOKENS, WIDTH, VOCABULARY = 37, 16, 101
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SMALL |= {"intermediate_size": 48, "vocab_size": 257, "max_position_embeddings": 64}


@pytest.fixture(params=[1, 7, 10_000], ids="rows={}".format)
def num_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr("fsdp_shard.training.loss.row_values.LOSS_CHUNK_BYTES", request.param * 4 * VOCABULARY)
    return request.param


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_loss(num_rows: int, dtype: torch.dtype, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    hidden, weight, bias = random(NUM_TOKENS, WIDTH), random(VOCABULARY, WIDTH), random(VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    labels[::3] = -100
    logits = F.linear(hidden, weight, bias).float()
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    expected = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / 11.0
    value = linear_cross_entropy(hidden, weight, bias, labels, 11.0, softcap)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    slopes = torch.autograd.grad(3.0 * value, (hidden, weight, bias))
    for slope, wanted in zip(slopes, torch.autograd.grad(3.0 * expected, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(slope, wanted, rtol=rounding, atol=rounding * float(wanted.abs().max()))
    frozen = linear_cross_entropy(hidden, weight.detach(), None, labels, 1.0)
    (slope,) = torch.autograd.grad(frozen, hidden)
    assert slope.shape == hidden.shape
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, bias, labels, 11.0, softcap).requires_grad


def test_sums_of_a_chunk_have_room_in_float16() -> None:
    """Until they are divided, those of one word's row are 512 * 200, more than float16 holds."""
    hidden = torch.full((512, 8), 200.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, None, torch.zeros(512, dtype=torch.long), 512.0).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([-150.0, 50.0, 50.0, 50.0], dtype=torch.float16))


def test_a_chunk_has_whole_tiles_of_rows() -> None:
    assert rows_per_chunk(128_256) == 256
    assert rows_per_chunk(1 << 22) == 8, "less than a tile"
    assert rows_per_chunk(1 << 30) == 1


def test_nothing_to_predict_and_a_second_backward() -> None:
    hidden, weight = torch.randn(4, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    nothing = linear_cross_entropy(hidden, weight, None, torch.full((4,), -100), 1.0)
    nothing.backward(retain_graph=True)
    assert nothing.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()
    with pytest.raises(RuntimeError, match="already used"):
        nothing.backward()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_shard.training.loss.row_values.LOSS_CHUNK_BYTES", 16 * 4 * 5000)
    hidden, weight = torch.randn(400, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, None, torch.arange(400), 1.0).backward()
    assert largest.numel == 4 * 16 * 5000


def model_of(family: str, **values: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    kind: Any = AutoModelForMaskedLM if "bert" in family else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(AutoConfig.for_model(family, **(SMALL | values)))
    return model


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
        ("gemma3_text", {"final_logit_softcapping": 2.0}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("xlm-roberta", {}),  # its head is the last layer of a module
        ("opt", {"ffn_dim": 32}),  # which reads a module in its base model
        ("mamba", {}),  # which reads the dtype of the head
    ],
)
def test_models_give_the_same_loss_through_their_heads(family: str, values: dict[str, Any]) -> None:
    plain, ours = model_of(family, **values).eval(), model_of(family, **values).eval()
    assert use_loss_head(ours, True)
    ids = token_batch(0, rows=2)
    labels = token_batch(1, rows=2)
    expected = F.cross_entropy(plain(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels.flatten())
    with head_returns_loss(ours, labels, float(labels.numel())) as is_loss:
        assert is_loss
        loss = ours(input_ids=ids, use_cache=False).logits.reshape(())
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    loss.backward()
    expected.backward()
    for (name, parameter), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(ours(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_models_that_change_their_logits_keep_the_plain_loss() -> None:
    for model in (model_of("cohere", logit_scale=0.5), model_of("granite", logits_scaling=3.0)):
        with pytest.raises(ModelError, match=f"{type(model).__name__}: it changes the logits after"):
            use_loss_head(model, True)
        with head_returns_loss(model, torch.zeros(1), 1.0) as is_loss:
            assert not is_loss
    t5 = AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=1 << 16)
    large = AutoConfig.for_model("llama", **(SMALL | {"vocab_size": 1 << 16}))
    with torch.device("meta"):
        seq2seq, causal = AutoModelForSeq2SeqLM.from_config(t5), AutoModelForCausalLM.from_config(large)
    assert use_loss_head(seq2seq, "auto"), "nothing comes after the head of T5"
    assert not use_loss_head(causal, False)
    assert use_loss_head(causal, "auto")
    assert not use_loss_head(model_of("llama"), "auto"), "a small vocabulary"


def _steps(context: DistributedContext, cases: list[tuple[str, bool]]) -> list[list[float]]:
    """Losses of some steps with the head's loss under each (wrapper, tied)."""
    all_losses = []
    for wrapper, tied in cases:
        source = model_of("llama", tie_word_embeddings=tied)
        with torch.device("meta"):
            model = model_of("llama", tie_word_embeddings=tied)
        assert use_loss_head(model, True)
        rebuild_buffers(model, context.device)
        sharded = WRAPPERS[wrapper](param_dtype="float32").shard(model, context)
        values = dict(source.named_parameters())
        for name, shard in sharded.local_shards().items():
            shard.data.copy_(values[name].detach().view(-1)[shard.start : shard.start + len(shard.data)])
        optimizer = torch.optim.SGD(sharded.module.parameters(), lr=0.5)
        losses = []
        for step in range(3):
            rows = token_batch(step, rows=4).chunk(context.world_size)[context.rank]
            batch = DeviceBatch({"input_ids": rows[:, :-1]}, rows[:, 1:], torch.arange(rows[:, 1:].numel()))
            loss = forward_loss(sharded, batch, rows[:, 1:].numel())
            losses.append(update(optimizer, loss, context))
        all_losses.append(losses)
    return all_losses


def test_both_wrappers_train_as_one_process() -> None:
    cases = [(wrapper, tied) for wrapper in ("fsdp1", "fsdp2") for tied in (False, True)]
    results = on_ranks(2, _steps, cases)[0]
    for (wrapper, tied), losses in zip(cases, results, strict=True):
        model = model_of("llama", tie_word_embeddings=tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        expected = []
        for step in range(3):
            rows = token_batch(step, rows=4)
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        assert losses == pytest.approx(expected, rel=1e-5), (wrapper, tied)
        assert expected[-1] != pytest.approx(expected[0], rel=1e-4)
