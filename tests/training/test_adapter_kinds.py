"""DoRA, initial values and chosen layers under every wrapper: against peft in one process, resumed, merged and run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Llama4TextConfig, PhimoeConfig, PreTrainedModel

from fsdp_shard.checkpoint import convert, open_checkpoint, verify
from fsdp_shard.data import DataConfig, ShuffledDataset
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import build_on_meta
from fsdp_shard.training.peft.config import LoraConfig
from fsdp_shard.training.peft.initial_values import fill_new
from fsdp_shard.training.peft.lora import inject_lora
from fsdp_shard.utils import replace_tensors
from tests.support.digests import tensor_digests
from tests.support.prepared_data import in_order, prepare_data
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import llama, llama_config, save_model, token_batch

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 4
SETTINGS = [
    f"train.steps={STEPS}",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.schedule=constant",
    "optim.lr=3e-2",
    "optim.weight_decay=0.1",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    f"checkpoint.every={STEPS // 2}",
    "seed=7",
    "adapter=lora",
    "adapter.rank=4",
    "adapter.alpha=12",
]
# What is set, and the same for peft.
KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "dora": (
        ["adapter.dora=true", "adapter.target_modules=[q_proj,down_proj,embed_tokens]"],
        {"use_dora": True, "target_modules": ["q_proj", "down_proj", "embed_tokens"]},
    ),
    "layers": (
        ["adapter.layers_to_transform=[1]"],
        {
            "layers_to_transform": [1],
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
    ),
    "gaussian": (["adapter.init=gaussian"], {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
    "orthogonal": (
        ["adapter.init=orthogonal", "adapter.dora=true"],
        {"target_modules": "all-linear", "init_lora_weights": "orthogonal", "use_dora": True},
    ),
    "eva": (
        ["adapter.init=eva"],
        {"target_modules": "all-linear", "init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0)},
    ),
}
PRINCIPAL = {kind: [f"adapter.init={kind}"] for kind in ("pissa", "pissa_fast", "olora")}
RUNS = [("dora", "fsdp2", 2), ("dora", "fsdp1", 2), ("dora", "ddp", 2), ("dora", "fsdp2", 1)]
RUNS += [(kind, "fsdp2", 2) for kind in ("layers", "gaussian", "orthogonal", "eva")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "untied", tied=False)  # so that embeddings can be adapted


@pytest.fixture(scope="module")
def settings(base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={base}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: " ".join(map(str, run)))
def run(
    request: pytest.FixtureRequest, settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, str, int], Ended]:
    kind, wrapper, ranks = request.param
    overrides = [*settings, *KINDS[kind][0], f"shard={wrapper}", f"launch.ranks={ranks}"]
    ended = run_recipe("finetune", tmp_path_factory.mktemp("runs") / "run", *overrides)
    assert ended.status == 0, ended.err
    return request.param, ended


def of_peft(base: Path, kind: str, samples: Any) -> Any:
    """peft's own model with the first values that ours gets; magnitudes are peft's own."""
    settings = KINDS[kind][1]
    config = peft.LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, low_cpu_mem_usage=kind == "eva")
    if kind == "eva":
        batches = ({"input_ids": torch.from_numpy(samples.batch([number]).input_ids)} for number in range(100))
        peft.initialize_lora_eva_weights(model, list(batches), show_progress_bar=False)
        return model.train()
    stored = {"init_lora_weights": settings.get("init_lora_weights", True), "r": 4}
    for name, param in model.named_parameters():
        if "lora_" in name:
            plain = name.removeprefix("base_model.model.")
            fill_new({plain: LocalShard(param, param.detach().view(-1), 0, tuple(param.shape), True)}, {}, 7, stored)
    return model.train()


@pytest.fixture(scope="module")
def plain(base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], Any]]:
    """By kind: the losses of the same training with peft in one process, and the logits of what came out."""
    config = DataConfig(path=f"{texts}/train.txt", sequence_length=32, cache_dir=str(tmp_path_factory.mktemp("plain")))
    samples = ShuffledDataset(in_order(prepare_data(config, AutoTokenizer.from_pretrained(base)).train), 7)
    return {kind: _plain_training(of_peft(base, kind, samples), samples) for kind in KINDS}


def _plain_training(model: Any, samples: Any, lr: float = 3e-2) -> tuple[list[float], torch.Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)
    losses = []
    for step in range(STEPS):
        batch = samples.batch(range(4 * step, 4 * step + 4))
        logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, logits_of(model.eval())


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batch(5)).logits


@pytest.mark.long
def test_is_trained_as_by_peft(run: Any, plain: dict[str, tuple[list[float], Any]], base: Path) -> None:
    (kind, _, _), ended = run
    losses, logits = plain[kind]
    assert losses[-1] < losses[0] - 0.04, "the comparison means nothing unless training moves the adapter"
    assert ended.losses == pytest.approx(losses, rel=1e-4)
    assert verify(ended.checkpoint).is_sound
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ended.checkpoint).eval()
    torch.testing.assert_close(logits_of(loaded), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_is_merged_as_by_peft(run: Any, base: Path, tmp_path: Path) -> None:
    _, ended = run
    convert(ended.checkpoint, tmp_path / "merged")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ended.checkpoint)
    with open_checkpoint(tmp_path / "merged") as index:
        for name, param in model.merge_and_unload().named_parameters():
            torch.testing.assert_close(index.read(name), param.detach(), rtol=1e-6, atol=1e-6, msg=name)
    arguments = (f"checkpoint={ended.run_dir}", "prompt=hello", "generation.max_new_tokens=2")
    generated = run_recipe("generate", tmp_path / "generate", *arguments)
    assert generated.status == 0, generated.err


@pytest.mark.long
def test_resume_is_bit_equal(run: Any, settings: list[str], tmp_path: Path) -> None:
    (kind, wrapper, ranks), ended = run
    step = f"resume={ended.run_dir}/checkpoints/step-{STEPS // 2:08d}"
    overrides = [*settings, *KINDS[kind][0], f"shard={wrapper}", f"launch.ranks={ranks}"]
    rest = run_recipe("finetune", tmp_path, *overrides, step)
    assert rest.status == 0, rest.err
    assert rest.losses == ended.losses[STEPS // 2 :]
    with open_checkpoint(rest.checkpoint) as one, open_checkpoint(ended.checkpoint) as other:
        assert tensor_digests(one) == tensor_digests(other)


@pytest.mark.long
def test_a_step_of_another_kind_is_not_resumed(settings: list[str], tmp_path: Path) -> None:
    first = run_recipe("finetune", tmp_path / "first", *settings, *KINDS["layers"][0])
    assert first.status == 0, first.err
    config = json.loads((first.checkpoint / "adapter_config.json").read_text())
    assert config["layers_to_transform"] == [1]
    for number, change in enumerate((["adapter.layers_to_transform=[0]"], ["adapter.dora=true", *KINDS["layers"][0]])):
        ended = run_recipe("finetune", tmp_path / str(number), *settings, *change, f"resume={first.run_dir}")
        assert ended.status == 2, ended.err
        assert "holds another adapter than these settings define" in ended.err


def test_first_values_are_distributed_as_those_of_peft() -> None:
    """Their product is zero at first, whatever the kind, and their scale is that of peft's own draws."""
    for kind in ("default", "gaussian", "orthogonal"):
        word = True if kind == "default" else kind
        config = peft.LoraConfig(r=8, target_modules=["up_proj"], init_lora_weights=word)  # type: ignore[arg-type]  # wider in fact than it is annotated
        model = peft.get_peft_model(llama(tied=False), config)
        for layer in (0, 1):
            prefix = f"base_model.model.model.layers.{layer}.mlp.up_proj.lora_"
            theirs = [model.get_parameter(f"{prefix}{factor}.default.weight").detach() for factor in "AB"]
            ours = [torch.full(values.shape, math.nan) for values in theirs]
            for factor, values in zip("AB", ours, strict=True):
                shard = LocalShard(values, values.view(-1), 0, tuple(values.shape), writes=True)
                fill_new({f"{prefix}{factor}.default.weight": shard}, {}, 7, {"init_lora_weights": word, "r": 8})
            assert float((ours[1] @ ours[0]).abs().max()) < 1e-6
            for one, two in zip(ours, theirs, strict=True):
                assert float(one.std()) == pytest.approx(float(two.std()), rel=0.3)


def adapted(model: PreTrainedModel, **settings: Any) -> list[str]:
    inject_lora(model, LoraConfig(**settings), "base", {})
    return [name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]


def test_layers_are_chosen_by_number() -> None:
    found = adapted(build_on_meta(llama_config(layers=3), "float32"), layers_to_transform=[2, 0])
    assert {name.split(".")[2] for name in found} == {"0", "2"}
    assert len(found) == 14
    found = adapted(build_on_meta(llama_config(), "float32"), layers_to_transform=[1], target_modules=["q_proj"])
    assert found == ["model.layers.1.self_attn.q_proj"]
    for number in (2, -1):
        for targets in ([], ["q_proj"]):
            settings = {"layers_to_transform": [1, number], "target_modules": targets}
            with pytest.raises(ConfigError, match=rf"layers_to_transform has {number}, .* its layers are 0 to 1"):
                adapted(build_on_meta(llama_config(), "float32"), **settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adapter.dora=true", "adapter.quantize=nf4"], ["adapter.dora=true", "adapter.quantize=nf4", "Remove one"]),
        (["adapter.init=orthogonal", "adapter.rank=3"], ["adapter.init=orthogonal", "even adapter.rank"]),
        (["adapter.layers_to_transform=[5]"], ["adapter.layers_to_transform has 5", "0 to 1"]),
        (
            ["adapter.dora=true", "shard=fsdp1", "shard.min_params=500"],
            ["adapter.dora=true", "shard.min_params=500", "shard=fsdp2"],
        ),
        (["adapter.init=svd"], ["adapter.init=svd", "gaussian"]),
        (["adapter.init=pissa", "adapter.quantize=nf4"], ["adapter.init=pissa", "adapter.quantize=nf4"]),
        (["adapter.init=olora", "adapter.dora=true"], ["adapter.init=olora", "adapter.dora=true"]),
        (["adapter.init=pissa", "train.ema_decay=0.9"], ["train.ema_decay", "adapter.init=pissa"]),
        (
            ["adapter.init=pissa", "adapter.target_modules=[embed_tokens]"],
            ["adapter.init=pissa is for linear layers", "model.embed_tokens is Embedding"],
        ),
        (["adapter.init=pissa", "adapter.rank=20"], ["at least adapter.rank=20 inputs", "k_proj"]),
    ],
)
def test_what_cannot_be_is_said(settings: list[str], tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, *arguments)
    assert ended.status == 2
    assert all(word in ended.err for word in words), ended.err


# PiSSA and OLoRA: peft changes the base model, which stays as it is here.
FROM_WEIGHTS = [("pissa", "fsdp2", 2), ("pissa", "fsdp1", 2), ("pissa", "ddp", 2), ("pissa_fast", "fsdp2", 1)]
FROM_WEIGHTS += [("olora", "fsdp2", 2)]


@pytest.fixture(scope="module", params=FROM_WEIGHTS, ids=lambda run: " ".join(map(str, run)))
def from_weights(
    request: pytest.FixtureRequest, settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, str, int], list[str], Ended]:
    kind, wrapper, ranks = request.param
    overrides = [*settings, *PRINCIPAL[kind], f"shard={wrapper}", f"launch.ranks={ranks}", "optim.lr=3e-3"]
    overrides += ["adapter.modules_to_save=[model.norm]"]
    ended = run_recipe("finetune", tmp_path_factory.mktemp("runs") / "run", *overrides)
    assert ended.status == 0, ended.err
    return request.param, overrides, ended


@pytest.fixture(scope="module")
def plain_from_weights(
    base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[float], Any]]:
    """As `plain`: with peft, whose own initialization changes the base model."""
    config = DataConfig(path=f"{texts}/train.txt", sequence_length=32, cache_dir=str(tmp_path_factory.mktemp("plain")))
    samples = ShuffledDataset(in_order(prepare_data(config, AutoTokenizer.from_pretrained(base)).train), 7)
    found = {}
    for kind, word in (("pissa", "pissa"), ("pissa_fast", "pissa"), ("olora", "olora")):
        settings = peft.LoraConfig(
            r=4,
            lora_alpha=12,
            target_modules="all-linear",
            modules_to_save=["model.norm"],
            init_lora_weights=word,  # type: ignore[arg-type]  # wider in fact than it is annotated
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
        found[kind] = _plain_training(model.train(), samples, lr=3e-3)
    return found


@pytest.mark.long
def test_begins_and_trains_as_by_peft(
    from_weights: Any, plain_from_weights: dict[str, tuple[list[float], Any]], base: Path, tmp_path: Path
) -> None:
    """Losses are those of peft; what is saved is plain LoRA that any tool adds to the base model as it was."""
    (kind, _, _), _, ended = from_weights
    losses, logits = plain_from_weights[kind]
    assert losses[-1] < losses[0] - 0.02, "the comparison means nothing unless training moves the adapter"
    is_exact = kind != "pissa_fast"  # whose random vectors are others than those that peft would draw
    assert ended.losses == pytest.approx(losses, rel=1e-4 if is_exact else 5e-3)
    assert ended.losses[0] == pytest.approx(losses[0], rel=1e-6), "the model begins as it was"
    config = json.loads((ended.checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 24, True)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ended.checkpoint).eval()
    if is_exact:
        torch.testing.assert_close(logits_of(loaded), logits, rtol=1e-3, atol=1e-3)
    assert verify(ended.checkpoint).is_sound
    convert(ended.checkpoint, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), logits_of(loaded), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_resume_divides_what_was_combined(from_weights: Any, tmp_path: Path) -> None:
    _, overrides, ended = from_weights
    rest = run_recipe("finetune", tmp_path, *overrides, f"resume={ended.run_dir}/checkpoints/step-{STEPS // 2:08d}")
    assert rest.status == 0, rest.err
    assert rest.losses == ended.losses[STEPS // 2 :]
    for part in ("", "optimizer"):
        with open_checkpoint(rest.checkpoint / part) as one, open_checkpoint(ended.checkpoint / part) as other:
            assert tensor_digests(one) == tensor_digests(other)


@pytest.mark.parametrize("kind", [Llama4TextConfig, PhimoeConfig])
def test_a_router_that_is_a_linear_layer_is_left_alone(kind: Any) -> None:
    """It returns a tuple, which peft does not expect of such a layer."""
    given = {"moe_layers": [1], "head_dim": 8, "intermediate_size_mlp": 48} if kind is Llama4TextConfig else {}
    config = kind(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=2, vocab_size=257, pad_token_id=0, **given,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    inject_lora(model, LoraConfig(rank=2), "x", {})
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    replace_tensors(model, lambda tensor: torch.randn(tensor.shape) if tensor.is_meta else tensor)
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 257)
    assert any("q_proj" in name for name in names)
    assert not any("router" in name for name in names)
