"""Several adapters over one model: logits of peft, wherever the blocks are, and prompts that choose among them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_shard.errors import CheckpointError, ConfigError, DataError
from fsdp_shard.inference import GenerateSettings, load_dispatched
from fsdp_shard.inference.config import parse_adapters
from fsdp_shard.inference.generation.prompts import read_prompts
from fsdp_shard.inference.named_adapters import use_adapter
from tests.support.runs import run_recipe
from tests.support.tiny import save_model, token_batch

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ADAPTERS: dict[str, dict[str, Any]] = {
    "sql": {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    "chat": {"r": 5, "target_modules": ["v_proj", "q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


def save(directory: Path, base: Path, **settings: Any) -> Path:
    """An adapter with random weights, large enough to change what is generated."""
    torch.manual_seed(3)
    config = peft.LoraConfig(lora_alpha=40, init_lora_weights=False, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        model.save_pretrained(str(directory), save_embedding_layers=False)
    return directory


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: save(root / name, base, **settings) for name, settings in ADAPTERS.items()}


def test_its_base_has_a_relative_path(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are read throughout the model's life, whatever the working directory is by then."""
    config = save(tmp_path / "adapter", base) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base.name}))
    monkeypatch.chdir(base.parent)
    models = [
        load_dispatched(tmp_path / "adapter", "disk", dtype="float32"),
        load_dispatched(tmp_path / "adapter", "disk", dtype="float32", base=base.name),
    ]
    monkeypatch.chdir(tmp_path)
    whole = load_dispatched(tmp_path / "adapter", "cpu", dtype="float32", base=str(base))
    assert all(torch.equal(logits_of(model), logits_of(whole)) for model in models)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batch(5)).logits.clone()


@pytest.mark.parametrize(("dtype", "device_map"), [("float32", "cpu"), ("float32", "disk"), ("bfloat16", "disk")])
def test_logits_are_those_of_peft(base: Path, adapters: dict[str, Path], dtype: str, device_map: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    expected: dict[str | None, torch.Tensor] = {None: logits_of(plain)}
    of_peft = peft.PeftModel.from_pretrained(plain, adapters["sql"], "sql")
    of_peft.load_adapter(adapters["chat"], "chat")
    for name in adapters:
        of_peft.set_adapter(name)
        expected[name] = logits_of(of_peft)
    random_state = torch.get_rng_state()
    model = load_dispatched(base, device_map, dtype=dtype, adapters=adapters)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(logits_of(model), expected["sql"]), "the first one is active"
    for used in ("chat", None, "sql", None, "chat"):
        use_adapter(model, used)
        assert torch.equal(logits_of(model), expected[used])
    assert not any(param.requires_grad for param in model.parameters())
    model.set_adapter("sql")
    assert torch.equal(logits_of(model), expected["sql"])
    model.disable_adapters()
    assert torch.equal(logits_of(model), expected[None])
    assert not torch.equal(expected["sql"], expected["chat"])


@pytest.mark.long
def test_prompts_choose_their_adapter(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """On two ranks, in batches that would mix them; each completion is that of peft's own generate."""
    wanted = ["sql", None, "chat", "sql", None]
    rows = [{"prompt": f"select {number} of", "adapter": name} for number, name in enumerate(wanted)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"checkpoint={base}", f"adapters={{sql: {adapters['sql']}, chat: {adapters['chat']}}}", f"prompts={file}"]
    given += ["default_adapter=chat", "generation.max_new_tokens=6", "generation.batch_size=3", "launch.ranks=2"]
    ended = run_recipe("generate", tmp_path / "run", *given, "dispatch.max_memory={cpu: 120KB}", "launch.device=cpu")
    assert ended.status == 0, ended.err
    assert "disk" in ended.result["device_map"].values()
    found = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    assert [row["adapter"] for row in found] == ["sql", "chat", "chat", "sql", "chat"]

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters["sql"], "sql").eval()
    model.load_adapter(adapters["chat"], "chat")
    tokenizer = AutoTokenizer.from_pretrained(base)
    for row in found:
        model.set_adapter(row["adapter"])
        ids = tokenizer(row["prompt"], return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        text = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert row["completion"] == text
    assert found[1]["completion"] != found[0]["completion"]


def test_mistakes(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    dora = save(tmp_path / "dora", base, r=2, target_modules=["q_proj"], use_dora=True)
    whole = save(tmp_path / "whole", base, r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    missing = save(tmp_path / "missing", base, r=2, target_modules=["q_proj"])
    config = json.loads((missing / "adapter_config.json").read_text())
    (missing / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "v_proj"]}))
    experts = Path(shutil.copytree(missing, tmp_path / "experts"))
    (experts / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": ["experts.down_proj"]}))
    unsaved, unused = (Path(shutil.copytree(missing, tmp_path / name)) for name in ("unsaved", "unused"))
    (unsaved / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": ["norm"]}))
    (unused / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [0]}))
    for path, said in (
        (experts, r"has matrices for each expert \(experts\.down_proj\), and only adapters"),
        (dora, "has the magnitudes of DoRA, and only adapters"),
        (whole, "norm.weight, and only adapters that are products of two matrices"),
        (missing, r"its adapter_config\.json adapts .*v_proj of LlamaForCausalLM, and the adapter has no matrices"),
        (unused, r"has matrices for .*q_proj, which its adapter_config\.json does not adapt in LlamaForCausalLM"),
        (unsaved, r"has modules_to_save \(norm\), and only adapters"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_dispatched(base, "cpu", adapters={"one": path})
    for name in ("train", "training"):
        with pytest.raises(ConfigError, match=f"adapters has the name '{name}', which torch's modules use themselves"):
            load_dispatched(base, "cpu", adapters={name: adapters["sql"]})
    with pytest.raises(ConfigError, match="is an adapter itself"):
        load_dispatched(adapters["sql"], "cpu", adapters=adapters)
    with pytest.raises(ConfigError, match=r"max_memory\.cpu is 100 B, and the adapters alone need"):
        load_dispatched(base, "cpu", {"cpu": "100"}, adapters=adapters)
    for value, said in (("sql", "is not a mapping"), ({"a.b": "x"}, "has the name 'a.b'"), ({"a": 1}, "is not a map")):
        with pytest.raises(ConfigError, match=said):
            parse_adapters(value)
    known = {"sql": str(adapters["sql"])}
    for settings, said in (
        (GenerateSettings(checkpoint="x", prompt="a", default_adapter="sql"), "adapters, which are not set"),
        (GenerateSettings(checkpoint="x", prompt="a", adapters=known, default_adapter="b"), "adapters, which are sql"),
        (GenerateSettings(checkpoint="x", prompt="a", adapters=known, tensor_parallel=2), "tensor_parallel=2"),
    ):
        with pytest.raises(ConfigError, match=said):
            settings.check("")
    with pytest.raises(ConfigError, match=r"adapters\.a=.* holds the weights of a model, not an adapter"):
        _ = GenerateSettings(checkpoint=str(base), prompt="a", adapters={"a": str(base)}).adapter_sources
    with pytest.raises(ConfigError, match=r"adapters\.a=.* holds the weights of a model, not an adapter"):
        load_dispatched(base, "cpu", adapters={"a": base})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "adapter": "other"}\n')
    with pytest.raises(DataError, match=r"line 1, names the adapter 'other', and adapters has sql"):
        read_prompts(GenerateSettings(checkpoint="x", prompts=f"{tmp_path}/rows.jsonl", adapters=known))
