"""LoRA on a quantized base under every wrapper, against peft on the decoded weights in one process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import encode_shards, locate, open_checkpoint
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import QUANTIZATION_CODES, ModelConfig, QuantizedWeight
from fsdp_shard.sharding import WRAPPERS, clean_fqns
from fsdp_shard.training.load_model import load_sharded
from fsdp_shard.training.peft.config import LoraConfig
from fsdp_shard.training.peft.initial_values import fill_new
from tests.support.digests import tensor_digests
from tests.support.plain_codes import quantized
from tests.support.ranks import on_ranks, update
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import llama, token_batch

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 5
KINDS = ("int8", "nf4")
RATE = 3e-2


@dataclass(frozen=True)
class Cell:
    wrapper: str
    kind: str
    dtype: str = "float32"
    recompute: bool = False


CELLS = [
    *(Cell(wrapper, kind) for wrapper, kind in itertools.product(("fsdp1", "fsdp2"), KINDS)),
    *(Cell(wrapper, "nf4", "bfloat16", recompute=True) for wrapper in ("fsdp1", "fsdp2")),
    Cell("ddp", "nf4"),
]
ALONE = [Cell("fsdp1", "nf4"), Cell("fsdp2", "int8")]


def run_cells(context: DistributedContext, directory: Path, cells: list[Cell]) -> list[dict[str, Any]]:
    return [_run(context, directory, cell) for cell in cells]


def _run(context: DistributedContext, directory: Path, cell: Cell) -> dict[str, Any]:
    """Losses, the rows that each quantized layer had when it first ran, and what this rank holds of them."""
    shard = WRAPPERS[cell.wrapper](param_dtype=cell.dtype, activation_checkpointing=cell.recompute)
    adapter = LoraConfig(rank=3, alpha=24, quantize=cell.kind)
    loaded = load_sharded(ModelConfig(path=str(directory)), shard, locate(directory), context, adapter, seed=7)
    model, rows = loaded.model, dict[str, bytes]()
    clean_fqn = clean_fqns(model.module)
    for name, module in model.module.named_modules():
        if isinstance(module, QuantizedWeight):
            plain = clean_fqn(name).removeprefix("module.")

            def note(module: Any, *_: Any, plain: str = plain) -> None:
                rows.setdefault(plain, module.rows.detach().clone().view(torch.uint8).numpy().tobytes())

            module.register_forward_pre_hook(note)
    held = {n: s.data.numel() * s.data.element_size() for n, s in model.local_shards().items() if n.endswith(".rows")}
    model.module.train()
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        tokens = token_batch(0).chunk(context.world_size)[context.rank]
        loss = model.module(input_ids=tokens, labels=tokens, use_cache=False).loss
        losses.append(update(optimizer, loss, context))
    said = loaded.adapter.describe(model.local_shards()) if loaded.adapter else ""
    return {"losses": losses, "rows": rows, "held": held, "said": said}


@pytest.fixture(scope="module")
def results(tiny_model: Path) -> dict[tuple[int, Cell], tuple[dict[str, Any], ...]]:
    """By number of ranks and cell: what each rank gave."""
    found: dict[tuple[int, Cell], tuple[dict[str, Any], ...]] = {}
    for ranks, cells in ((1, ALONE), (2, CELLS)):
        by_cell = zip(*on_ranks(ranks, run_cells, tiny_model, cells), strict=True)
        found |= {(ranks, cell): gave for cell, gave in zip(cells, by_cell, strict=True)}
    return found


@cache
def rows_and_values(kind: str) -> dict[str, tuple[bytes, torch.Tensor]]:
    return {name: quantized(layer.weight, kind) for name, layer in linears(llama()).items()}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and "layers" in name}


def decoded_peft(model: nn.Module, kind: str, rank: int = 3, alpha: int = 24) -> Any:
    """peft on `model`, whose linear layers get what their codes stand for, with the first values that ours gets."""
    with torch.no_grad():
        for name, linear in linears(model).items():
            linear.weight.copy_(rows_and_values(kind)[name][1])
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, settings)
    for name, param in wrapped.named_parameters():
        if "lora_" in name:
            whole = LocalShard(param, param.detach().view(-1), 0, tuple(param.shape), writes=True)
            fill_new({name.removeprefix("base_model.model."): whole}, {}, 7, {"init_lora_weights": True})
    return wrapped.train()


@cache
def plain_losses(kind: str, dtype: str, parts: int) -> list[float]:
    """Without sharding: weights in float32, a copy in `dtype` computes, the rows of a batch in `parts`."""
    weights, copy = decoded_peft(llama(), kind), decoded_peft(llama(), kind)
    for param in copy.parameters():  # buffers stay in float32, as under the wrappers
        param.data = param.data.to(getattr(torch, dtype))
    pairs = [(w, c) for w, c in zip(weights.parameters(), copy.parameters(), strict=True) if w.requires_grad]
    optimizer = torch.optim.AdamW([weight for weight, _ in pairs], lr=RATE)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        with torch.no_grad():
            for weight, computed in pairs:
                computed.copy_(weight)
        for tokens in token_batch(0).chunk(parts):
            loss = copy(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            total += float(loss.detach()) / parts
            for weight, computed in pairs:
                assert computed.grad is not None
                grad = computed.grad.float() / parts
                weight.grad = grad if weight.grad is None else weight.grad + grad
            copy.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.long
def test_losses_are_those_of_peft_on_the_decoded_weights(results: dict[tuple[int, Cell], Any]) -> None:
    for (ranks, cell), gave in results.items():
        wanted = plain_losses(cell.kind, cell.dtype, ranks)
        assert wanted[-1] < wanted[0] - 0.04, "the comparison means nothing unless training moves the adapter"
        for result in gave:
            assert result["losses"] == pytest.approx(wanted, rel=1e-5 if cell.dtype == "float32" else 1e-3), cell
    assert plain_losses("int8", "float32", 2) != pytest.approx(plain_losses("nf4", "float32", 2), rel=1e-4)


def test_each_layer_runs_on_the_very_bytes_that_its_weights_give(results: dict[tuple[int, Cell], Any]) -> None:
    """Whatever the wrapper, the number of ranks and the dtype that it computes in: bytes are moved, never cast."""
    for (ranks, cell), gave in results.items():
        wanted = {f"{name}.base_layer.quantized": rows for name, (rows, _) in rows_and_values(cell.kind).items()}
        for result in gave:
            assert result["rows"].keys() == wanted.keys(), (ranks, cell)
            assert [name for name in wanted if result["rows"][name] != wanted[name]] == [], (ranks, cell)


def test_a_rank_holds_a_part_of_the_bytes(results: dict[tuple[int, Cell], Any]) -> None:
    num_weights = sum(layer.weight.numel() for layer in linears(llama()).values())
    for (ranks, cell), gave in results.items():
        in_bfloat16 = num_weights * 2 / (1 if cell.wrapper == "ddp" else ranks)
        for result in gave:
            assert len(result["held"]) == 14
            assert sum(result["held"].values()) / in_bfloat16 < (0.55 if cell.kind == "int8" else 0.3), cell
            assert f"{num_weights / 1e6:,.2f} M of it in 14 matrices as {cell.kind}" in result["said"]


SETTINGS = [
    "train.steps=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.schedule=constant",
    "optim.lr=3e-2",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "launch.ranks=2",
    "seed=7",
    "adapter=lora",
    "adapter.rank=3",
    "adapter.alpha=6",
    "adapter.quantize=nf4",
]


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={tiny_model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


@pytest.fixture(scope="module")
def whole(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run_recipe("finetune", tmp_path_factory.mktemp("whole"), *settings, "shard=fsdp1", "checkpoint.every=2")
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.long
def test_a_run_goes_on_bit_equal_and_leaves_a_plain_adapter(
    whole: Ended, settings: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    step = f"{whole.run_dir}/checkpoints/step-00000002"
    rest = run_recipe("finetune", tmp_path / "same", *settings, "shard=fsdp1", f"resume={step}")
    assert rest.status == 0, rest.err
    assert rest.losses == whole.losses[2:]
    with open_checkpoint(rest.checkpoint) as one, open_checkpoint(whole.checkpoint) as other:
        assert len(one.names) == 2 * 7 * 2
        assert tensor_digests(one) == tensor_digests(other)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(whole.checkpoint))
    loaded = {name: param for name, param in model.named_parameters() if "lora_" in name}
    assert len(loaded) == 28
    assert all(bool(param.any()) for param in loaded.values())
    plain = [setting for setting in settings if not setting.startswith("adapter.quantize")]
    unlike = run_recipe("finetune", tmp_path / "unlike", *plain, f"resume={step}")
    assert unlike.status == 2
    assert "was trained with adapter.quantize=nf4" in unlike.err


def test_it_is_a_setting_of_lora(settings: list[str], tmp_path: Path) -> None:
    bare = [setting for setting in settings if not setting.startswith("adapter")]
    ended = run_recipe("finetune", tmp_path, *bare, "adapter.quantize=nf4")
    assert (ended.status, ended.err.count("error: ")) == (2, 1)
    assert "adapter.quantize" in ended.err


def test_weights_that_no_code_can_hold_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    name, rows = "model.layers.1.mlp.up_proj.weight", torch.empty(48, 36, dtype=torch.uint8)
    shards = {"rows": LocalShard(rows, rows.view(-1), 0, (48, 36), writes=True)}
    for number, (kind, words) in enumerate(((torch.float32, "not finite"), (torch.int8, "stored as I8"))):
        damaged = load_file(tiny_model / "model.safetensors") | {name: torch.zeros(85, 36).to(kind)}
        if kind.is_floating_point:
            damaged[name][84, 35] = float("nan")
        directory = tmp_path / str(number)
        directory.mkdir()
        save_file(damaged, directory / "model.safetensors", metadata={"format": "pt"})
        with (
            open_checkpoint(directory) as index,
            pytest.raises(CheckpointError, match=rf"tensor {name} .*{words}.*nf4.*adapter.quantize=none"),
        ):
            encode_shards(index, shards, {"rows": name}, QUANTIZATION_CODES["nf4"])
