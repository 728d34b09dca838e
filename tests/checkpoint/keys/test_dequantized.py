"""`convert dequantize=true`: the weights that transformers itself makes of the same quantized files, bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    FineGrainedFP8Config,
    GptOssConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from fsdp_shard.checkpoint import convert, open_checkpoint, verify
from fsdp_shard.checkpoint.keys.dequantized import dequantize
from fsdp_shard.errors import CheckpointError
from fsdp_shard.inference import load_dispatched
from tests.support.tiny import byte_tokenizer, save_model

Tensors = dict[str, torch.Tensor]
BLOCK = (16, 32)


def deepseek() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        dtype="bfloat16",
    )


def gpt_oss() -> GptOssConfig:
    return GptOssConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )


def write(directory: Path, config: Any, tensors: Tensors, quantization: dict[str, Any]) -> Path:
    directory.mkdir()
    document = {**json.loads(config.to_json_string()), "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(document))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(directory)
    return directory


def stored(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def plain(config: Any, directory: Path) -> Tensors:
    """The tensors of a model as transformers stores them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def fp8_model(root: Path, scale_format: str = "float", block: tuple[int, int] | None = BLOCK) -> Path:
    """As DeepSeek publishes its models, by the operation of transformers that quantizes."""
    blocks: Any = block  # None, too, which its types leave out
    settings = FineGrainedFP8Config(weight_block_size=blocks, scale_fmt=scale_format)
    quantize: Any = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors: Tensors = {}
    for name, tensor in plain(deepseek(), root / "plain").items():
        is_linear = "_proj" in name and tensor.dim() == 2
        tensors |= quantize.convert({name: tensor}) if is_linear else {name: tensor}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert sum(name.endswith("_scale_inv") for name in tensors) > 10
    return write(root / "fp8", deepseek(), tensors, settings.to_dict())


def mxfp4_model(root: Path) -> Path:
    """As gpt-oss is published: the experts as blocks of 4-bit numbers and one exponent for each."""
    tensors = plain(gpt_oss(), root / "plain")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 125, (experts, columns, rows // 32), dtype=torch.uint8)
    return write(root / "mxfp4", gpt_oss(), tensors, {"quant_method": "mxfp4"})


def deepseek_v4_model(root: Path) -> Path:
    """As DeepSeek-V4 is published: other names of weights and scales, and experts in fp4."""
    config = DeepseekV4Config(
        vocab_size=257,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe"],
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        hc_mult=2,
        dtype="bfloat16",
    )
    settings = FineGrainedFP8Config(weight_block_size=BLOCK, scale_fmt="ue8m0")
    quantize: Any = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors: Tensors = {}
    for name, tensor in plain(config, root / "plain").items():
        stored = name.removeprefix("model.").replace("lm_head", "head").replace("embed_tokens", "embed")
        if ".experts." in stored:
            rows, columns = tensor.shape
            exponents = torch.randint(115, 122, (rows, columns // 32), dtype=torch.uint8)
            tensors[stored] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            tensors[stored.replace("weight", "scale")] = exponents.view(torch.float8_e8m0fnu)
        elif re.search(r"attn\.(indexer\.)?w(q|o|kv)\w*\.weight|shared_experts", stored):
            scaled = quantize.convert({stored: tensor})
            tensors |= {key.replace("weight_scale_inv", "scale"): value.contiguous() for key, value in scaled.items()}
        else:
            tensors[stored] = tensor
    return write(root / "fp4", config, tensors, settings.to_dict())


MODELS = {
    "fp8": fp8_model,
    "fp8, and experts in fp4": deepseek_v4_model,
    "fp8 with exponents as scales": lambda root: fp8_model(root, "ue8m0"),
    "fp8 with one scale a weight": lambda root: fp8_model(root, block=None),  # a scale of shape [1, 1]
    "mxfp4": mxfp4_model,
}


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_transformers(name: str, dtype: str | None, tmp_path: Path) -> None:
    source, target = MODELS[name](tmp_path), tmp_path / "target"
    convert(source, target, dequantize=True, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto").state_dict()
    assert not hasattr(AutoConfig.from_pretrained(target), "quantization_config")
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    found = model.state_dict()
    assert found.keys() == expected.keys()
    written = getattr(torch, dtype or "bfloat16")
    floats = [tensor for tensor in load_file(target / "model.safetensors").values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {written}
    for key, tensor in found.items():  # transformers leaves the others of fp8 as they are stored
        same = expected[key].to(written) if tensor.is_floating_point() else expected[key]
        assert torch.equal(tensor, same.to(tensor.dtype)), key
    if name == "fp8, and experts in fp4" and dtype != "float32":
        return  # transformers keeps some layers of DeepSeek-V4 in float32, and not each version can run the others then
    batch = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(load_dispatched(target, device_map="cpu")(batch).logits, model(batch).logits)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_dtype_of_the_caller_changes_nothing(name: str, tmp_path: Path) -> None:
    source = MODELS[name](tmp_path)
    (source / "hf_quant_config.json").write_text("{}")  # which would describe the result wrongly
    convert(source, tmp_path / "expected", dequantize=True, dtype="float32")
    torch.set_default_dtype(torch.float16)
    try:
        convert(source, tmp_path / "found", dequantize=True, dtype="float32")
    finally:
        torch.set_default_dtype(torch.float32)
    assert verify(tmp_path / "found", tmp_path / "expected").is_sound
    assert not (tmp_path / "found" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("format", ["sharded", "dcp"])
def test_rank_files(format: str, tmp_path: Path) -> None:
    source = fp8_model(tmp_path)
    convert(source, tmp_path / "whole", dequantize=True)
    convert(source, tmp_path / "ranks", dequantize=True, format=format, ranks=3)
    with open_checkpoint(tmp_path / "whole") as whole, open_checkpoint(tmp_path / "ranks") as ranks:
        assert set(whole.names) == set(ranks.names)
        assert all(torch.equal(whole.read(name), ranks.read(name)) for name in whole.names)


@pytest.mark.parametrize(
    ("name", "end"),
    [("fp8", "o_proj.weight"), ("fp8, and experts in fp4", "experts.3.w2.weight"), ("mxfp4", "experts.down_proj")],
)
def test_any_range(name: str, end: str, tmp_path: Path) -> None:
    """Ranges that begin and end inside rows, blocks and experts."""
    source = MODELS[name](tmp_path)
    with open_checkpoint(source) as stored:
        index = dequantize(stored, "F32")
        weight = next(key for key in index.names if key.endswith(end))
        assert stored.tensors.get(weight) != index.tensors[weight]
        whole = index.read(weight).flatten()
        for start, count in ((0, 1), (5, 7), (63, 2), (500, 900), (len(whole) - 3, 3)):
            data = bytearray(4 * count)
            index.read_into(weight, start, data)
            assert torch.equal(torch.frombuffer(data, dtype=torch.float32), whole[start : start + count])


def test_blocks_that_do_not_divide_a_weight(tmp_path: Path) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128: the last block is smaller. transformers refuses or misreads them."""
    (tmp_path / "plain").mkdir()
    weight = (torch.randn(40, 48) * 10).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    tensors = {"x.weight": weight, "x.weight_scale_inv": scale}
    settings = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    convert(write(tmp_path / "model", deepseek(), tensors, settings), tmp_path / "target", dequantize=True)
    expected = weight.float() * scale.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :48]
    with open_checkpoint(tmp_path / "target") as index:
        assert torch.equal(index.read("x.weight"), expected.to(torch.bfloat16))


@pytest.mark.parametrize("place", ["text_config", "decoder"])
def test_the_size_of_blocks_in_the_config_of_a_part(place: str, tmp_path: Path) -> None:
    """192 rows and two scales: blocks of 128 and of 64. transformers looks into the text model's config, too."""
    weight, scale = (torch.randn(192, 128) * 10).to(torch.float8_e4m3fn), torch.tensor([[1.0], [4.0]])
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = write(tmp_path / "model", deepseek(), {"x.weight": weight, "x.weight_scale_inv": scale}, {})
    config = {"model_type": "x", place: {"hidden_size": 128, "quantization_config": settings}}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "target", dequantize=True, dtype="float32")
    expected = weight.float() * scale.repeat_interleave(128, 0)[:192]
    with open_checkpoint(tmp_path / "target") as index:
        assert torch.equal(index.read("x.weight"), expected)
    written = json.loads((tmp_path / "target" / "config.json").read_text())
    assert written == {"model_type": "x", place: {"hidden_size": 128}, "dtype": "float32"}


@pytest.mark.parametrize("settings", [{}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": None}])
def test_the_size_of_blocks_is_not_guessed(settings: dict[str, Any], tmp_path: Path) -> None:
    weight = torch.ones(192, 128).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.ones(2, 1)}
    source = write(tmp_path / "model", deepseek(), tensors, settings)
    with pytest.raises(
        CheckpointError, match=r"config\.json has no quantization_config with weight_block_size.* \[2, 1\] is not known"
    ):
        convert(source, tmp_path / "target", dequantize=True)
    assert not (tmp_path / "target").exists()
    for number, shape in enumerate([(1, 1), (192, 1), (192, 128)]):  # which need no size
        scale = torch.rand(shape)
        tensors = {"x.weight": weight, "x.weight_scale_inv": scale}
        convert(
            write(tmp_path / f"{number}", deepseek(), tensors, settings), tmp_path / f"target-{number}", dequantize=True
        )
        with open_checkpoint(tmp_path / f"target-{number}") as index:
            assert torch.equal(index.read("x.weight"), (weight.float() * scale).to(torch.bfloat16))


def test_damage_is_not_passed_on(tmp_path: Path) -> None:
    """The digests are those of the stored weights and scales, which are not what is written."""
    convert(fp8_model(tmp_path), tmp_path / "kept")
    path = tmp_path / "kept" / "model.safetensors"
    sound = path.read_bytes()
    for part in ("weight", "weight_scale_inv"):
        name = f"model.layers.1.self_attn.o_proj.{part}"
        content = bytearray(sound)
        content[content.index(load_file(path)[name].view(torch.uint8).numpy().tobytes())] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"tensor {name} is not what was written"):
            convert(tmp_path / "kept", tmp_path / "target", dequantize=True)
        path.write_bytes(sound)


def test_what_cannot_be_dequantized(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not quantized, and dequantize=true is for weights in fp8 or mxfp4"):
        convert(save_model(tmp_path / "model"), tmp_path / "target", dequantize=True)
    weight = torch.ones(32, 32).to(torch.float8_e4m3fn)
    cases: list[tuple[Tensors, str]] = [
        ({"x.weight": weight, "x.weight_scale_inv": torch.ones(3, 1)}, r"x.weight_scale_inv of F32 \[3, 1\] cannot be"),
        ({"x.weight": weight, "x.weight_scale_inv": torch.ones(2, 1, dtype=torch.int32)}, "of I32"),
        ({"x.weight_scale_inv": torch.ones(1, 1)}, "lacks x.weight, a part of a quantized weight"),
        (
            {"x.weight": weight, "y.weight": weight.clone(), "y.weight_scale_inv": torch.ones(1, 1)},
            "there is no x.weight_scale",
        ),
    ]
    settings = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    for number, (tensors, message) in enumerate(cases):
        source = write(tmp_path / f"model-{number}", deepseek(), tensors, settings)
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "target", dequantize=True)
    tensors = {
        "x_blocks": torch.ones(2, 4, 2, 16, dtype=torch.uint8),
        "x_scales": torch.ones(2, 4, 3, dtype=torch.uint8),
    }
    source = write(tmp_path / "mxfp4", gpt_oss(), tensors, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"x_scales of U8 \[2, 4, 3\] cannot be the scales"):
        convert(source, tmp_path / "target", dequantize=True)
    weight, scale = torch.full((32, 32), 400.0).to(torch.float8_e4m3fn), torch.full((2, 1), 1000.0)
    source = write(tmp_path / "large", deepseek(), {"x.weight": weight, "x.weight_scale_inv": scale}, settings)
    with pytest.raises(CheckpointError, match=r"x\.weight holds values that are too large for float16"):
        convert(source, tmp_path / "target", dequantize=True, dtype="float16")
    assert not (tmp_path / "target").exists()


WEIGHT = "model.layers.0.self_attn.o_proj.weight"


def changed(source: Path, tensors: Tensors, entries: dict[str, Any] | None = None) -> Path:
    """Add tensors to a model, and entries to its config, where None removes one."""
    stored = load_file(source / "model.safetensors") | tensors
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | (entries or {})
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.filterwarnings("ignore:.*left out model.tid2eid")
@pytest.mark.parametrize(
    "added",
    [
        {"model.tid2eid": torch.arange(8).view(2, 4)},  # DeepSeek-V4 has such a table
        {"model.tid2eid": torch.arange(8, dtype=torch.int32).view(2, 4)},
        {f"{WEIGHT}_scale": torch.ones(4, 2)},
    ],
    ids=["int64", "int32", "weight_scale"],
)
def test_the_result_is_labeled_plain(added: Tensors, tmp_path: Path) -> None:
    source, target = changed(fp8_model(tmp_path), added), tmp_path / "target"
    convert(source, target, dequantize=True, dtype="float32")
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="float32").state_dict()
    found = load_dispatched(target, device_map="cpu").state_dict()
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in found.items())
    kept = load_file(target / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in added.items() if name.endswith("tid2eid"))


def test_scales_by_the_names_of_mistral(tmp_path: Path) -> None:
    """Mistral Large 4 has `qscale_weight`, one number a weight, and `qscale_act`."""
    source, other = fp8_model(tmp_path, block=None), tmp_path / "other"
    tensors = {key.replace("weight_scale_inv", "qscale_weight"): value for key, value in stored(source).items()}
    acts = {key.replace("qscale_weight", "qscale_act"): torch.ones(()) for key in tensors if "qscale_weight" in key}
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    write(other, deepseek(), {key: value.clone() for key, value in (tensors | acts).items()}, settings)
    for directory in (source, other):
        convert(directory, tmp_path / f"{directory.name}-plain", dequantize=True)
    one, two = stored(tmp_path / "fp8-plain"), stored(tmp_path / "other-plain")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.filterwarnings("ignore:.*left out model.tid2eid")
def test_a_table_of_integers_is_not_quantized(tmp_path: Path) -> None:
    """A config that was left behind names a method, and no tensor is of it."""
    tensors = plain(deepseek(), tmp_path / "plain") | {"model.tid2eid": torch.arange(8).view(2, 4)}
    source = write(tmp_path / "model", deepseek(), tensors, {"quant_method": "fp8"})
    load_dispatched(source, device_map="cpu")
    with pytest.raises(CheckpointError, match="is not quantized, and dequantize=true"):
        convert(source, tmp_path / "target", dequantize=True)


def test_scales_of_inputs_and_outputs_are_dropped(tmp_path: Path) -> None:
    """transformers, too, does not read them when it dequantizes."""
    scales = ("activation_scale", "input_scale", "output_scale")
    added = {WEIGHT.removesuffix("weight") + name: torch.tensor(0.5) for name in scales}
    source, target = changed(fp8_model(tmp_path), added), tmp_path / "target"
    convert(source, target, dequantize=True)
    assert not added.keys() & load_file(target / "model.safetensors").keys()
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    batch = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(load_dispatched(target, device_map="cpu")(batch).logits, expected(batch).logits)


def test_the_scale_of_the_inputs_of_experts_is_dropped(tmp_path: Path) -> None:
    weight, name = (torch.randn(3, 32, 64) * 10).to(torch.float8_e4m3fn), "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: weight, f"{name}_scale_inv": torch.rand(3, 1, 1), f"{name}_activation_scale": torch.ones(3)}
    settings = {"quant_method": "fp8", "weight_block_size": None}
    convert(write(tmp_path / "model", deepseek(), tensors, settings), tmp_path / "target", dequantize=True)
    found = load_file(tmp_path / "target" / "model.safetensors")
    assert found.keys() == {name}
    expected = weight.double() * tensors[f"{name}_scale_inv"].double()
    assert torch.equal(found[name], expected.float().bfloat16())


OTHER_FORMS: dict[str, tuple[str, Tensors, str]] = {
    "fp4": (
        "fp8",
        {"x.weight": torch.ones(32, 16, dtype=torch.int8), "x.scale": torch.ones(32, 2)},
        r"x\.scale of F32 \[32, 2\] cannot be .* two numbers of fp4 a byte in blocks of \[1, 32\]",
    ),
    "int8": (
        "fp8",
        {"x.weight": torch.ones(32, 16, dtype=torch.int8), "x.SCB": torch.ones(32)},
        r"x\.weight is I8 with scales in x\.SCB",
    ),
    "packed": (
        "mxfp4",
        {"x.weight_packed": torch.ones(32, 4, dtype=torch.int32), "x.weight_scale": torch.ones(32, 1)},
        r"x\.weight_packed is I32 with scales in x\.weight_scale",
    ),
    "a part": (
        "fp8",
        {
            "x.weight": torch.ones(32, 16, dtype=torch.int8),
            "x.SCB": torch.ones(32, 1),
            "y.weight": torch.ones(16, 32).to(torch.float8_e4m3fn),
            "y.weight_scale_inv": torch.ones(1, 1),
        },
        r"x\.weight is I8 with scales in x\.SCB",
    ),
    "unknown scales": (
        "fp8",
        {"x.weight": torch.ones(32, 16, dtype=torch.int8), "x.range": torch.ones(32)},
        r"no scales are named _scale_inv .* and no codes _blocks.*x\.weight is I8",
    ),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_another_form_is_not_passed_on_as_dequantized(name: str, tmp_path: Path) -> None:
    method, tensors, message = OTHER_FORMS[name]
    settings = {"quant_method": method, "weight_block_size": list(BLOCK)}
    source = write(tmp_path / "model", deepseek(), tensors, settings)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "target", dequantize=True)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [{}, {"torch_dtype": "float16"}])
def test_the_dtype_without_one_in_the_config(entries: dict[str, str], stored: torch.dtype, tmp_path: Path) -> None:
    source = fp8_model(tmp_path)
    tensors = load_file(source / "model.safetensors")
    cast = {name: tensor.to(stored) for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    changed(source, cast, {"dtype": None} | entries)
    convert(source, tmp_path / "target", dequantize=True)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    found = load_file(tmp_path / "target" / "model.safetensors")
    assert found[WEIGHT].dtype == expected[WEIGHT].dtype
    assert torch.equal(found[WEIGHT], expected[WEIGHT])


@pytest.mark.parametrize("settings", [{}, {"quant_method": "fp8", "weight_block_size": [17, 32]}])
def test_the_size_of_blocks_is_that_of_the_source_and_not_of_another_config(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Blocks of 17 rows would also fit the shapes of all weights and scales."""
    source = fp8_model(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads(deepseek().to_json_string()) | ({"quantization_config": settings} if settings else {})
    (other / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "expected", dequantize=True)
    convert(source, tmp_path / "found", dequantize=True, config=other)
    assert verify(tmp_path / "found", tmp_path / "expected").is_sound
    assert "quantization_config" not in json.loads((tmp_path / "found" / "config.json").read_text())
