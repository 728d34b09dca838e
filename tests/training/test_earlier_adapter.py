"""`adapter.path`: a new run that begins with the values of an adapter, of a run and of peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.runs import Ended, run_recipe

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WEIGHTS = "adapter_model.safetensors"
PAIRS = [{"prompt": "abc", "chosen": "de fg", "rejected": "gh"}, {"prompt": "b", "chosen": "a", "rejected": "cc ee"}]


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    given = ["train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=1", "shard.param_dtype=float32"]
    given += ["optim.lr=3e-2", "data.sequence_length=32", "launch.device=cpu", "adapter=lora", "adapter.rank=3"]
    cache = tmp_path_factory.mktemp("tokens")
    return [*given, f"model.path={tiny_model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


@pytest.fixture(scope="module")
def earlier(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    directory = tmp_path_factory.mktemp("earlier") / "run"
    _done(directory, *settings, "adapter.modules_to_save=[model.norm]")
    return directory


def _done(run_dir: Path, *settings: str) -> Ended:
    ended = run_recipe("finetune", run_dir, *settings)
    assert ended.status == 0, ended.err
    return ended


def _refused(run_dir: Path, *settings: str) -> str:
    ended = run_recipe("finetune", run_dir, *settings)
    assert ended.status == 2, ended.err
    assert ended.err.count("error: ") == 1
    return ended.err


def _loss_before(ended: Ended) -> float:
    """The loss of the first step, before anything is trained."""
    rows = [json.loads(line) for line in (ended.run_dir / "metrics.jsonl").read_text().splitlines()]
    return float(rows[0]["loss"])


@pytest.mark.long
def test_a_run_begins_with_the_adapter_of_another(settings: list[str], earlier: Path, tmp_path: Path) -> None:
    given = [*settings, "adapter.modules_to_save=[model.norm]", "train.steps=1"]
    still = _done(tmp_path / "still", *given, f"adapter.path={earlier}@latest", "optim.lr=1e-30", "launch.ranks=2")
    (step,) = (earlier / "checkpoints").glob("step-*")
    assert f"the adapter begins with the values of {step}" in still.err
    found = load_file(next((tmp_path / "still/checkpoints").glob("step-*")) / WEIGHTS)
    torch.testing.assert_close(found, load_file(step / WEIGHTS), rtol=0, atol=0)

    merged = tmp_path / "merged"
    assert run_recipe("convert", tmp_path / "c", f"source={earlier}", f"target={merged}").status == 0
    plain = [*(text for text in settings if "adapter" not in text and "model.path" not in text), "train.steps=1"]
    of_merged = _done(tmp_path / "of_merged", *plain, f"model.path={merged}")
    assert _loss_before(still) == pytest.approx(_loss_before(of_merged), rel=1e-6)
    new = _done(tmp_path / "new", *given)
    assert abs(_loss_before(still) - _loss_before(new)) > 0.01


@pytest.mark.long
def test_a_run_begins_with_an_adapter_of_peft(settings: list[str], tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    of_peft = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
    of_peft.save_pretrained(str(tmp_path / "of_peft"))
    given = [*settings, f"adapter.path={tmp_path}/of_peft"]
    said = _refused(tmp_path / "refused", *given)
    remedy = next(line for line in said.splitlines() if "adapter.path=" in line).partition(" Set ")[2].rstrip(".")
    assert {part.partition("=")[0] for part in remedy.split()} == {
        "adapter.rank",
        "adapter.alpha",
        "adapter.target_modules",
    }
    _done(tmp_path / "still", *given, *remedy.split(), "optim.lr=1e-30", "train.steps=1")
    found = load_file(next((tmp_path / "still/checkpoints").glob("step-*")) / WEIGHTS)
    torch.testing.assert_close(found, load_file(tmp_path / "of_peft" / WEIGHTS), rtol=0, atol=0)
    assert "the scale of" in _refused(tmp_path / "scale", *given, *remedy.split(), "adapter.alpha=8")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["auto", "sharded", "dispatched"])
def test_the_reference_is_the_model_with_the_earlier_adapter(
    settings: list[str], earlier: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    given = [*(text for text in settings if "data.path" not in text), "adapter.modules_to_save=[model.norm]"]
    given += [f"data.path={tmp_path}/pairs.jsonl", "data.kind=preference", "objective=dpo", "train.global_batch_size=2"]
    begun = _done(tmp_path / "run", *given, f"adapter.path={earlier}", f"objective.reference={kind}")
    assert _loss_before(begun) == pytest.approx(0.693147, abs=1e-5), "it equals its reference"
    _done(tmp_path / "run", *given, f"adapter.path={earlier}", f"objective.reference={kind}", "train.steps=3")


@pytest.mark.long
def test_what_an_adapter_cannot_begin_with_is_said(
    settings: list[str], earlier: Path, tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    given = [*settings, "adapter.modules_to_save=[model.norm]"]
    same = f"adapter.path={earlier}"
    (step,) = (earlier / "checkpoints").glob("step-*")
    of_fewer = Path(shutil.copytree(step, tmp_path / "fewer"))
    stored = json.loads((step / "adapter_config.json").read_text())
    (of_fewer / "adapter_config.json").write_text(json.dumps(stored | {"exclude_modules": ".*"}))
    (experts := tmp_path / "experts").mkdir()
    shutil.copy(step / WEIGHTS, experts)
    of_experts = json.loads((step / "adapter_config.json").read_text()) | {"target_parameters": ["experts.down_proj"]}
    (experts / "adapter_config.json").write_text(json.dumps(of_experts))
    for extra, said in (
        ((f"adapter.path={experts}",), "has matrices for each expert (experts.down_proj)"),
        ((f"adapter.path={of_fewer}",), "_proj is not among its target_modules there, and is here"),
        (("adapter.path=/nowhere",), "adapter.path=/nowhere: "),
        ((f"adapter.path={tiny_model}",), "holds weights of a whole model"),
        ((f"adapter.path={texts}",), "holds no known format of an adapter"),
        ((same, "adapter.quantize=nf4"), "was trained with adapter.quantize=none"),
        ((same, "adapter.init=gaussian"), "adapter.init=gaussian has no effect with adapter.path"),
        ((same, "adapter.dora=true"), "Set adapter.dora=false."),
        ((same, "adapter.modules_to_save=[]"), "Set adapter.modules_to_save=[model.norm]."),
        ((same, "objective=dpo", "objective.reference=adapter", "data.kind=preference"), "begins from another one"),
    ):
        assert said in _refused(tmp_path / "refused", *given, *extra)

    other = tmp_path / "other"
    torch.manual_seed(9)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(other)
    for file in tiny_model.glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    assert "that was trained on" in _refused(tmp_path / "refused", *given, same, f"model.path={other}")


@pytest.mark.long
def test_a_plan_reads_it_if_it_is_there(earlier: Path, tiny_model: Path, tmp_path: Path) -> None:
    given = [f"model.path={tiny_model}", "adapter=lora", "launch.device=cpu"]
    ended = run_recipe("plan", tmp_path / "gone", *given, "adapter.path=/nowhere")
    assert ended.status == 0, ended.err
    assert "adapter.path=/nowhere is not on this machine" in ended.out

    given += [f"adapter.path={earlier}"]
    other = run_recipe("plan", tmp_path / "other", *given)
    assert other.status == 2
    assert "Set adapter.rank=3 adapter.modules_to_save=[model.norm]." in other.err
    rank, saved = "adapter.rank=3", "adapter.modules_to_save=[model.norm]"
    same = run_recipe("plan", tmp_path / "same", *given, rank, saved)
    assert same.status == 0, same.err
    assert "adapter.path" not in same.out
    scaled = run_recipe("plan", tmp_path / "scaled", *given, rank, saved, "adapter.alpha=64")
    assert "the scale of " in scaled.err
    assert "Set adapter.alpha=32.0." in scaled.err


@pytest.mark.long
def test_an_earlier_adapter_keeps_its_scale(settings: list[str], earlier: Path, tmp_path: Path) -> None:
    """It is the reference of a run that is resumed, too."""
    (step,) = (earlier / "checkpoints").glob("step-*")
    adapter = Path(shutil.copytree(step, tmp_path / "adapter"))
    given = [*settings, "adapter.modules_to_save=[model.norm]", "resume=auto", f"adapter.path={adapter}"]
    _done(tmp_path / "run", *given, "train.steps=1")
    stored = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(stored | {"lora_alpha": 20 * stored["lora_alpha"]}))
    said = _refused(tmp_path / "run", *given, "train.steps=2")
    assert f"adapter.path={adapter} is another adapter than these settings define: the scale of " in said


@pytest.mark.long
def test_a_resumed_run_began_with_the_same(settings: list[str], earlier: Path, tmp_path: Path) -> None:
    given = [*settings, "adapter.modules_to_save=[model.norm]", "resume=auto"]
    _done(tmp_path / "run", *given, f"adapter.path={earlier}")
    assert (
        "changed: train.steps 2 -> 3" in _done(tmp_path / "run", *given, f"adapter.path={earlier}", "train.steps=3").err
    )
    (step,) = (earlier / "checkpoints").glob("step-*")
    began = f"began with adapter.path={step}, and it is"
    assert f"{began} None; set adapter.path={step}" in _refused(tmp_path / "run", *given, "train.steps=4")
    another = f"adapter.path={tmp_path}/run"
    assert f"{began} {tmp_path}/run; set" in _refused(tmp_path / "run", *given, another, "train.steps=4")
    assert "/gone does not exist" in _refused(tmp_path / "run", *given, "adapter.path=/gone", "train.steps=4")
    moved = step.rename(tmp_path / "moved")
    try:
        _done(tmp_path / "run", *given, f"adapter.path={step}", "train.steps=4")
    finally:
        moved.rename(step)
    gone = earlier.rename(tmp_path / "gone")
    try:
        _done(tmp_path / "run", *given, f"adapter.path={earlier}@latest", "train.steps=5")
    finally:
        gone.rename(earlier)


@pytest.mark.long
def test_the_classes_of_an_earlier_head_stay(settings: list[str], tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": "ab " * n, "label": ["neg", "pos"][n % 2]}) + "\n" for n in range(1, 9))
    (tmp_path / "rows.jsonl").write_text(rows)
    given = [text for text in settings if "data.path" not in text]
    given += ["model.task=sequence_classification", f"data.path={tmp_path}/rows.jsonl", "train.steps=1"]
    _done(tmp_path / "first", *given, "model.labels=[neg,pos]")
    same = f"adapter.path={tmp_path}/first"
    assert "drawn from the seed" not in _done(tmp_path / "second", *given, "model.labels=[neg,pos]", same).err
    said = _refused(tmp_path / "other", *given, "model.labels=[pos,neg]", same)
    assert "has a head with the classes [neg,pos]" in said
