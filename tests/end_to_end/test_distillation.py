"""Distillation as a user runs it: what is kept, ranks, teachers on disk, resume, kinds of data, mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaForCausalLM, PreTrainedTokenizerFast

from fsdp_shard.data import IGNORE_INDEX, DataConfig
from tests.support.prepared_data import prepare_data
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, llama, llama_config, save_adapter


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model than the tiny one, with distributions far from uniform."""
    directory = tmp_path_factory.mktemp("teachers") / "teacher"
    model = llama(7, tied=False, layers=3)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def settings(tiny_model: Path, teacher: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("distilled")
    (cache / "short.txt").write_text((texts / "train.txt").read_text()[:6000])
    return [
        f"model.path={tiny_model}",
        f"data.path={cache}/short.txt",
        f"data.cache_dir={cache}/tokens",
        "data.sequence_length=32",
        "data.eval_fraction=0.1",
        "train.steps=4",
        "train.eval_every=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "shard.param_dtype=float32",
        "optim.lr=1e-2",
        "launch.device=cpu",
        "objective=distill",
        "objective.top_k=20",
        "objective.temperature=2",
        f"objective.teacher={teacher}",
    ]


def _rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def _figures(run_dir: Path) -> list[float]:
    rows = [*_rows(run_dir), *_rows(run_dir, "evaluations.jsonl")]
    return [figure for row in rows for figure in (row["loss"], *row["metrics"].values())]


def _done(run_dir: Path, *settings: str) -> Ended:
    ended = run_recipe("finetune", run_dir, *settings)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.long
def test_what_the_teacher_says_is_computed_once(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, f"data.cache_dir={tmp_path}/cache"]
    first = _done(tmp_path / "first", *given)
    assert "teacher's tokens of 16 samples: 16 computed, and kept in" in first.err, "those of the run, no others"
    row = _rows(tmp_path / "first")[0]
    assert set(row["metrics"]) == {"kl", "cross_entropy", "agreement"}
    loss = 0.5 * 4 * row["metrics"]["kl"] + 0.5 * row["metrics"]["cross_entropy"]
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert first.result["perplexity"] is None
    again = _done(tmp_path / "again", *given, "objective.temperature=2.0")
    assert "computed" not in again.err
    assert "teacher: " not in again.err, "it is not even loaded"
    assert _figures(tmp_path / "again") == _figures(tmp_path / "first"), "bit by bit"
    warmer = _done(tmp_path / "warmer", *given, "objective.temperature=3", "objective.alpha=1")
    assert "computed" not in warmer.err, "what is kept does not depend on the temperature"
    longer = _done(tmp_path / "longer", *given, "train.steps=6")
    assert "teacher's tokens of 24 samples: 8 computed, and kept in" in longer.err
    fewer = _done(tmp_path / "fewer", *given, "objective.top_k=19")
    assert "16 samples: 16 computed" in fewer.err


@pytest.mark.long
def test_ranks_wrappers_and_teachers_on_disk_agree(settings: list[str], tmp_path: Path) -> None:
    _done(tmp_path / "one", *settings)
    expected = _figures(tmp_path / "one")
    computed = "objective.teacher_logits=computed"
    for name, overrides in {
        "two": ["launch.ranks=2", f"data.cache_dir={tmp_path}/cache"],
        "computed": [computed, "shard=fsdp1", "shard.param_dtype=float32", "launch.ranks=2"],
        "disk": [computed, "objective.teacher_max_memory={cpu: 150KB}"],
        "ddp": [computed, "shard=ddp", "shard.param_dtype=float32", "train.micro_batch_size=1"],
        "head": [computed, "model.chunked_loss=false"],
    }.items():
        ended = _done(tmp_path / name, *settings, *overrides)
        assert _figures(tmp_path / name) == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        if name == "disk":
            assert " disk " in next(line for line in ended.err.splitlines() if line.startswith("teacher: ")), ended.err


@pytest.mark.long
def test_the_student_may_be_divided_by_tensor_parallelism(settings: list[str], tmp_path: Path) -> None:
    model = llama_config()
    model.num_attention_heads, model.num_key_value_heads = 6, 2  # two ranks can share them
    torch.manual_seed(0)
    LlamaForCausalLM(model).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = [*settings, f"model.path={tmp_path}/model"]
    _done(tmp_path / "alone", *given)
    expected = _figures(tmp_path / "alone")
    own_pass = ["launch.ranks=2", "shard.tensor_parallel=2", f"data.cache_dir={tmp_path}/cache"]
    alongside = ["launch.ranks=4", "shard.tensor_parallel=2", "objective.teacher_logits=computed"]
    for name, overrides in {"own_pass": own_pass, "alongside": alongside}.items():
        _done(tmp_path / name, *given, *overrides)
        assert _figures(tmp_path / name) == pytest.approx(expected, rel=2e-4, abs=1e-5), name


@pytest.mark.long
def test_losses_are_those_of_whole_logits(settings: list[str], tiny_model: Path, teacher: Path, tmp_path: Path) -> None:
    """The first loss, of packed conversations, from both models and the exact divergence."""
    rows = [{"instruction": f"{n} plus {n}", "output": f"is {2 * n}, " * (1 + n % 3)} for n in range(30)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        *settings, f"data.path={data}", "data.kind=instruction", "data.packing=true", "objective.top_k=null",
        "data.sequence_length=64", "objective.alpha=1", f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip
    _done(tmp_path / "packed", *given)
    _done(tmp_path / "computed", *given, "objective.teacher_logits=computed")
    assert _figures(tmp_path / "packed") == pytest.approx(_figures(tmp_path / "computed"), rel=1e-5)
    _done(tmp_path / "rows", *given, "data.packing=false", "data.eval_fraction=0", "train.eval_every=0",
          "train.global_batch_size=30", "train.steps=1")  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (tiny_model, teacher)]
    total, number = 0.0, 0
    config = DataConfig(path=str(data), kind="instruction", sequence_length=64, cache_dir=str(tmp_path / "plain"))
    samples = prepare_data(config, tokenizer).train
    for index in range(30):
        batch = samples.batch([index])
        chosen = torch.from_numpy(batch.labels) != IGNORE_INDEX
        with torch.no_grad():
            student, wanted = (
                (m(torch.from_numpy(batch.input_ids)).logits[chosen] / 2).log_softmax(-1) for m in models
            )
        total += float(F.kl_div(student, wanted, log_target=True, reduction="sum"))
        number += int(chosen.sum())
    assert _rows(tmp_path / "rows")[0]["metrics"]["kl"] == pytest.approx(total / number, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("teacher_logits", ["precomputed", "computed"])
def test_resumes_bit_for_bit(teacher_logits: str, settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "train.schedule=constant", f"objective.teacher_logits={teacher_logits}", "adapter=lora"]
    _done(tmp_path / "all", *given)
    _done(tmp_path / "parts", *given, "train.steps=2")
    resumed = _done(tmp_path / "parts", *given)
    assert "resum" in resumed.err
    assert [row["loss"] for row in _rows(tmp_path / "parts")] == [row["loss"] for row in _rows(tmp_path / "all")]
    assert _rows(tmp_path / "all")[0]["loss"] != _rows(tmp_path / "all")[3]["loss"]


@pytest.mark.long
def test_mixtures_sets_and_streams(settings: list[str], texts: Path, tmp_path: Path) -> None:
    short = settings[1].removeprefix("data.path=")
    own = [one for one in settings if not one.startswith(("data.path", "data.eval_fraction"))]
    own += [
        f"data.mixture={{a: {{path: {short}, weight: 2}}, b: {{path: {texts}/held_out.txt}}}}",
        f"data.eval_sets={{x: {{path: {short}}}, y: {{path: {texts}/held_out.txt}}}}",
        "train.eval_windows=5",
    ]
    mixed = _done(tmp_path / "mixed", *own)
    assert mixed.err.count("computed, and kept in") >= 2
    _done(tmp_path / "computed", *own, "objective.teacher_logits=computed", "launch.ranks=2")
    assert _figures(tmp_path / "computed") == pytest.approx(_figures(tmp_path / "mixed"), rel=1e-4, abs=1e-5)
    assert set(_rows(tmp_path / "mixed", "evaluations.jsonl")[0]["sets"]) == {"x", "y"}
    streamed = [one for one in settings if not one.startswith(("data.eval_fraction", "data.cache_dir"))]
    streamed += ["data.streaming=true", "train.eval_every=0", "objective.teacher_logits=computed"]
    _done(tmp_path / "streamed", *streamed)
    assert _rows(tmp_path / "streamed")[-1]["metrics"]["kl"] > 0


@pytest.mark.slow
def test_a_student_gets_nearer_to_a_tuned_teacher_than_by_plain_training(
    settings: list[str], teacher: Path, tmp_path: Path
) -> None:
    """The teacher is trained on the text; the students see a little of it."""
    longer = ["train.steps=60", "train.eval_every=0", "train.global_batch_size=8", "train.micro_batch_size=8"]
    plain = [one for one in settings if not one.startswith("objective")]
    _done(tmp_path / "teacher", *plain, *longer, f"model.path={teacher}", "train.steps=150")
    distill = ["objective=distill", f"objective.teacher={tmp_path}/teacher", "objective.top_k=null"]
    few = [*plain, *longer]
    nearer = _done(tmp_path / "distilled", *few, *distill, "objective.alpha=0.9").result["metrics"]
    tiny = _done(tmp_path / "plain", *few).checkpoint
    other = _done(tmp_path / "measured", *few, *distill, f"model.path={tiny}", "train.steps=1", "optim.lr=1e-9")
    assert nearer["kl"] < 0.9 * other.result["metrics_before"]["kl"], (nearer, other.result["metrics_before"])
    # The likeliest token is no more often the teacher's after so few steps: the divergence is of the other ones.
    assert nearer["agreement"] > 0.95 * other.result["metrics_before"]["agreement"]


@pytest.mark.long
def test_an_adapter_teaches(settings: list[str], teacher: Path, tmp_path: Path) -> None:
    """Its weights count: what its base said before is not used for it."""
    _done(tmp_path / "base", *settings)
    given = [*settings, f"objective.teacher={save_adapter(tmp_path / 'adapter', teacher)}"]
    first = _done(tmp_path / "precomputed", *given)
    assert "16 samples: 16 computed" in first.err
    _done(tmp_path / "computed", *given, "objective.teacher_logits=computed")
    assert _figures(tmp_path / "computed") == pytest.approx(_figures(tmp_path / "precomputed"), rel=1e-4, abs=1e-5)
    assert _rows(tmp_path / "base")[0]["loss"] != pytest.approx(_rows(tmp_path / "computed")[0]["loss"], rel=1e-3)


def _other_vocabulary(directory: Path) -> Path:
    config = llama_config(tied=False)
    config.vocab_size = 300
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def _other_ids(directory: Path, teacher: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(directory)
    found = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    ids = found["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(found)), eos_token="<|end|>"
    ).save_pretrained(directory)
    return directory


def _few_positions(directory: Path) -> Path:
    config = GPT2Config(
        n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=257, architectures=["GPT2LMHeadModel"]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.long
def test_another_teacher_at_the_same_path(settings: list[str], teacher: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(teacher, tmp_path / "teacher"))
    given = [*settings, f"objective.teacher={changed}", "train.eval_every=0", "data.eval_fraction=0"]
    _done(tmp_path / "run", *given, "train.steps=1")
    weights = load_file(changed / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, changed / "model.safetensors", {"format": "pt"})
    ended = run_recipe("finetune", tmp_path / "run", *given)
    assert ended.status == 2, ended.err
    assert f"was trained with the teacher {changed}, but objective.teacher={changed} holds other weights" in ended.err


def test_a_teacher_without_a_tokenizer(settings: list[str], teacher: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(teacher / name, bare)
    ended = run_recipe("finetune", tmp_path / "run", *settings, f"objective.teacher={bare}")
    assert ended.status == 2
    assert f"objective.teacher={bare}: There is no usable tokenizer in {bare}: it has no tokenizer files" in ended.err
    assert ended.err.rstrip().endswith("Copy the tokenizer files of the original model into that directory.")


def test_a_teacher_of_another_vocabulary(settings: list[str], teacher: Path, tmp_path: Path) -> None:
    for path, said in (
        (_other_vocabulary(tmp_path / "larger"), " has a vocabulary of 300 tokens"),
        (_other_ids(tmp_path / "swapped", teacher), " has the token "),
        (_few_positions(tmp_path / "short"), ": data.sequence_length=32 exceeds the model's context of 16 tokens"),
    ):
        ended = run_recipe("finetune", tmp_path / "run", *settings, f"objective.teacher={path}", "launch.ranks=2")
        assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
        assert f"objective.teacher={path}{said}" in ended.err
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.long
@pytest.mark.parametrize(("overrides", "said"), [
    (("objective.teacher=???",), "is not set. Add objective.teacher=VALUE"),
    (("objective.teacher=/nowhere/at/all",), "objective.teacher=/nowhere/at/all: "),
    (("objective.top_k=258",), "objective.top_k=258 is more than the 257 tokens"),
    (("objective.alpha=0",), "objective.alpha=0.0 is out of range"),
    (("objective.temperature=0",), "objective.temperature=0.0 is out of range"),
    (("objective.teacher_max_memory={cpu: lots}",), "objective.teacher_max_memory.cpu=lots is not a size"),
    (
        ("data.streaming=true", "data.eval_fraction=0", "train.eval_every=0", "data.cache_dir=null"),
        "objective.teacher_logits=precomputed needs all samples",
    ),
    (("model.task=masked_lm",), "objective=distill trains model.task=causal_lm"),
    (("data.kind=preference",), "data.kind=preference"),
    (("loss=a:b",), "loss=a:b replaces the cross-entropy"),
])  # fmt: skip
def test_mistakes(overrides: tuple[str, ...], said: str, settings: list[str], tmp_path: Path) -> None:
    ended = run_recipe("finetune", tmp_path / "run", *settings, *overrides)
    assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
    assert said in ended.err


def test_a_damaged_cache_is_named(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, f"data.cache_dir={tmp_path}/cache"]
    _done(tmp_path / "first", *given)
    file = next((tmp_path / "cache").glob("teacher-*/tokens.npy"))
    file.write_bytes(file.read_bytes()[:-3])
    ended = run_recipe("finetune", tmp_path / "second", *given)
    assert ended.status != 0
    assert f"{file} is damaged" in ended.err
