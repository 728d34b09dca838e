"""Weights of models that people have wrapped themselves: filled from any checkpoint, written without gathering."""

from __future__ import annotations

import doctest
import math
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralForCausalLM,
    PreTrainedModel,
)

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError, ModelError, SaveError
from tests.support.mixtures import config as mixture_config
from tests.support.ranks import on_ranks
from tests.support.sharded import train_plain
from tests.support.tiny import byte_tokenizer, llama, llama_config, save_model, token_batch

SMALL_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL_TOWER |= {"image_size": 16, "patch_size": 8}


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FullyShardedDataParallel is deprecated
        if wrapper == "fully_shard":
            for layer in model.get_submodule("model.layers").children():
                fully_shard(layer)
            fully_shard(model)
        elif wrapper == "fsdp":
            return fsdp.FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        elif wrapper == "ddp":
            return DistributedDataParallel(model)
    return model


@pytest.mark.parametrize("wrapper", ["nobody", "fully_shard", "fsdp", "ddp"])
def test_weights_go_into_a_wrapped_model_and_out_again(wrapper: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", seed=3)

    def work(context: DistributedContext) -> None:
        model = wrapped(llama(0), wrapper)
        assert fs.load_weights(model, source) == ""
        fs.save_pretrained(model, tmp_path / "target", processor=byte_tokenizer(), max_shard_size="30KB")

    on_ranks(2, work)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    expected = AutoModelForCausalLM.from_pretrained(source)
    ids = token_batch(0, 2, 5)
    assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    assert fs.verify(tmp_path / "target").is_sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"], "nothing is left beside it"


class ScaledLlama(LlamaForCausalLM):
    """A class of a user's own, which its config alone does not build."""

    def __init__(self, config: LlamaConfig, scale: float) -> None:
        super().__init__(config)
        self.scale = scale


def test_a_sharded_class_of_the_users_own_is_not_rebuilt(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", seed=3)
    tensors = load_file(source / "model.safetensors")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}  # of an older transformers
    save_file(tensors | frequencies, source / "model.safetensors", {"format": "pt"})

    def work(context: DistributedContext) -> None:
        model = ScaledLlama(llama_config(), 2.0)
        fully_shard(model)
        fs.load_weights(model, source)
        norm: Any = model.get_parameter("model.norm.weight")  # a DTensor now
        assert torch.equal(norm.full_tensor(), tensors["model.norm.weight"])

    on_ranks(1, work)


@pytest.mark.parametrize("family", ["mixtral", "llava"])
def test_names_that_transformers_converts_are_found_in_a_sharded_model(family: str, tmp_path: Path) -> None:
    """It looks the conversions up by class, and `fully_shard` makes classes of its own."""
    tower = CLIPVisionConfig(**SMALL_TOWER)
    with_images = LlavaConfig(text_config=llama_config(tied=False), vision_config=tower, tie_word_embeddings=False)
    config = mixture_config("mixtral") if family == "mixtral" else with_images
    model_class: Any = MixtralForCausalLM if family == "mixtral" else LlavaForConditionalGeneration
    torch.manual_seed(0)
    expected = model_class(config)
    expected.save_pretrained(tmp_path / "source")

    def work(context: DistributedContext) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = model_class(config)
        fully_shard(model.model)
        fully_shard(model)
        fs.load_weights(model, tmp_path / "source")
        return {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}

    for found in on_ranks(2, work):
        assert found.keys() == dict(expected.named_parameters()).keys()
        for name, param in expected.named_parameters():
            assert torch.equal(found[name], param)


def test_a_sharded_model_reads_rank_files_of_another_number_of_ranks(tmp_path: Path) -> None:
    fs.convert(save_model(tmp_path / "source", seed=3), tmp_path / "ranks", format="sharded", ranks=3)

    def work(context: DistributedContext) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model: PreTrainedModel = llama(0)
        fully_shard(model)
        model.to_empty(device="cpu")
        fs.load_weights(model, tmp_path / "ranks")
        return {name: _whole(param) for name, param in model.named_parameters()}

    expected = dict(llama(3).named_parameters())
    for name, value in on_ranks(2, work)[0].items():
        assert torch.equal(value, expected[name]), name


def _whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"weight": torch.ones(1, 2)}, "lacks bias"),
        ({"weight": torch.ones(1, 2), "bias": torch.ones(1), "x": torch.ones(1)}, "has x, which the model does not"),
        ({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, r"weight has shape \[1, 3\], expected \[1, 2\]"),
        ({"weight": torch.ones(1, 2), "bias": torch.ones(1, dtype=torch.int64)}, "bias is stored as I64, expected"),
    ],
)
def test_weights_of_another_module(stored: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    save_file(stored, tmp_path / "x.safetensors")
    model = nn.Linear(2, 1)
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(CheckpointError, match=words):
        fs.load_weights(model, tmp_path / "x.safetensors")
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("stored", "wanted", "words"),
    [
        (torch.int64, torch.bool, "I64, expected torch.bool"),
        (torch.int64, torch.uint8, "I64, expected torch.uint8"),
        (torch.complex64, torch.int64, "C64, expected torch.int64"),
        (torch.int32, torch.int64, None),
        (torch.uint8, torch.int16, None),
    ],
)
def test_integers_are_cast_only_where_all_fit(
    stored: torch.dtype, wanted: torch.dtype, words: str | None, tmp_path: Path
) -> None:
    save_file({"count": torch.tensor([200, 2]).to(stored)}, tmp_path / "x.safetensors")
    model = nn.Module()
    model.register_buffer("count", torch.zeros(2, dtype=wanted))
    if words is None:
        fs.load_weights(model, tmp_path / "x.safetensors")
        assert model.get_buffer("count").tolist() == [200, 2]
    else:
        with pytest.raises(CheckpointError, match=f"count is stored as {words}"):
            fs.load_weights(model, tmp_path / "x.safetensors")


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16])
def test_values_that_float16_does_not_hold_are_refused(stored: torch.dtype, tmp_path: Path) -> None:
    model = nn.Linear(2, 1).half()
    largest = 65280.0 if stored == torch.bfloat16 else 65519.0
    for value in (largest, -math.inf, 65536.0, -70000.0, 1e30):
        weight = torch.tensor([[1.0, value]]).to(stored)
        save_file({"weight": weight, "bias": torch.ones(1, dtype=stored)}, tmp_path / "x.safetensors")
        if value in (largest, -math.inf):
            fs.load_weights(model, tmp_path / "x.safetensors")
            assert torch.equal(model.weight, weight.half())
            continue
        with pytest.raises(CheckpointError, match=r"weight holds values \(1 or more\) that are too large for float16"):
            fs.load_weights(model, tmp_path / "x.safetensors")


def test_a_directory_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SaveError, match="model exists already"):
        fs.save_pretrained(nn.Linear(2, 1), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_models_that_differ_between_ranks_are_not_mixed(tmp_path: Path) -> None:
    def work(context: DistributedContext) -> None:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.bias, float(context.rank))
        nn.init.ones_(model.weight)
        with pytest.raises(SaveError, match="the ranks differ in the parameter bias, which each of them has whole"):
            fs.save_pretrained(model, tmp_path / "model")

    on_ranks(2, work)
    assert not list(tmp_path.iterdir())


class Named(nn.Module):
    """Modules with the name of what torch.compile inserts, and one whose name ends so, beside a compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod, self.net_orig_mod, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.net: Any = torch.compile(nn.Linear(2, 2), backend="eager")


@pytest.mark.parametrize("wrapper", ["nobody", "fully_shard"])
def test_only_compiled_modules_lose_what_torch_adds_to_names(wrapper: str, tmp_path: Path) -> None:
    def work(context: DistributedContext) -> None:
        saved, loaded = Named(), Named()
        if wrapper == "fully_shard":
            fully_shard(saved.net)
            fully_shard(saved)
        fs.load_weights(saved, source)
        fs.save_pretrained(saved, tmp_path / "model")
        fs.load_weights(loaded, tmp_path / "model")
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))

    model, source = Named(), tmp_path / "source"
    fs.save_pretrained(model, source)
    on_ranks(2, work)
    with fs.open_checkpoint(tmp_path / "model") as index:
        modules = {name.rpartition(".")[0] for name in index.names}
    assert modules == {"_orig_mod", "net_orig_mod", "head", "net"}


@pytest.mark.parametrize("is_inside", [True, False])
def test_compiled_modules_under_a_checkpoint_wrapper_lose_it_too(is_inside: bool, tmp_path: Path) -> None:
    """Its parameters have names without its own part, its modules have names with it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    source = fs.save_pretrained(model, tmp_path / "plain")
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    if is_inside:
        other[0] = cast(nn.Module, torch.compile(other[0], backend="eager"))
    wrapped = checkpoint_wrapper(other if is_inside else cast(nn.Module, torch.compile(other, backend="eager")))
    fs.load_weights(wrapped, source)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    with fs.open_checkpoint(fs.save_pretrained(wrapped, tmp_path / "wrapped")) as index:
        assert sorted(index.names) == ["0.bias", "0.weight", "1.bias", "1.weight"]


class Views(nn.Module):
    """One buffer under two names, and parameters that are rows 0, 1 and rows 1, 2 of one matrix, unless separate."""

    def __init__(self, *, separate: str = "") -> None:
        super().__init__()
        memory, buffer = torch.rand(3, 4), torch.rand(3)
        self.a = nn.Parameter(memory[:2])
        self.b = nn.Parameter(torch.rand(2, 4) if separate == "b" else memory[1:])
        self.register_buffer("x", buffer)
        self.register_buffer("y", torch.rand(3) if separate == "y" else buffer)


@pytest.mark.parametrize(("separate", "words"), [("", None), ("b", "has a and b with"), ("y", "has x and y with")])
def test_tensors_that_share_memory_must_be_the_same(separate: str, words: str | None, tmp_path: Path) -> None:
    source, model = Views(separate=separate), Views()
    fs.save_pretrained(source, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if words is None:
        fs.load_weights(model, tmp_path / "model")
        before = source.state_dict()
    else:
        with pytest.raises(CheckpointError, match=f"{words} different values, and they share memory in the model"):
            fs.load_weights(model, tmp_path / "model")
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_gradients_are_not_clipped_to_what_is_no_norm(max_norm: float) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=f"max_norm={max_norm} is not a norm: give a number of at least 0"):
        fs.clip_grad_norm_(model, max_norm)
    with pytest.raises(ConfigError, match="clip_grad_norm_ takes the model, not generator"):
        fs.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]  # the mistake under test
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_what_is_neither_a_model_nor_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path or hub id of a checkpoint as source, not None"):
        fs.load_weights(nn.Linear(2, 1), None)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ModelError, match=r"'model' is neither a torch.nn.Module"):
        fs.save_pretrained("model", tmp_path / "x")  # type: ignore[arg-type]  # the mistake under test
    fs.save_pretrained(nn.Linear(2, 1), tmp_path / "sound")
    with_buffer = nn.Module()
    with_buffer.register_buffer("scale", torch.ones(2, device="meta"))
    for model, words in (
        (nn.LazyLinear(1), "has no shape and no values until"),
        (with_buffer, "is on the meta device"),
    ):
        with pytest.raises(ModelError, match=words):
            fs.save_pretrained(model, tmp_path / "x")
        with pytest.raises(ModelError, match=words):
            fs.load_weights(model, tmp_path / "sound")
    with pytest.raises(SaveError, match=r"weight is a tensor of torch.complex128, which safetensors files cannot hold"):
        fs.save_pretrained(nn.Linear(2, 1, dtype=torch.complex128), tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["sound"]


@pytest.mark.parametrize("seconds", [-1, 0, math.inf, "x"])
def test_what_is_no_timeout(seconds: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"timeout_seconds={seconds!r} is "):
        fs.save_pretrained(nn.Linear(2, 1), tmp_path / "model", timeout_seconds=seconds)
    with pytest.raises(ConfigError, match=f"timeout_seconds={seconds!r} is "):
        fs.load_weights(nn.Linear(2, 1), tmp_path / "model", timeout_seconds=seconds)
    assert not list(tmp_path.iterdir())


def test_a_process_group_that_exists_is_joined_and_left_alone() -> None:
    def work(context: DistributedContext) -> tuple[int, int, int]:
        with fs.init_distributed("cpu", replicas=2) as ranks:
            found = (ranks.rank, ranks.world_size, ranks.num_replicas)
        dist.barrier()  # still there
        return found

    assert on_ranks(2, work) == [(0, 2, 2), (1, 2, 2)]


def test_a_process_group_without_a_backend_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(context: DistributedContext) -> None:
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        with pytest.raises(ConfigError, match="backend cuda:nccl, but gloo is needed too"), fs.init_distributed("cpu"):
            pass

    on_ranks(1, work)


@pytest.mark.long
def test_the_interface_as_one_loop(tmp_path: Path) -> None:
    """Build on meta, shard, fill, train, save, resume on other ranks, write a model, all with what `shard` gave."""
    source = save_model(tmp_path / "model")

    def work(context: DistributedContext, last: int) -> list[float]:
        model = fs.shard(fs.build_model(source, context), context, param_dtype="float32")
        fs.load_weights(model, source)
        optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-3)
        losses = []
        with fs.Checkpointer(tmp_path / "run") as checkpointer:
            restored = checkpointer.restore(model, optimizer)
            for step in range(restored.step + 1 if restored else 1, last + 1):
                rows = token_batch(step).chunk(context.world_size)[context.rank]
                loss = model.module(input_ids=rows, labels=rows, use_cache=False).loss
                loss.backward()
                fs.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(context.all_reduce([float(loss.detach())])[0] / context.world_size)
                checkpointer.save(step, model, optimizer)
        if last == 4:
            fs.save_pretrained(model, tmp_path / "out")
        return losses

    expected, _, weights = train_plain(tied=True, steps=4, first=1)
    found = on_ranks(2, work, 2)[0] + on_ranks(3, work, 4)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(written[name], value, atol=1e-5) for name, value in weights.items())


@pytest.mark.parametrize("name", ["Checkpointer", "build_model", "load_weights", "save_pretrained"])
def test_the_examples_in_the_docs_of_functions_run(name: str, tmp_path: Path) -> None:
    save_file(nn.Linear(2, 1).state_dict(), tmp_path / "linear.safetensors")
    given = {"tmp_path": tmp_path, "run_dir": tmp_path / "run", "linear_file": tmp_path / "linear.safetensors"}
    given["model_directory"] = save_model(tmp_path / "llama")
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(fs, name), name, globs=given)
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0
    assert load_file(tmp_path / "linear.safetensors")
