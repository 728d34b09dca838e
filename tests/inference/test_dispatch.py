"""Dispatched models: the same logits as `from_pretrained`, from every format, under every map."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel, RwkvConfig

from fsdp_shard.checkpoint import StepContent, StepStore, convert, locate, save_step
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError, PlanError
from fsdp_shard.inference.config import DispatchConfig
from fsdp_shard.inference.dispatch import load_dispatched, model_from_config, plan_dispatch
from fsdp_shard.models import ModelConfig, tied_names
from fsdp_shard.training import collect_model_files
from tests.support.gguf_models import load_with_transformers, write_gguf
from tests.support.ranks import on_ranks
from tests.support.sharded import WRAPPERS, sharded
from tests.support.tiny import llama, llama_config, save_model, token_batch

IDS = token_batch(0, rows=2, length=9)
# Blocks of the tiny Llama in float32: embedding 37 kB (tied to the head), layers 51 kB each.
MAPS: dict[str, dict[str, Any]] = {
    "auto": {},
    "cpu": {"device_map": "cpu"},
    "disk": {"device_map": "disk"},
    "half": {"device_map": "auto", "max_memory": {"cpu": "110kB"}},
    "least": {"device_map": "sequential", "max_memory": {"cpu": "53kB"}},
    "named": {"device_map": {"": "disk", "model.layers.1": "cpu"}},
}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.clone()


def plain(path: Path, dtype: str = "float32") -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model


@pytest.fixture(scope="module")
def sources(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model as transformers wrote it, in several files, and as 2 and 8 ranks that train it save it."""
    root = tmp_path_factory.mktemp("formats")
    convert(tiny_model, root / "pieces", max_shard_size="60kB")
    found = {"one file": tiny_model, "pieces": root / "pieces"}
    for ranks in (2, 8):
        directory = root / str(ranks)
        on_ranks(ranks, _save, directory, tiny_model)
        found |= {f"{ranks} ranks": directory / "sharded", f"gathered by {ranks}": directory / "gathered"}
        found[f"dcp of {ranks}"] = directory / "dcp"
        shutil.copytree(tiny_model, directory / "dcp", ignore=shutil.ignore_patterns("model*"), dirs_exist_ok=True)
    return found


def _save(context: DistributedContext, directory: Path, model_dir: Path) -> None:
    """The tiny model, sharded over the ranks, saved in both layouts and by torch."""
    model = sharded(WRAPPERS["fsdp2"](param_dtype="float32"), context)
    files = collect_model_files(locate(model_dir), ModelConfig(dtype="float32"), DataConfig())
    state = StepContent(model.local_shards(), tied_names(llama()), model_files=files)
    for layout in ("sharded", "gathered"):
        save_step(context, StepStore(directory / layout / "checkpoints"), 1, state, layout=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.module.state_dict()}, checkpoint_id=directory / "dcp")


SOURCES = ("one file", "pieces", "2 ranks", "8 ranks", "gathered by 2", "gathered by 8", "dcp of 2", "dcp of 8")


@pytest.mark.long
@pytest.mark.parametrize("format", SOURCES)
@pytest.mark.parametrize("wanted", list(MAPS))
def test_logits_are_those_of_the_plain_model(sources: dict[str, Path], format: str, wanted: str) -> None:
    model = load_dispatched(sources[format], **MAPS[wanted])
    assert torch.equal(logits(model), logits(plain(sources["one file"])))
    assert torch.equal(logits(model), logits(model))


@pytest.fixture(scope="module")
def of_torch(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model as torch.save and DCP write it, and inside what accelerate's Trainer leaves around it."""
    root = tmp_path_factory.mktemp("torch")
    state = llama().state_dict()
    for name in ("bin", "dcp", "run"):
        shutil.copytree(tiny_model, root / name, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(state, root / "bin" / "pytorch_model.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state}, checkpoint_id=root / "dcp")
        dcp.save({"model": state}, checkpoint_id=root / "run" / "checkpoint-7" / "pytorch_model_fsdp_0")
    return {
        "bin": root / "bin",
        "the file itself": root / "bin" / "pytorch_model.bin",
        "dcp": root / "dcp",
        "a run of Trainer": root / "run",
        "inside a run of Trainer": root / "run" / "checkpoint-7",
    }


@pytest.mark.parametrize("format", ["bin", "the file itself", "dcp", "a run of Trainer", "inside a run of Trainer"])
@pytest.mark.parametrize("wanted", ["cpu", "disk"])
def test_checkpoints_of_torch_need_no_conversion(
    of_torch: dict[str, Path], tiny_model: Path, format: str, wanted: str
) -> None:
    model = load_dispatched(of_torch[format], **MAPS[wanted])
    assert torch.equal(logits(model), logits(plain(tiny_model)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wanted", ["cpu", "disk", "half"])
def test_generate_gives_the_same_tokens(tmp_path: Path, tied: bool, wanted: str) -> None:
    path = save_model(tmp_path / "model", seed=3, tied=tied)
    reference: Any = plain(path)
    reference.generation_config.pad_token_id = 0
    model = load_dispatched(path, **MAPS[wanted])
    model.generation_config.pad_token_id = 0
    expected = reference.generate(IDS, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize("wanted", ["cpu", "disk"])
def test_a_gguf_file_is_dispatched_in_place(tmp_path: Path, wanted: str) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType["Q8_0"], tied=True)
    ids = IDS % 32
    with torch.no_grad():
        expected = load_with_transformers(path)(input_ids=ids).logits
        found = load_dispatched(path, wanted)(input_ids=ids).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["cpu", "disk"])
def test_weights_are_cast_while_they_are_read(sources: dict[str, Path], dtype: str, wanted: str) -> None:
    model = load_dispatched(sources["2 ranks"], device_map=wanted, dtype=dtype)
    assert {param.dtype for param in model.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(logits(model), logits(plain(sources["one file"], dtype)))


@pytest.mark.parametrize("wanted", ["cpu", "disk"])
def test_weights_that_float16_does_not_hold_are_refused(wanted: str, tmp_path: Path) -> None:
    made = llama()
    made.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 4] = -1e6
    made.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] = math.inf  # stored as such
    made.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight holds values \(1 or more\) that are too"):
        logits(load_dispatched(tmp_path, wanted, dtype="float16"))


def test_the_stored_dtype_is_kept(tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    for wanted in (None, "keep"):
        assert load_dispatched(tmp_path, dtype=wanted).dtype == torch.bfloat16
    assert load_dispatched(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_disk_blocks_hold_no_memory_outside_their_pass(sources: dict[str, Path]) -> None:
    model = load_dispatched(sources["2 ranks"], **MAPS["half"])
    on_disk = [fqn for fqn, device in model.hf_device_map.items() if device == "disk"]
    assert on_disk
    assert "cpu" in model.hf_device_map.values()
    logits(model)
    for fqn in on_disk:
        assert all(param.is_meta for param in model.get_submodule(fqn).parameters())
    resident = sum(param.nbytes for param in model.parameters() if not param.is_meta)
    assert 0 < resident <= 110_000 - 50_000


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("format", ["one file", "2 ranks"])
def test_an_interrupted_pass_leaves_a_model_that_works(
    sources: dict[str, Path], format: str, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    model, expected = load_dispatched(sources[format], device_map="disk"), logits(plain(sources["one file"]))
    for _ in range(3):
        handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
        with pytest.raises(error):
            logits(model)
        handle.remove()
        assert torch.equal(logits(model), expected)
        assert all(
            param.is_meta == (format == "2 ranks") for name, param in model.named_parameters() if "norm" not in name
        )


def test_a_pass_in_inference_mode_does_not_bind_the_next(sources: dict[str, Path]) -> None:
    model = load_dispatched(sources["one file"], device_map="disk", dtype="bfloat16")
    with torch.inference_mode():
        first = model(input_ids=IDS).logits
    assert torch.equal(first, logits(model))


@pytest.mark.parametrize("format", ["one file", "pieces", "2 ranks"])
def test_two_saves_are_not_mixed(sources: dict[str, Path], tmp_path: Path, format: str) -> None:
    """A file that is replaced after loading, and before a block in it is read, is refused."""
    convert(sources["one file"], tmp_path / "one file")
    convert(sources["one file"], tmp_path / "pieces", max_shard_size="60kB")
    convert(sources["one file"], tmp_path / "2 ranks", format="sharded", ranks=2)
    path = tmp_path / format
    model = load_dispatched(path, {"": "cpu", "model.layers": "disk"}, dtype="bfloat16")
    again = load_dispatched(path, {"": "cpu", "model.layers": "disk"}, dtype="bfloat16")
    expected = logits(again)
    for file in path.glob("*.safetensors"):
        shutil.copy(file, tmp_path / "new")  # with a time of its own
        os.replace(tmp_path / "new", file)
    with pytest.raises(CheckpointError, match=r"safetensors was replaced or written to while the checkpoint was read"):
        logits(model)
    assert torch.equal(logits(again), expected)  # its files are open


def test_the_generation_config_comes_along(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "pad_token_id": 9}))
    config = load_dispatched(path).generation_config
    assert (config.eos_token_id, config.pad_token_id) == ([7, 8], 9)


def test_older_models_have_their_generation_settings_in_the_config(tmp_path: Path) -> None:
    config = save_model(tmp_path / "model") / "config.json"
    (tmp_path / "model" / "generation_config.json").unlink()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.5, "num_beams": 2}))
    ours, theirs = load_dispatched(tmp_path / "model"), AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert (ours.generation_config.repetition_penalty, ours.generation_config.num_beams) == (1.5, 2)


def changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of the model at `source` whose tensors went through `change`."""
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (
            lambda t: t.update(other=torch.ones(2), norm_weight=t.pop("model.norm.weight")),
            r"lacks model\.norm\.weight, which the model of its config\.json has; it holds norm_weight, other",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model\.norm\.weight \[7\] instead of \[36\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(257, 36)}),
            "different values, but its config.json ties them",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_refused(tiny_model: Path, tmp_path: Path, change: Any, says: str) -> None:
    path = changed(tiny_model, tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=says):
        load_dispatched(path)


def test_a_second_equal_copy_of_a_tied_tensor_and_a_missing_prefix_are_fine(tiny_model: Path, tmp_path: Path) -> None:
    def copy_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    for name, change in (("copy", copy_head), ("bare", without_prefix)):
        model = load_dispatched(changed(tiny_model, tmp_path / name, change), device_map="disk")
        assert torch.equal(logits(model), logits(plain(tiny_model)))


@pytest.mark.parametrize(
    ("wanted", "error", "says"),
    [
        ({"device_map": {"": 0, "model.norm": "cpu"}}, PlanError, "names GPU 0, but this machine has no GPU"),
        ({"device_map": "everywhere"}, ConfigError, "device_map=everywhere is not one of"),
        ({"max_memory": {"cpu": "1kB"}}, PlanError, "too little"),
        ({"max_memory": "1GB"}, ConfigError, "max_memory=1GB is not a mapping from devices to sizes such as"),
        ({"device_map": "cpu", "max_memory": {"cpu": "100kB"}}, PlanError, "take device_map=auto"),
        ({"dtype": "int3"}, ConfigError, "dtype=int3 is not one of"),
        ({"prefetch_blocks": 1.5}, ConfigError, r"prefetch_blocks=1\.5 is float, expected an int"),
        ({"prefetch_blocks": "2"}, ConfigError, "prefetch_blocks='2' is str, expected an int"),
        ({"prefetch_block": 2}, ConfigError, r"no option prefetch_block \(did you mean prefetch_blocks\?\)"),
        ({"torch_dtype": "float16"}, ConfigError, r"no option torch_dtype \(did you mean dtype\?\)"),
        ({"schedule": "layer_major"}, ConfigError, "load_dispatched has no option schedule; give some of"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_what_cannot_be_asked(tiny_model: Path, wanted: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_dispatched(tiny_model, **wanted)


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_the_default_device_changes_nothing(tiny_model: Path, device_map: str) -> None:
    with torch.device("meta"):
        model = load_dispatched(tiny_model, device_map)
    assert torch.equal(logits(model), logits(plain(tiny_model)))


def test_no_such_checkpoint_names_the_path(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ValueError), match="nothing-here"):
        load_dispatched(tmp_path / "nothing-here")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft
def test_a_base_with_an_adapter_beside_it_is_not_taken_for_the_model(tiny_model: Path, tmp_path: Path) -> None:
    """What a wrapper of peft has in its state dict, as training under FSDP saves it."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "model.safetensors").unlink()
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    torch.save(adapted.state_dict(), model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds 4 tensors of an adapter together with the weights of its base"):
        load_dispatched(model)


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_buffers_that_a_model_keeps_in_float32(tmp_path: Path, device_map: str) -> None:
    """DeepSeek-V3 adds a bias to the scores of its experts, which bfloat16 would make those of others."""
    config = DeepseekV3Config(
        vocab_size=257, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config)
    name, bias = next((n, b) for n, b in made.named_buffers() if n.endswith("e_score_correction_bias"))
    bias.normal_()
    made.save_pretrained(tmp_path)
    found = load_dispatched(tmp_path, device_map=device_map, dtype=torch.bfloat16)
    assert torch.equal(logits(found), logits(plain(tmp_path, "bfloat16")))
    assert found.get_buffer(name).dtype == torch.float32


def test_rwkv_leaves_its_weights_as_they_are(tmp_path: Path) -> None:
    """In eval mode it would halve those of later layers in place, which are read again, from a disk, for each pass."""
    torch.manual_seed(0)
    config = RwkvConfig(hidden_size=32, num_hidden_layers=4, vocab_size=257, rescale_every=2)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in made.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    made.save_pretrained(tmp_path)
    expected = logits(plain(tmp_path, "bfloat16"))
    streamed = load_dispatched(tmp_path, device_map="disk", dtype=torch.bfloat16)  # which is not that of the file
    for _ in range(2):
        torch.testing.assert_close(logits(streamed), expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    kept = load_dispatched(tmp_path)
    before = {name: param.clone() for name, param in kept.named_parameters()}
    logits(kept)
    assert all(torch.equal(param, before[name]) for name, param in kept.named_parameters())


def _budgets_of_ranks(context: DistributedContext, max_memory: dict[Any, str]) -> tuple[str, set[Any]]:
    settings = DispatchConfig(max_memory=max_memory)
    try:
        _, plan = plan_dispatch(model_from_config(llama_config(layers=4), settings), settings, context=context)
    except ConfigError as error:
        return str(error), set()
    return "", {*plan.devices.values(), plan.execution_device}


def test_each_rank_uses_its_own_gpu_of_those_with_a_budget() -> None:
    together = on_ranks(2, _budgets_of_ranks, {0: "1GB", 1: "1GB", "cpu": "1GB"})
    assert together == [("", {0}), ("", {1})]
    assert on_ranks(2, _budgets_of_ranks, {"cpu": "1GB"}) == [("", {"cpu"})] * 2
    for error, used in on_ranks(2, _budgets_of_ranks, {0: "1GB", "cpu": "1GB"}):
        assert not used
        assert "max_memory names GPU 0, but not GPU 1, and each of the 2 ranks" in error
        assert "give {0: SIZE, 1: SIZE}" in error
