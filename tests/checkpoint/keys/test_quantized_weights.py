"""Quantized weights are said to be quantized, and their scales are never cast."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import FP8Linear

from fsdp_shard.checkpoint import convert, locate, verify
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.cli import run_command
from fsdp_shard.errors import CheckpointError
from fsdp_shard.inference import load_dispatched
from tests.checkpoint.keys.peft_adapters import assert_same, by_peft, edit, save
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer, llama, llama_config, save_adapter

Tensors = dict[str, torch.Tensor]
LINEAR = "model.layers.0.mlp.down_proj"


def fp8(tensors: Tensors) -> None:
    """As transformers' own module keeps its weight."""
    rows, columns = tensors[f"{LINEAR}.weight"].shape
    layer = FP8Linear(columns, rows, block_size=(128, 128), activation_scheme="dynamic", has_bias=False)
    layer.weight_scale_inv.data.fill_(0.5)
    tensors |= {f"{LINEAR}.{name}": tensor.contiguous() for name, tensor in layer.state_dict().items()}


def packed(*names: str, dtype: torch.dtype = torch.uint8) -> Callable[[Tensors], None]:
    """As the writers of the other methods name what stands for a weight (they need a GPU)."""

    def change(tensors: Tensors) -> None:
        del tensors[f"{LINEAR}.weight"]
        tensors[LINEAR + names[0]] = torch.ones(8, 4, dtype=dtype)
        tensors.update({LINEAR + name: torch.ones(4) for name in names[1:]})

    return change


METHODS = {
    "fp8": fp8,
    "mxfp4": packed("_blocks", "_scales"),
    "gptq": packed(".qweight", ".qzeros", ".scales", ".g_idx", dtype=torch.int32),
    "awq": packed(".qweight", ".qzeros", ".scales", dtype=torch.int32),
    "bitsandbytes": packed(".weight", ".weight.absmax", ".weight.quant_map"),
    "hqq": packed(".W_q", ".scale", ".zero", ".nbits"),
    "quanto": packed(".weight._data._data", ".weight._scale", ".weight._shift"),  # int4
    "compressed-tensors": packed(".weight_packed", ".weight_scale", dtype=torch.int32),
}


def write(
    directory: Path, change: Callable[[Tensors], None], method: str | None = None, entries: dict[str, Any] | None = None
) -> Path:
    tensors = {name: tensor.clone() for name, tensor in llama().state_dict().items() if name != "lm_head.weight"}
    change(tensors)
    config: dict[str, Any] = llama_config().to_dict()
    if method is not None:
        config["quantization_config"] = {"quant_method": method} | (entries or {})
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_the_dtype_of_the_computation_is_kept(tmp_path: Path) -> None:
    """Most floating-point numbers of a model in 4 bits are float32 scales; the model computes in bfloat16."""
    source = write(tmp_path / "model", METHODS["bitsandbytes"], "bitsandbytes")
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text()) == config


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_quantized_weights_are_never_cast(method: str, has_config: bool, tmp_path: Path) -> None:
    source = write(tmp_path / "model", METHODS[method], method if has_config else None)
    with pytest.raises(CheckpointError, match=rf"model is quantized \({method}\), and dtype=bfloat16 would cast"):
        convert(source, tmp_path / "cast", dtype="bfloat16")
    assert not (tmp_path / "cast").exists()
    convert(source, tmp_path / "kept")
    assert verify(tmp_path / "kept", source).is_sound
    with pytest.raises(CheckpointError, match=rf"model is quantized \({method}\), and only weights in floating point"):
        load_dispatched(source)


@pytest.mark.parametrize(
    ("method", "dtype", "names"),
    [
        ("aqlm", torch.int16, [".codes", ".codebooks", ".scales"]),
        ("spqr", torch.int64, [".dense_weights", ".second_order_data"]),
        ("metal", torch.uint32, [".weight", ".scales", ".qbiases"]),
    ],
)
def test_codes_of_a_method_that_the_config_names(
    method: str, dtype: torch.dtype, names: list[str], tmp_path: Path
) -> None:
    source = write(tmp_path / "model", packed(*names, dtype=dtype), method)
    with pytest.raises(CheckpointError, match=rf"model is quantized \({method}\), and dtype=bfloat16 would cast"):
        convert(source, tmp_path / "cast", dtype="bfloat16")


@pytest.mark.parametrize("has_config", [True, False])
def test_codes_of_mlx(has_config: bool, tmp_path: Path) -> None:
    """It writes no quant_method: the entry is `quantization`, and the same again as quantization_config."""
    source = write(tmp_path / "model", packed(".weight", ".scales", ".biases", dtype=torch.uint32))
    config = json.loads((source / "config.json").read_text())
    if has_config:
        config["quantization"] = config["quantization_config"] = {"group_size": 64, "bits": 4}
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model is quantized \(mlx\), and dtype=bfloat16 would cast"):
        convert(source, tmp_path / "cast", dtype="bfloat16")
    convert(source, tmp_path / "kept")
    assert verify(tmp_path / "kept", source).is_sound


IN_FORWARD: list[tuple[str, dict[str, Any]]] = [
    ("bitnet", {"linear_class": "autobitlinear"}),
    ("bitnet", {"linear_class": "bitlinear", "quantization_mode": "online"}),
    ("fp_quant", {"store_master_weights": True}),
    ("fouroversix", {"keep_master_weights": True}),
]


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(("method", "entries"), IN_FORWARD)
def test_plain_weights_that_are_quantized_in_each_forward_pass(
    method: str, entries: dict[str, Any], is_nested: bool, tmp_path: Path
) -> None:
    """Plain linear layers with them are another model: BitNet has weights of three values."""
    source = write(tmp_path / "model", lambda tensors: None, method, entries)
    if is_nested:
        config = json.loads((source / "config.json").read_text())
        config["text_config"] = {"quantization_config": config.pop("quantization_config")}
        (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "kept")
    assert verify(tmp_path / "kept", source).is_sound
    assert (tmp_path / "kept" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with pytest.raises(
        CheckpointError, match=rf"model is quantized \({method}\), where it is stored or in each forward"
    ):
        load_dispatched(source)
    with pytest.raises(CheckpointError, match=r"cast its scales or what they are computed from"):
        convert(source, tmp_path / "cast", dtype="bfloat16")


@pytest.mark.parametrize(
    ("method", "entries"), [("bitnet", {"quantization_mode": "offline"}), ("fp_quant", {"store_master_weights": False})]
)
def test_plain_weights_that_no_forward_pass_quantizes(method: str, entries: dict[str, Any], tmp_path: Path) -> None:
    load_dispatched(write(tmp_path / "model", lambda tensors: None, method, entries), device_map="cpu")


@pytest.mark.parametrize("command", ["generate", "evaluate", "finetune"])
def test_the_commands_say_so(command: str, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_shard.cli.run_recipe.start_garbage_collection", lambda: None)
    source = write(tmp_path / "model", fp8, "fp8")
    text = [f"data.path={texts / 'train.txt'}", "data.sequence_length=64"]
    settings = {
        "generate": [f"checkpoint={source}", "prompt=abc"],
        "evaluate": [f"checkpoint={source}", *text],
        "finetune": [f"model.path={source}", *text],
    }[command]
    with pytest.raises(CheckpointError, match=r"is quantized \(fp8\).*; convert it with dequantize=true first"):
        run_command([command, *settings, f"run_dir={tmp_path / 'run'}"])


@pytest.mark.long
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_plan_is_of_what_a_conversion_makes(has_weights: bool, tmp_path: Path) -> None:
    source = write(tmp_path / "model", fp8, "fp8")
    convert(source, tmp_path / "plain", dequantize=True)
    if not has_weights:
        (source / "model.safetensors").unlink()
    plans = [
        run_recipe("plan", tmp_path / f"run of {path.name}", f"model.path={path}")
        for path in (source, tmp_path / "plain")
    ]
    note = "The weights are quantized (fp8); this is the plan of what convert dequantize=true makes of them."
    assert [note in plan.out for plan in plans] == [True, False]
    assert plans[0].result["per_rank"] == plans[1].result["per_rank"]


def test_no_plan_of_what_cannot_be_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "model", fp8, "fp8")
    (source / "model.safetensors").unlink()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is quantized \(gptq\).*give the model that it was made from"):
        locate(source).check_dequantizable()


def test_a_config_that_was_left_behind(tmp_path: Path) -> None:
    """Weights in floating point are plain, whatever the config says; and float8 alone is a dtype, not a method."""

    def add_positions(tensors: Tensors) -> None:
        tensors["model.embeddings.position_ids"] = torch.arange(8)[None]

    convert(write(tmp_path / "model", add_positions, "fp8"), tmp_path / "cast", dtype="bfloat16")

    def cast(tensors: Tensors) -> None:
        tensors[f"{LINEAR}.weight"] = tensors[f"{LINEAR}.weight"].to(torch.float8_e4m3fn)

    convert(write(tmp_path / "eight", cast), tmp_path / "other", dtype="bfloat16")
    with open_checkpoint(tmp_path / "other") as index:
        assert index.dtypes[f"{LINEAR}.weight"] == "F8_E4M3"


@pytest.mark.parametrize("name", ["_scale", "_scales", "_weight_scale"])
def test_float8_with_scales_is_quantized_without_a_config_that_says_so(name: str, tmp_path: Path) -> None:
    """transformers keeps all experts of a layer in one parameter, which is no `.weight`."""
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=257, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[experts] = tensors[experts].to(torch.float8_e4m3fn)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config.to_json_string())
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    load_dispatched(tmp_path / "model", device_map="cpu")  # float8 alone is a dtype
    tensors[experts + name] = torch.full((4, 1, 1), 0.5)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"model is quantized \(float8 of an unknown method\), and only weights in"
    ):
        load_dispatched(tmp_path / "model", device_map="cpu")


def test_a_passed_config_says_that_the_weights_are_quantized(tmp_path: Path) -> None:
    """Without that, everybody would read the codes as plain numbers."""
    source = write(tmp_path / "model", fp8, "fp8")
    without, with_entry = (write(tmp_path / f"{method}", lambda tensors: None, method) for method in (None, "fp8"))
    with pytest.raises(
        CheckpointError, match=r"quantized \(fp8\), and config=.*None has no quantization_config.*dequant"
    ):
        convert(source, tmp_path / "target", config=without)
    assert not (tmp_path / "target").exists()
    convert(source, tmp_path / "kept", config=with_entry)
    source = write(tmp_path / "gptq", METHODS["gptq"], "gptq")
    with pytest.raises(
        CheckpointError, match=r"quantized \(gptq\), and config=.* says so; give a config that has it\.$"
    ):
        convert(source, tmp_path / "target", config=without)


@pytest.mark.parametrize("modules", [["q_proj", "down_proj"], "all-linear"])
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_of_a_quantized_base(method: str, modules: str | list[str], tmp_path: Path) -> None:
    """It is not wrong, but only weights in floating point can be changed by it."""
    base = write(tmp_path / "base", METHODS[method], method)
    adapter, plain = tmp_path / "adapter", write(tmp_path / "plain", lambda tensors: None)
    save(AutoModelForCausalLM.from_pretrained(plain), {"target_modules": modules}, adapter)
    edit(adapter, {"base_model_name_or_path": str(base)}, None)
    advice = (
        rf"convert source={base} target=DIR dequantize=true" if method in ("fp8", "mxfp4") else "give base=DIR, the"
    )
    message = rf"adapter is an adapter whose base {base} is quantized \({method}\), and .*{advice}"
    with pytest.raises(CheckpointError, match=message) as error:
        convert(adapter, tmp_path / "target")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value), "ranks send it to each other"
    with pytest.raises(CheckpointError, match=message):
        load_dispatched(adapter, device_map="cpu")
    report = verify(adapter)
    assert report.is_sound
    assert re.search(f"not compared with its base model: .*{message}", report.notes[0])
    convert(adapter, tmp_path / "merged", base=plain)


def test_an_adapter_of_a_plain_base_whose_config_names_a_method(tmp_path: Path) -> None:
    base = write(tmp_path / "base", lambda tensors: None, "bitsandbytes")
    adapter = save_adapter(tmp_path / "adapter", write(tmp_path / "plain", lambda tensors: None))
    convert(adapter, tmp_path / "expected")
    edit(adapter, {"base_model_name_or_path": str(base)}, None)
    assert verify(adapter).notes == ()
    convert(adapter, tmp_path / "found")
    assert verify(tmp_path / "found", tmp_path / "expected").is_sound


def test_an_adapter_of_the_layers_that_are_not_quantized(tmp_path: Path) -> None:
    """As the attention of gpt-oss, of which only the experts are quantized."""
    base = write(tmp_path / "base", METHODS["mxfp4"], "mxfp4")
    plain = write(tmp_path / "plain", lambda tensors: None)
    save(AutoModelForCausalLM.from_pretrained(plain), {"target_modules": ["q_proj"]}, tmp_path / "adapter")
    edit(tmp_path / "adapter", {"base_model_name_or_path": str(base)}, None)
    convert(tmp_path / "adapter", tmp_path / "target")
    found, expected = load_file(tmp_path / "target/model.safetensors"), by_peft(tmp_path / "adapter", plain)
    changed = [name for name in found if name.endswith("q_proj.weight")]
    assert_same({name: found[name] for name in changed}, {name: expected[name] for name in changed})
    assert found.keys() == load_file(base / "model.safetensors").keys()
    edit(tmp_path / "adapter", {}, lambda tensors: {name: tensor[:, :5] for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=r"q_proj has shape .*it is an adapter of another model"):
        convert(tmp_path / "adapter", tmp_path / "other")


def test_what_hqq_itself_writes_is_not_converted_without_its_numbers(tmp_path: Path) -> None:
    layer = {"W_q": torch.ones(8, 4, dtype=torch.uint8), "scale": torch.ones(4), "nbits": 4, "packing": "4bit_u8"}
    (tmp_path / "model").mkdir()
    torch.save({LINEAR: layer}, tmp_path / "model" / "qmodel.pt")
    with pytest.raises(CheckpointError, match=rf"quantized by HQQ, which needs more than the tensors of {LINEAR}\.W_q"):
        convert(tmp_path / "model", tmp_path / "target")


@pytest.mark.parametrize("name", ["quanto_qmap.json", "quantization_config.json"])
def test_files_that_describe_quantized_weights_go_with_them(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model", METHODS["quanto"])
    (source / name).write_text("{}")
    convert(source, tmp_path / "kept")
    assert (tmp_path / "kept" / name).is_file()
