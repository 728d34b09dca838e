"""A run says truly what it is: the model it began from, the settings that made it, where it resumes, its end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from fsdp_shard.checkpoint import (
    ADAPTER_BASE,
    BASE_MODEL,
    MANIFEST,
    RUN_CONFIG,
    BaseModel,
    HeadChanges,
    computation,
    config_changes,
    read_manifest,
    verify,
    vocabulary,
)
from tests.support.commands import ROOT, run
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, save_model
from tests.support.web import Handler, served

STEPS = 2
_FILES = ("config.yaml", "result.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [
        f"model.path={tiny_model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}",
        "data.sequence_length=64", "shard=float32", "launch.device=cpu", f"train.steps={STEPS}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    ended = run_recipe("finetune", tmp_path_factory.mktemp("runs") / "run", *settings)
    assert ended.status == 0, ended.err
    return ended.run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other values of the same names, dtypes and shapes."""
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=1)


def _contents(run_dir: Path) -> list[bytes]:
    return [(run_dir / name).read_bytes() for name in _FILES]


def _step(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def _without_records(step: Path) -> None:
    """Make a step as version 0.1.0 left it."""
    manifest = read_manifest(step)
    assert manifest is not None
    kept = {name: record for name, record in manifest.files.items() if name not in (BASE_MODEL, RUN_CONFIG)}
    assert len(kept) == len(manifest.files) - 2, "both are listed"
    for name in (BASE_MODEL, RUN_CONFIG):
        (step / name).unlink()
    (step / MANIFEST).write_text(replace(manifest, files=kept).to_json())


@pytest.mark.long
@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
def test_another_model_is_refused(
    settings: list[str], run_dir: Path, tiny_model: Path, other_model: Path, steps: int
) -> None:
    before = _contents(run_dir)
    for model in (other_model, run_dir / "nowhere"):
        given = [*settings, f"train.steps={steps}", f"model.path={model}"]
        ended = run_recipe("finetune", run_dir, *given)
        assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
        assert f"was trained on {tiny_model}" in ended.err
        assert f"model.path={model}" in ended.err
        doctor = run_recipe("doctor", run_dir, *given)
        assert doctor.status == 1
        assert f"was trained on {tiny_model}" in doctor.out
        plan = run_recipe("plan", run_dir, f"model.path={model}")
        assert (plan.status, f"was trained on {tiny_model}" in plan.err) == (2, True), plan.err
    assert _contents(run_dir) == before


def test_a_model_that_was_moved_is_the_same(
    settings: list[str], run_dir: Path, tiny_model: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    ended = run_recipe("finetune", run_dir, *settings, f"model.path={moved}", "train.steps=3")
    assert ended.status == 0, ended.err
    assert f"model.path {tiny_model} -> {moved}" in ended.err


@pytest.mark.long
def test_a_model_that_is_gone_and_what_later_steps_keep(settings: list[str], tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    given = [*settings, f"model.path={model}"]
    first = run_recipe("finetune", tmp_path / "run", *given)
    recorded = (first.checkpoint / BASE_MODEL).read_bytes()
    assert json.loads(recorded)["path"] == str(model)
    shutil.rmtree(model)
    longer = run_recipe("finetune", tmp_path / "run", *given, "train.steps=3")
    assert longer.status == 0, longer.err
    assert f"model.path={model} was not compared" in longer.err
    doctor = run_recipe("doctor", tmp_path / "run", *given, "train.steps=4")
    assert (doctor.status, "LlamaForCausalLM" in doctor.out) == (0, True), doctor.out
    plan = run_recipe("plan", tmp_path / "run", f"model.path={model}")
    assert (plan.status, "would resume from" in plan.out) == (0, True), plan.err
    third = run_recipe("finetune", tmp_path / "third", *given, f"resume={tmp_path / 'run'}", "train.steps=4")
    assert third.status == 0, third.err
    assert (third.checkpoint / BASE_MODEL).read_bytes() == recorded, "of the model that the run began from"


def test_a_step_that_records_nothing_is_resumed(settings: list[str], run_dir: Path) -> None:
    _without_records(_step(run_dir, STEPS))
    ended = run_recipe("finetune", run_dir, *settings, "train.steps=3")
    assert ended.status == 0, ended.err
    assert ended.err.count("does not record the model") == 1
    assert f"has no {RUN_CONFIG}" in ended.err
    assert not (ended.checkpoint / BASE_MODEL).exists(), "what the run began from is still not known"
    assert (ended.checkpoint / RUN_CONFIG).read_bytes() == (run_dir / "config.yaml").read_bytes()


def _fingerprint_of_0_1_0(model_path: Path) -> str:
    """As fsdp_shard/training/lora.py of version 0.1.0 (commit 7ff7016) took it, which gave the same for this model: of
    the tensors that are loaded, so of stacked experts. Its steps are otherwise as they are now.
    """
    stored = load_file(model_path / "model.safetensors")
    made = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    tensors = {name: values for name, values in stored.items() if ".experts." not in name}
    tensors |= {name: values for name, values in made.items() if ".experts." in name}
    digest = xxhash.xxh3_128()
    for name, values in sorted(tensors.items()):
        start = values.flatten()[:1024].numpy().tobytes()
        digest.update(f"{name} F32 {tuple(values.shape)} ".encode() + start)
    return digest.hexdigest()


def _save_mixtral(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes |= {"num_key_value_heads": 1, "num_local_experts": 3, "vocab_size": 257, "max_position_embeddings": 128}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.long
def test_an_adapter_of_0_1_0_knows_its_mixture_of_experts(settings: list[str], tmp_path: Path) -> None:
    """Its fingerprint is that of stacked experts; other weights are still refused."""
    model, other = (_save_mixtral(tmp_path / str(seed), seed) for seed in (0, 1))
    lora = [*settings, "adapter=lora", "adapter.target_modules=[q_proj]"]
    first = run_recipe("finetune", tmp_path / "run", *lora, f"model.path={model}")
    assert first.status == 0, first.err
    step = first.checkpoint
    recorded = json.loads((step / ADAPTER_BASE).read_text())
    old = json.dumps(recorded | {"fingerprint": _fingerprint_of_0_1_0(model)}).encode()
    (step / ADAPTER_BASE).write_bytes(old)
    manifest = read_manifest(step)
    assert manifest is not None
    record = replace(manifest.files[ADAPTER_BASE], size=len(old), digest=xxhash.xxh3_128_hexdigest(old))
    (step / MANIFEST).write_text(replace(manifest, files=manifest.files | {ADAPTER_BASE: record}).to_json())
    assert verify(step).is_sound

    for base in (model, other):
        expected = 0 if base == model else 2
        converted = run_recipe("convert", tmp_path / "c", f"source={step}", f"target={tmp_path}/m", f"base={base}")
        doctor = run_recipe("doctor", tmp_path / "run", *lora, f"model.path={base}", "train.steps=3")
        assert (converted.status, doctor.status) == (expected, expected // 2), converted.err + doctor.out
    ended = run_recipe("finetune", tmp_path / "run", *lora, f"model.path={other}", "train.steps=3")
    assert (ended.status, f"was trained on {model}" in ended.err) == (2, True), ended.err
    ended = run_recipe("finetune", tmp_path / "run", *lora, f"model.path={model}", "train.steps=3")
    assert ended.status == 0, ended.err
    assert json.loads((ended.checkpoint / ADAPTER_BASE).read_text()) == recorded, "of the weights as they are stored"


@pytest.mark.long
def test_the_settings_are_those_of_the_newest_step(settings: list[str], run_dir: Path) -> None:
    before = _contents(run_dir)
    first = (_step(run_dir, STEPS) / RUN_CONFIG).read_bytes()
    assert first == before[0]
    for refused in (["seed=5"], ["data.sequence_length=32"], ["optim=sgd"]):  # found once the ranks have started
        ended = run_recipe("finetune", run_dir, *settings, "train.steps=3", *refused)
        assert ended.status == 2, ended.err
        assert _contents(run_dir) == before
    secret = f"data.cache_dir={run_dir}/hf_AbsolutelySecret"
    ended = run_recipe("finetune", run_dir, *settings, "train.steps=3", "optim.lr=0.01", secret)
    assert ended.status == 0, ended.err
    newest = (ended.checkpoint / RUN_CONFIG).read_text()
    assert newest == (run_dir / "config.yaml").read_text()
    assert "lr: 0.01" in newest
    assert "hf_***" in newest
    assert "AbsolutelySecret" not in newest
    assert (_step(run_dir, STEPS) / RUN_CONFIG).read_bytes() == first
    assert verify(ended.checkpoint).is_sound
    (ended.checkpoint / RUN_CONFIG).write_text(newest.replace("lr: 0.01", "lr: 0.02"))
    assert not verify(ended.checkpoint).is_sound, "it has a digest"


def test_a_run_that_is_refused_before_its_first_step_changes_nothing(settings: list[str], run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    before = _contents(run_dir)
    ended = run_recipe("finetune", run_dir, *settings, "adapter=lora", "adapter.rank=3", "resume=never", "optim.lr=0.5",
                       "train.epochs=0.001", "train.steps=null", "train.warmup_steps=90")  # fmt: skip
    assert (ended.status, "train.warmup_steps=90 is not less than" in ended.err) == (2, True), ended.err
    assert _contents(run_dir) == before


@pytest.mark.long
def test_a_finished_run_says_so(settings: list[str], run_dir: Path) -> None:
    before, step = _contents(run_dir), _step(run_dir, STEPS)
    ended = run_recipe("finetune", run_dir, *settings, "launch.ranks=2")
    (line,) = ended.err.splitlines()
    assert ended.status == 0
    assert f"is finished after step {STEPS}, which is in {step}" in line
    assert "no effect: launch.ranks 1 -> 2." in line
    assert f"set train.steps to more than {STEPS}" in line
    ended = run_recipe("finetune", run_dir, *settings, "train.steps=1", "optim.lr=0.5")
    assert "no effect: optim.lr 2e-05 -> 0.5, train.steps 2 -> 1." in ended.err
    _without_records(step)
    ended = run_recipe("finetune", run_dir, *settings, "train.steps=1")
    assert "more than train.steps=1 already" in ended.err
    assert _contents(run_dir) == before
    doctor = run_recipe("doctor", run_dir, *settings)
    assert f"is finished after step {STEPS}" in doctor.out


@pytest.mark.long
def test_a_resume_says_what_changed(settings: list[str], run_dir: Path) -> None:
    same = run_recipe("finetune", run_dir, *settings, "train.steps=3")
    assert _resumed(same) == (
        f"resumed from {_step(run_dir, 2)}, step 2 of 3, 16 samples, epoch 0.017; changed: train.steps 2 -> 3"
    )
    overrides = ["shard=ddp", "shard.find_unused_parameters=true", "optim.lr=0.001", "train.global_batch_size=4"]
    ended = run_recipe("finetune", run_dir, *settings, "train.steps=4", "launch.ranks=2", *overrides)
    assert ended.status == 0, ended.err
    changes = (
        "shard fsdp2 -> ddp", "launch.ranks 1 -> 2", "shard.find_unused_parameters not set -> true",
        "optim.lr 2e-05 -> 0.001", "train.global_batch_size 8 -> 4", "train.steps 3 -> 4",
    )  # fmt: skip
    assert all(change in _resumed(ended) for change in changes), _resumed(ended)
    assert "shard.reshard_after_forward" not in _resumed(ended), "DDP has no such setting"


class _Signed(Handler):
    """Sends files to who signs with one of two signatures."""

    def send_head(self) -> Any:
        if self.path.partition("?")[2] not in ("part=1&sig=first-secret", "part=1&sig=second-secret"):
            return self.send_error(403)
        return super().send_head()


@pytest.fixture
def signed(texts: Path) -> Iterator[str]:
    with served(texts, _Signed) as address:
        yield f"{address}/train.txt?part=1&sig="


@pytest.mark.long
def test_what_signs_the_address_of_the_data_is_not_recorded(settings: list[str], signed: str, tmp_path: Path) -> None:
    first = run_recipe("finetune", tmp_path / "run", *settings, f"data.path={signed}first-secret")
    assert first.status == 0, first.err
    again = run_recipe("finetune", tmp_path / "run", *settings, f"data.path={signed}second-secret", "train.steps=3")
    assert again.status == 0, again.err
    assert _resumed(again).endswith("changed: train.steps 2 -> 3"), "with another signature it is the same data"
    assert f"path: {signed}***\n" in (tmp_path / "run" / "config.yaml").read_text()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not [file for file in files if b"-secret" in file.read_bytes()]
    assert "-secret" not in first.out + first.err + again.out + again.err


@pytest.mark.long
def test_the_ranks_of_torchrun_are_counted(settings: list[str], run_dir: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "recipes" / "finetune.py")
    done = run([*command, *settings, "train.steps=3", f"run_dir={run_dir}"], run_dir, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    assert "ranks 1 -> 2" in done.err


def _resumed(ended: Ended) -> str:
    (line,) = [line for line in ended.err.splitlines() if line.startswith("resumed from ")]
    return line


def test_other_commands_leave_a_training_run_alone(
    run_dir: Path, tiny_model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _contents(run_dir)
    held_out = f"data.path={texts}/held_out.txt"
    for command, given in (
        ("evaluate", [f"checkpoint={run_dir}", held_out]),
        ("convert", [f"source={run_dir}", f"target={run_dir}/model"]),
        ("generate", [f"checkpoint={run_dir}", "prompt=x"]),
    ):
        ended = run_recipe(command, run_dir, *given)
        assert (ended.status, "is the directory of a training run" in ended.err) == (2, True), ended.err
    for inside, words in (
        (run_dir / "mine", "is in the directory of another run"),
        (_step(run_dir, STEPS) / "x", "is in the checkpoint"),
    ):
        ended = run_recipe("evaluate", inside, f"checkpoint={run_dir}", held_out)
        assert (ended.status, words in ended.err, inside.exists()) == (2, True, False), ended.err
    with monkeypatch.context() as patch:  # a batch script that starts ranks itself
        patch.setenv("SLURM_PROCID", "0")
        patch.setenv("SLURM_NTASKS", "2")
        ended = run_recipe("evaluate", run_dir, f"checkpoint={run_dir}", held_out, "launch.ranks=2")
        assert (ended.status, "is the directory of a training run" in ended.err) == (2, True), ended.err
    plan = run_recipe("plan", run_dir, f"model.path={tiny_model}")
    assert (plan.status, "nothing was written" in plan.out) == (0, True), plan.err
    assert _contents(run_dir) == before


def _lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


@pytest.mark.long
def test_the_length_of_samples_is_the_context_wherever_it_is_shown(settings: list[str], tmp_path: Path) -> None:
    given = [setting for setting in settings if not setting.startswith("data.sequence_length")]
    doctor = run_recipe("doctor", tmp_path / "run", *given)
    assert "data.sequence_length=128 of a context of 128 tokens" in doctor.out
    ended = run_recipe("finetune", tmp_path / "run", *given)
    assert ended.status == 0, ended.err
    assert len(_lines(ended.err, "data.sequence_length=128 of a context of 128 tokens")) == 1
    for recorded in (ended.run_dir / "config.yaml", ended.checkpoint / RUN_CONFIG):
        assert "sequence_length: 128" in recorded.read_text()
    assert ended.result["sequence_length"] == 128
    plan = run_recipe("plan", tmp_path / "plan", given[0])
    assert plan.result["sequence_length"] == 128, plan.err
    assert "data.sequence_length=128 of" in plan.out
    assert "sequence_length: 128" in (plan.run_dir / "config.yaml").read_text()


@pytest.mark.long
def test_a_length_beyond_rotary_positions_is_a_warning_everywhere(
    settings: list[str], tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    warning = (
        "data.sequence_length=160 exceeds the model's context of 128 tokens: positions beyond it were never trained"
    )
    longer = [*settings, "data.sequence_length=160"]
    ended = run_recipe("finetune", tmp_path / "run", *longer)
    assert ended.status == 0, ended.err
    assert [line.partition("warning: ")[2] for line in _lines(ended.err, "exceeds")] == [warning]
    assert warning in run_recipe("doctor", tmp_path / "new", *longer).out
    assert warning in run_recipe("plan", tmp_path / "plan", longer[0], longer[-1]).out
    data = [f"data.path={texts}/held_out.txt", "data.sequence_length=160"]
    evaluated = run_recipe("evaluate", tmp_path / "evaluate", f"checkpoint={tiny_model}", *data)
    assert evaluated.status == 0, evaluated.err
    assert warning in evaluated.out
    assert evaluated.result["sequence_length"] == 160
    generated = run_recipe("generate", tmp_path / "generate", f"checkpoint={tiny_model}", f"prompt={'a' * 126}")
    assert generated.status == 0, generated.err
    assert len(_lines(generated.out, "has 126 tokens")) == 1
    assert "exceeds the model's context of 128 tokens: positions beyond it were never trained" in generated.out


def test_an_evaluation_has_the_context_by_default(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    ended = run_recipe("evaluate", tmp_path, f"checkpoint={tiny_model}", f"data.path={texts}/held_out.txt")
    assert ended.status == 0, ended.err
    assert "sequence_length: 128" in (tmp_path / "config.yaml").read_text()
    assert ended.result["sequence_length"] == 128


@pytest.mark.long
def test_a_resume_without_a_length_keeps_that_of_its_step(settings: list[str], run_dir: Path) -> None:
    given = [setting for setting in settings if not setting.startswith("data.sequence_length")]
    plan = run_recipe("plan", run_dir, given[0])
    assert "data.sequence_length=64 of a context of 128" in plan.out, plan.err
    ended = run_recipe("finetune", run_dir, *given, "train.steps=3")
    assert ended.status == 0, ended.err
    assert len(_lines(ended.err, "data.sequence_length=64 of a context of 128 tokens")) == 1
    assert "changed: train.steps 2 -> 3" in ended.err

    step = _step(run_dir, 3)
    _without_records(step)
    before = run_recipe("doctor", run_dir, *given, "train.steps=4")
    assert "data.sequence_length=64 of a context of 128" in before.out, "config.yaml of the run has it"
    (run_dir / "config.yaml").unlink()
    refused = run_recipe("finetune", run_dir, *given, "train.steps=4")
    assert (refused.status, refused.err.count("error: ")) == (2, 1), refused.err
    assert f"{step} does not record the length" in refused.err
    assert "set data.sequence_length to that of its run, which was 1024 unless it was given" in refused.err
    again = run_recipe("finetune", run_dir, *settings, "train.steps=4")
    assert again.status == 0, again.err


def _edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.long
def test_an_adapter_whose_base_has_another_config_is_refused(
    settings: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    given = [*settings, "adapter=lora", "adapter.target_modules=[q_proj]", f"model.path={model}"]
    step = run_recipe("finetune", tmp_path / "run", *given).checkpoint
    longer = [*given, "train.steps=3"]

    _edit_config(model, rms_norm_eps=0.01, rope_parameters={**config["rope_parameters"], "rope_theta": 5e5})
    was = f"rms_norm_eps {config['rms_norm_eps']} -> 0.01, rope_theta 10000.0 -> 500000.0"
    resumed = run_recipe("finetune", tmp_path / "run", *longer)
    assert (resumed.status, was in resumed.err) == (2, True), resumed.err
    doctor = run_recipe("doctor", tmp_path / "run", *longer)
    assert (doctor.status, was in doctor.out) == (1, True), doctor.out
    other = run_recipe("finetune", tmp_path / "other", *given, f"adapter.path={step}")
    assert (other.status, was in other.err) == (2, True), other.err
    convert = ["convert", "convert", f"source={step}", f"target={tmp_path}/merged"]
    generate = ["generate", "generate", f"checkpoint={step}", "prompt=a"]
    switched = ["generate", "switched", f"checkpoint={model}", f"adapters={{a: {step}}}", "prompt=a"]
    for command, run_dir, *arguments in (convert, generate, switched):
        ended = run_recipe(command, tmp_path / run_dir, *arguments)
        assert (ended.status, was in ended.err) == (2, True), ended.err
    assert not (tmp_path / "merged").exists()
    named = run_recipe("convert", tmp_path / "named", *map(str, convert[2:]), f"config={model}")
    assert named.status == 0, named.err
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["rms_norm_eps"] == 0.01

    # What versions of transformers write as they like: nothing of it is another model.
    del config["attention_dropout"]
    del config["dtype"]
    config |= {"transformers_version": "4.40.0", "use_cache": False, "torch_dtype": "float32", "eos_token_id": [1, 2]}
    (model / "config.json").write_text(json.dumps(config | {"new_entry": 1, "_name_or_path": "elsewhere"}))
    again = run_recipe("finetune", tmp_path / "run", *longer)
    assert again.status == 0, again.err


@pytest.mark.long
def test_an_adapter_whose_base_has_other_tokens_is_refused(
    settings: list[str], tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    given = [*settings, "adapter=lora", "adapter.target_modules=[q_proj]", f"model.path={model}"]
    step = run_recipe("finetune", tmp_path / "run", *given).checkpoint
    content = json.loads((model / "tokenizer.json").read_text())
    kept = vocabulary(model)
    assert json.loads((step / ADAPTER_BASE).read_text())["vocabulary"] == kept is not None

    (model / "tokenizer.json").write_text(json.dumps(content, indent=1, sort_keys=True))  # as another version might
    generate = ["generate", f"checkpoint={step}", "prompt=a", "generation.max_new_tokens=2"]
    evaluate = ["evaluate", f"checkpoint={step}", f"data.path={texts}/train.txt"]
    convert = ["convert", f"source={step}", f"target={tmp_path}/merged"]
    same = run_recipe(generate[0], tmp_path / "same", *generate[1:])
    assert same.status == 0, same.err

    tokens = content["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (model / "tokenizer.json").write_text(json.dumps(content))
    for command, *arguments in (generate, evaluate, convert):
        ended = run_recipe(command, tmp_path / command, *arguments)
        assert (ended.status, f"the tokenizer in {model} has other tokens" in ended.err) == (2, True), ended.err
    named = run_recipe(generate[0], tmp_path / "named", *generate[1:], f"tokenizer={tiny_model}")
    assert named.status == 0, named.err
    recorded = json.loads((step / ADAPTER_BASE).read_text())
    (step / ADAPTER_BASE).write_text(json.dumps(recorded | {"vocabulary": None}))
    older = run_recipe(generate[0], tmp_path / "older", *generate[1:])
    assert older.status == 0, older.err


@pytest.mark.long
def test_a_full_run_says_that_another_config_of_its_model_has_no_effect(
    settings: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    given = [*settings, f"model.path={model}"]
    first = run_recipe("finetune", tmp_path / "run", *given).checkpoint
    _edit_config(model, rms_norm_eps=0.01)
    ended = run_recipe("finetune", tmp_path / "run", *given, "train.steps=3")
    assert ended.status == 0, ended.err
    assert f"(rms_norm_eps 1e-06 -> 0.01), and has no effect: the config of {first} is used" in ended.err
    assert (ended.checkpoint / "config.json").read_bytes() == (first / "config.json").read_bytes()


def test_entries_that_programs_add_are_no_changes_but_scaled_positions_are(tmp_path: Path) -> None:
    def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(now))
        return config_changes(BaseModel("m", "f", config=before), tmp_path)

    old: dict[str, object] = {"rope_theta": 1e4, "head_dim": 8}
    scaled = {"rope_type": "yarn", "factor": 4.0}
    assert changes(old, {"rope_theta": 10000, "rope_scaling": None, "mlp_bias": False}) == []
    assert changes(old, {**old, "rope_scaling": scaled}) == [f"rope_scaling null -> {json.dumps(scaled)}"]
    assert changes({**old, "rope_scaling": scaled}, {"rope_parameters": {**scaled, "rope_theta": 1e4}}) == []
    default = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert changes(old, {"rope_parameters": default}) == [], "written anew by transformers 5"
    assert changes({"rope_parameters": default}, {**old, "rope_theta": 5e5}) == ["rope_theta 10000.0 -> 500000.0"]
    assert changes({"rope_parameters": default}, {**old, "partial_rotary_factor": 1.0}) == [
        "partial_rotary_factor 0.5 -> 1.0"
    ]
    assert changes({"rope_parameters": default}, {"rope_parameters": {**scaled, "rope_theta": 1e4}}) == [
        f"rope_scaling null -> {json.dumps(scaled)}"
    ]
    assert changes({**old, "rope_scaling": {"type": "yarn", "factor": 4.0}}, {**old, "rope_scaling": scaled}) == []
    assert changes({**old, "pad_token_id": None}, {**old, "pad_token_id": 2}) == []
    assert changes({"text_config": old}, {"text_config": {**old, "head_dim": 4}}) == ["text_config.head_dim 8 -> 4"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert config_changes(BaseModel("m", "f"), tmp_path) == [], "of an earlier version"


def test_the_padding_of_a_classifier_of_text_and_images_counts(tmp_path: Path) -> None:
    """Its config has that of the text in it; a head of its own comes with other padding."""

    def config_of(kind: str, padding: int) -> dict[str, Any]:
        values = {"architectures": [kind], "text_config": {"pad_token_id": padding, "head_dim": 8}}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return computation(tmp_path) or {}

    head = HeadChanges((), {"id2label": {}})
    for kind, changes in (
        ("Gemma3ForSequenceClassification", ["text_config.pad_token_id 0 -> 1"]),
        ("Gemma3ForConditionalGeneration", []),
    ):
        before = config_of(kind, 0)
        config_of(kind, 1)
        assert config_changes(BaseModel("m", "f", config=before), tmp_path) == changes
        assert config_changes(BaseModel("m", "f", head=head, config=before), tmp_path) == []
