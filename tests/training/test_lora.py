"""LoRA under both wrappers: against peft in one process, saved in peft's format, resumed, merged and run."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
)

from fsdp_shard.checkpoint import convert, locate, open_checkpoint, verify
from fsdp_shard.data import DataConfig, ShuffledDataset
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import CheckpointError
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import load_tokenizer
from fsdp_shard.training.peft.initial_values import fill_new
from tests.support.digests import digest_tensor, tensor_digests
from tests.support.prepared_data import in_order, prepare_data
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, save_model, token_batch

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 6
SETTINGS = [
    f"train.steps={STEPS}",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.schedule=constant",
    "optim.lr=1e-2",  # at 3e-2, rounding decides: peft alone differs by 0.4 in logits, for a batch of 4 or 4 of 1
    "optim.weight_decay=0.1",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "seed=7",
    "adapter=lora",
    "adapter.rank=3",
    "adapter.alpha=6",
    "adapter.modules_to_save=[model.norm]",
]


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={tiny_model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


@pytest.fixture(scope="module")
def runs(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    root = tmp_path_factory.mktemp("runs")
    done = {}
    for wrapper in ("fsdp1", "fsdp2"):
        ended = run_recipe(
            "finetune",
            root / wrapper,
            *settings,
            f"shard={wrapper}",
            "launch.ranks=2",
            f"checkpoint.every={STEPS // 2}",
        )
        assert ended.status == 0, ended.err
        done[wrapper] = ended
    return done


def peft_model(base: Path) -> Any:
    """peft's own model with the first values that ours gets."""
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules="all-linear", modules_to_save=["model.norm"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, param in model.named_parameters():
        if "lora_" in name:
            plain = name.removeprefix("base_model.model.")
            whole = LocalShard(param, param.detach().view(-1), 0, tuple(param.shape), writes=True)
            fill_new({plain: whole}, {}, 7, {"init_lora_weights": True})
    return model.train()


@pytest.fixture(scope="module")
def plain(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], torch.Tensor]:
    """The same training with peft in one process: its losses, and the logits of what came out."""
    config = DataConfig(path=f"{texts}/train.txt", sequence_length=32, cache_dir=str(tmp_path_factory.mktemp("plain")))
    windows = in_order(prepare_data(config, AutoTokenizer.from_pretrained(tiny_model)).train)
    samples = ShuffledDataset(windows, 7)
    model = peft_model(tiny_model)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
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
    with torch.no_grad():
        return losses, model.eval()(token_batch(5)).logits


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batch(5)).logits


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_losses_are_those_of_peft(
    runs: dict[str, Ended], plain: tuple[list[float], torch.Tensor], wrapper: str
) -> None:
    assert plain[0][-1] < plain[0][0] - 0.08, "the comparison means nothing unless training moves the adapter"
    assert runs[wrapper].losses == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_peft_loads_what_the_ranks_saved(
    runs: dict[str, Ended], plain: tuple[list[float], torch.Tensor], tiny_model: Path, wrapper: str
) -> None:
    step = runs[wrapper].checkpoint
    assert sorted(path.name for path in step.iterdir() if path.is_file()) == [
        "adapter_base.json",
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "run_config.yaml",
        "run_id.json",
        "trainer.json",
    ]
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), step).eval()
    torch.testing.assert_close(logits_of(model), plain[1], rtol=1e-4, atol=1e-4)
    with open_checkpoint(step) as index:
        assert index.format == "peft"
        assert len(index.names) == 2 * 7 * 2 + 1
        for name in index.names:
            assert bool((index.read(name) != 0).any(dim=-1).all()), f"{name} has rows that no rank wrote"
    report = verify(step)
    assert report.is_sound, report.problems
    assert report.content_checked


def test_an_adapter_is_merged_wherever_weights_are_read(
    runs: dict[str, Ended], tiny_model: Path, tmp_path: Path, plain: tuple[list[float], torch.Tensor]
) -> None:
    """By convert, by generate and evaluate, and by a run that trains all of it; as peft's merge_and_unload does."""
    step = runs["fsdp2"].checkpoint
    merged = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), step).merge_and_unload()
    report = convert(step, tmp_path / "merged")
    assert (report.source_format, report.target_format) == ("peft", "huggingface")
    wanted = dict(merged.named_parameters())
    with open_checkpoint(tmp_path / "merged") as index, open_checkpoint(tiny_model) as base:
        assert set(index.names) == set(base.names) == set(wanted)
        for name, param in wanted.items():
            torch.testing.assert_close(index.read(name), param.detach(), rtol=0, atol=1e-6)
            assert (digest_tensor(index, name) == digest_tensor(base, name)) == (
                "layernorm" in name or "embed" in name
            ), name
    logits = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(logits, plain[1], rtol=1e-4, atol=1e-4)
    for device_map in ("cpu", "disk"):
        torch.testing.assert_close(logits_of(load_dispatched(step, device_map=device_map)), logits)
    convert(step, tmp_path / "ranks", format="sharded", ranks=3, dtype="bfloat16")
    with open_checkpoint(tmp_path / "ranks") as index:
        for name, param in wanted.items():
            torch.testing.assert_close(index.read(name), param.detach().bfloat16(), rtol=2**-7, atol=1e-6)


# peft sets patterns for fused experts, and looks for modules of these names.
ignore_patterns = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")


def save_mixtral(directory: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 257, "hidden_size": 36, "intermediate_size": 20, "num_attention_heads": 3}
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=1, num_local_experts=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


@ignore_patterns
def test_an_adapter_of_experts_is_merged_wherever_weights_are_read(settings: list[str], tmp_path: Path) -> None:
    """peft adapts the experts of Mixtral, each of them tensors of files and a part of the model's, and the router."""
    save_mixtral(tmp_path / "base")
    given = [text for text in settings if "modules_to_save" not in text]
    ended = run_recipe("finetune", tmp_path / "run", *given, f"model.path={tmp_path}/base", "train.steps=1")
    assert ended.status == 0, ended.err
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wanted = peft.PeftModel.from_pretrained(base, ended.checkpoint).merge_and_unload()
    convert(ended.checkpoint, tmp_path / "merged")
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    before = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "base").named_parameters())
    for name, param in wanted.named_parameters():
        torch.testing.assert_close(merged[name], param, rtol=0, atol=1e-6)
        assert torch.equal(param, before[name]) == any(part in name for part in ("norm", "embed", "lm_head")), name
    for device_map in ("cpu", "disk"):
        model = load_dispatched(ended.checkpoint, device_map=device_map)
        torch.testing.assert_close(logits_of(model), logits_of(wanted), rtol=1e-4, atol=1e-5)


@ignore_patterns
def test_an_adapter_of_experts_with_a_new_head_is_merged(settings: list[str], tmp_path: Path) -> None:
    """The class of the base is asked for its names, and has a head that only the adapter holds."""
    save_mixtral(tmp_path / "base")
    rows = [{"text": "ab " * n, "label": ["neg", "pos"][n % 2]} for n in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [text for text in settings if "modules_to_save" not in text and "data.path" not in text]
    given += [f"model.path={tmp_path}/base", "model.task=sequence_classification", "model.labels=[neg,pos]"]
    ended = run_recipe("finetune", tmp_path / "run", *given, f"data.path={tmp_path}/rows.jsonl", "train.steps=1")
    assert ended.status == 0, ended.err
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    wanted = peft.PeftModel.from_pretrained(base, ended.checkpoint).merge_and_unload().state_dict()
    convert(ended.checkpoint, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    torch.testing.assert_close(merged, wanted, rtol=0, atol=1e-6)


def test_a_tokenizer_that_lies_beside_an_adapter_is_taken(
    runs: dict[str, Ended], tmp_path: Path, tiny_model: Path
) -> None:
    """As trl saves one with tokens and a chat template of its own."""
    adapter = shutil.copytree(runs["fsdp2"].checkpoint, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert locate(adapter).tokenizer_directory == locate(tiny_model).config_directory
    tokenizer.chat_template = "its own"
    tokenizer.save_pretrained(adapter)
    assert load_tokenizer(locate(adapter).tokenizer_directory).chat_template == "its own"
    convert(adapter, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == "its own"
    assert (tmp_path / "merged" / "config.json").is_file()
    (adapter / "tokenizer.json").unlink()
    assert locate(adapter).tokenizer_directory == locate(tiny_model).config_directory, (
        "settings without a tokenizer are none"
    )


def test_generate_and_evaluate_take_a_run_with_an_adapter(
    runs: dict[str, Ended], tmp_path: Path, texts: Path, tiny_model: Path
) -> None:
    ended = run_recipe(
        "generate", tmp_path / "g", f"checkpoint={runs['fsdp2'].run_dir}", "prompt=hello", "generation.max_new_tokens=4"
    )
    assert ended.status == 0, ended.err
    values = {}
    for name, checkpoint in (("base", tiny_model), ("adapter", runs["fsdp2"].run_dir)):
        arguments = [f"checkpoint={checkpoint}", f"data.path={texts}/held_out.txt", "data.sequence_length=32"]
        ended = run_recipe("evaluate", tmp_path / name, *arguments)
        assert ended.status == 0, ended.err
        values[name] = ended.result["loss"]
    assert values["adapter"] < values["base"] - 0.1


def resume(whole: Ended, target: Path, settings: list[str], *overrides: str) -> Ended:
    step = f"{whole.run_dir}/checkpoints/step-{STEPS // 2:08d}"
    return run_recipe("finetune", target, *settings, f"resume={step}", *overrides)


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_resume_on_the_same_ranks_is_bit_equal(
    runs: dict[str, Ended], settings: list[str], tmp_path: Path, wrapper: str
) -> None:
    rest = resume(runs[wrapper], tmp_path, settings, f"shard={wrapper}", "launch.ranks=2")
    assert rest.status == 0, rest.err
    assert rest.losses == runs[wrapper].losses[STEPS // 2 :]
    for part in ("", "optimizer"):
        with open_checkpoint(rest.checkpoint / part) as one, open_checkpoint(runs[wrapper].checkpoint / part) as other:
            assert tensor_digests(one) == tensor_digests(other)


def test_resume_under_another_wrapper_on_another_number_of_ranks(
    runs: dict[str, Ended], settings: list[str], tmp_path: Path
) -> None:
    rest = resume(runs["fsdp1"], tmp_path, settings, "shard=fsdp2", "launch.ranks=1")
    assert rest.status == 0, rest.err
    assert rest.losses == pytest.approx(runs["fsdp1"].losses[STEPS // 2 :], abs=1e-5)


@pytest.mark.long
def test_what_cannot_go_on_says_so(
    runs: dict[str, Ended], settings: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    without = [setting for setting in settings if not setting.startswith("adapter")]
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.01)
    model.save_pretrained(other)
    for number, (arguments, words) in enumerate(
        (
            ([*without], ["saved with an adapter", "adapter=lora"]),
            ([*settings, f"model.path={other}"], ["was trained on", str(tiny_model), str(other)]),
            ([*settings, "adapter.rank=4"], ["holds another adapter", "adapter.*"]),
            ([*settings, "adapter.alpha=5"], ["lora_alpha=6", "adapter.*"]),
        )
    ):
        ended = resume(runs["fsdp2"], tmp_path / str(number), arguments)
        assert ended.status == 2, (ended.status, ended.err)
        assert ended.err.startswith("error: ")
        assert all(word in ended.err for word in words), ended.err
        assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "adapter.target_modules=[q_proj,qq_proj]",
            ["target_modules has qq_proj", "layers are q_proj, k_proj"],
        ),
        ("adapter.exclude_modules=[o_prj]", ["adapter.exclude_modules has o_prj"]),
        (
            "adapter={target_modules: [q_proj, up_proj], modules_to_save: [up_proj]}",
            ["target_modules has up_proj, but the model has such modules only where adapter.modules_to_save excludes"],
        ),
        (
            "adapter={target_modules: [q_proj, o_proj], exclude_modules: [o_proj]}",
            ["target_modules has o_proj, but the model has such modules only where adapter.exclude_modules"],
        ),
        ("adapter.target_modules=[query]", ["has query, but LlamaForCausalLM", "q_proj, k_proj, v_proj, o_proj"]),
        ("adapter.modules_to_save=[lm_head]", ["ties to that of another module"]),
        ("adapter.dropout=1.0", ["adapter.dropout=1.0", "less than 1.0"]),
    ],
)
def test_settings_that_do_not_fit_the_model(
    settings: list[str], tmp_path: Path, argument: str, words: list[str]
) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, argument)
    assert ended.status == 2
    assert all(word in ended.err for word in words), ended.err


def test_adapters_that_cannot_be_merged_say_why(runs: dict[str, Ended], tiny_model: Path, tmp_path: Path) -> None:
    step = runs["fsdp2"].checkpoint

    def changed(name: str, **values: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        config = json.loads((step / "adapter_config.json").read_text()) | values
        (directory / "adapter_config.json").write_text(json.dumps(config))
        shutil.copy(step / "adapter_model.safetensors", directory)
        return directory

    moved = changed("moved", base_model_name_or_path=str(tmp_path / "gone"))
    for directory, words in (
        (moved, r"is an adapter of .*gone, which cannot be read.*base=PATH"),
        (changed("qalora", use_qalora=True), "LoRA with use_qalora cannot be merged here"),
        (changed("kasa", kasa_config={}), "LoRA with kasa_config cannot be merged here"),
        (changed("dora", use_dora=True), "has no lora_magnitude_vector of .*q_proj"),
        (changed("other", peft_type="IA3"), "an adapter of type IA3 cannot be merged here"),
        (changed("nameless", base_model_name_or_path=None), "has no base_model_name_or_path"),
        (changed("itself", base_model_name_or_path=str(step)), "which is an adapter itself"),
    ):
        with pytest.raises(CheckpointError, match=words):
            locate(directory).model_index.close()
    with pytest.raises(CheckpointError, match="is for an adapter"):
        locate(tiny_model, base=tiny_model).model_index.close()
    convert(moved, tmp_path / "merged", base=tiny_model)
    with open_checkpoint(tmp_path / "merged") as one, locate(step).model_index as two:
        assert tensor_digests(one) == tensor_digests(two)


def test_an_adapter_is_not_merged_into_other_weights(runs: dict[str, Ended], tiny_model: Path, tmp_path: Path) -> None:
    step, other = runs["fsdp2"].checkpoint, save_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=f"trained on {tiny_model}, but the weights in {other} are others"):
        convert(step, tmp_path / "merged", base=other)
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    convert(step, tmp_path / "merged", base=moved)
    shutil.copytree(step, tmp_path / "plain")
    (tmp_path / "plain" / "adapter_base.json").unlink()  # as peft's own adapters, which record no weights
    (tmp_path / "plain" / "manifest.json").unlink()
    convert(tmp_path / "plain", tmp_path / "unknown", base=other)
    (tmp_path / "plain" / "adapter_base.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"adapter_base.json is damaged"):
        convert(tmp_path / "plain", tmp_path / "damaged", base=other)


def test_an_adapter_is_read_where_the_hub_cache_keeps_it(runs: dict[str, Ended], tmp_path: Path) -> None:
    step, model = runs["fsdp2"].checkpoint, tmp_path / "models--owner--adapter"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for name, blob in (("adapter_config.json", "aaaa"), ("adapter_model.safetensors", "bbbb")):
        shutil.copy(step / name, model / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    with locate(snapshot).model_index as one, locate(step).model_index as two:
        assert tensor_digests(one) == tensor_digests(two)


def test_what_an_adapter_is_made_of_is_its_state(runs: dict[str, Ended], tmp_path: Path, tiny_model: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(tiny_model, base)
    shutil.copytree(runs["fsdp2"].checkpoint, adapter, ignore=shutil.ignore_patterns("manifest.json", "optimizer"))
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    seen: list[object] = []
    for changed in (adapter / "adapter_config.json", base / "model.safetensors", base / "generation_config.json"):
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        os.utime(changed, ns=(0, len(seen)))
        seen.append(locate(adapter).file_states())
    assert len({str(state) for state in seen}) == 3


def test_square_layers_of_conv1d_are_merged_as_peft_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, tie_word_embeddings=False)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "base")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM",
        base_model_name_or_path=str(tmp_path / "base"),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, settings)
        adapted.save_pretrained(str(tmp_path / "adapter"))
        expected = adapted.merge_and_unload().state_dict()
    with locate(tmp_path / "adapter").model_index as index:
        for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.0.attn.c_attn.weight", "lm_head.weight"):
            torch.testing.assert_close(index.read(name), expected[name])
