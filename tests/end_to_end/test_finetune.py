"""The finetune recipe on real ranks: against a plain loop, across layouts, and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from fsdp_shard.checkpoint import convert, open_checkpoint, verify
from fsdp_shard.data import DataConfig, ShuffledDataset
from tests.support.digests import tensor_digests
from tests.support.prepared_data import in_order, prepare_data
from tests.support.runs import Ended, Started, run_recipe
from tests.support.tiny import byte_tokenizer

STEPS = 20
SETTINGS = [
    f"train.steps={STEPS}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.warmup_steps=3",
    "optim.lr=3e-3",
    "optim.weight_decay=0.1",
    "shard.param_dtype=float32",
    "data.sequence_length=64",
    "launch.device=cpu",
    "seed=7",
]


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={tiny_model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


@pytest.fixture(scope="module")
def plain_losses(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The same training in plain PyTorch: one process, the whole global batch at once, no code of ours in the step."""
    torch.manual_seed(0)
    config = DataConfig(path=f"{texts}/train.txt", sequence_length=64, cache_dir=str(tmp_path_factory.mktemp("plain")))
    windows = in_order(prepare_data(config, AutoTokenizer.from_pretrained(tiny_model)).train)
    samples = ShuffledDataset(windows, 7)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _cosine)
    losses = []
    for step in range(STEPS):
        batch = samples.batch(range(8 * step, 8 * step + 8))
        logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def _cosine(step: int) -> float:
    if step < 3:
        return step / 3
    return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - 3) / (STEPS - 3), dtype=torch.float64))))


@pytest.fixture(scope="module")
def runs(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], Ended]:
    """Both wrappers x 1 and 2 ranks x both layouts, with a checkpoint half-way."""
    root = tmp_path_factory.mktemp("runs")
    done = {}
    for wrapper in ("fsdp1", "fsdp2"):
        for ranks in (1, 2):
            for layout in ("sharded", "gathered"):
                name = f"{wrapper}-{ranks}-{layout}"
                ended = run_recipe(
                    "finetune",
                    root / name,
                    *settings,
                    f"shard={wrapper}",
                    f"launch.ranks={ranks}",
                    f"checkpoint.layout={layout}",
                    "checkpoint.every=10",
                )
                assert ended.status == 0, ended.err
                done[wrapper, ranks, layout] = ended
    return done


def test_every_run_follows_the_plain_loop(runs: dict[tuple[str, int, str], Ended], plain_losses: list[float]) -> None:
    assert plain_losses[-1] < plain_losses[0] - 0.5, "the comparison means nothing unless training moves the weights"
    for key, ended in runs.items():
        assert len(ended.losses) == STEPS
        assert ended.losses == pytest.approx(plain_losses, rel=1e-4), key


def test_every_checkpoint_holds_the_same_weights_and_verifies(runs: dict[tuple[str, int, str], Ended]) -> None:
    reference = open_checkpoint(runs["fsdp2", 1, "gathered"].checkpoint)
    for key, ended in runs.items():
        report = verify(ended.checkpoint)
        assert report.is_sound, (key, report.problems)
        assert report.content_checked
        with open_checkpoint(ended.checkpoint) as index:
            assert set(index.names) == set(reference.names)
            for name in index.names:
                torch.testing.assert_close(index.read(name), reference.read(name), rtol=0, atol=1e-3)
    # Of one run in two layouts the values are the same bits, and so are their digests, though written by 2 ranks.
    for wrapper in ("fsdp1", "fsdp2"):
        one, two = (open_checkpoint(runs[wrapper, 2, layout].checkpoint) for layout in ("sharded", "gathered"))
        assert tensor_digests(one) == tensor_digests(two)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_plain_transformers_opens_a_gathered_checkpoint(
    runs: dict[tuple[str, int, str], Ended], wrapper: str, ranks: int
) -> None:
    checkpoint = runs[wrapper, ranks, "gathered"].checkpoint
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with open_checkpoint(runs[wrapper, ranks, "sharded"].checkpoint) as state:
        assert "lm_head.weight" not in state.names, "tied weights are stored once"
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state.read(name)), name
    assert AutoTokenizer.from_pretrained(checkpoint).decode([72, 73])


def test_result_names_what_loading_cost(runs: dict[tuple[str, int, str], Ended]) -> None:
    result = runs["fsdp2", 2, "sharded"].result
    load = result["load"]
    model_bytes = 4 * result["num_params"]
    assert model_bytes / 2 <= load["shard_bytes"] < 0.6 * model_bytes
    assert load["excess_bytes"] == load["peak_memory_bytes"] - load["shard_bytes"] - load["largest_block_bytes"]
    assert result["status"] == "completed"
    assert result["steps"] == STEPS
    assert result["tokens"] == STEPS * 8 * 64


def _resume_from_half(source: Ended, target: Path, settings: list[str], *overrides: str) -> Ended:
    ended = run_recipe("finetune", target, *settings, f"resume={source.run_dir}/checkpoints/step-00000010", *overrides)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("layout", ["sharded", "gathered"])
def test_resume_on_the_same_ranks_is_bit_equal(
    runs: dict[tuple[str, int, str], Ended], settings: list[str], tmp_path: Path, wrapper: str, layout: str
) -> None:
    whole = runs[wrapper, 2, layout]
    rest = _resume_from_half(whole, tmp_path, settings, "launch.ranks=2", f"shard={wrapper}")
    assert rest.losses == whole.losses[10:]
    with open_checkpoint(rest.checkpoint) as one, open_checkpoint(whole.checkpoint) as other:
        assert tensor_digests(one) == tensor_digests(other)
    # The optimizer's too, every slot of it.
    with (
        open_checkpoint(rest.checkpoint / "optimizer") as one,
        open_checkpoint(whole.checkpoint / "optimizer") as other,
    ):
        assert len(one.names) == 3 * 20
        assert tensor_digests(one) == tensor_digests(other)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrapper", "layout", "to_wrapper", "to_ranks"),
    [
        ("fsdp2", "sharded", "fsdp1", 1),
        ("fsdp1", "sharded", "fsdp2", 3),
        ("fsdp1", "gathered", "fsdp2", 1),
        ("fsdp2", "gathered", "fsdp1", 3),
    ],
)
def test_resume_under_another_wrapper_on_another_number_of_ranks(
    runs: dict[tuple[str, int, str], Ended],
    settings: list[str],
    tmp_path: Path,
    wrapper: str,
    layout: str,
    to_wrapper: str,
    to_ranks: int,
) -> None:
    whole = runs[wrapper, 2, layout]
    batches = ["train.global_batch_size=8", "train.micro_batch_size=1"] if to_ranks == 1 else []
    if to_ranks == 3:  # 8 windows do not divide by 3: see that the error says so, then take 4 ranks
        refused = run_recipe("finetune", tmp_path, *settings, f"launch.ranks={to_ranks}", f"resume={whole.run_dir}")
        assert refused.status == 2
        assert "train.global_batch_size=8 is not divisible" in refused.err
        to_ranks = 4
    rest = _resume_from_half(whole, tmp_path, settings, f"launch.ranks={to_ranks}", f"shard={to_wrapper}", *batches)
    assert rest.losses == pytest.approx(whole.losses[10:], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_interrupted_goes_on_where_it_was(
    runs: dict[tuple[str, int, str], Ended], settings: list[str], tmp_path: Path, ranks: int
) -> None:
    arguments = [*settings, f"launch.ranks={ranks}", "shard=fsdp2"]
    started = Started("finetune", tmp_path, *arguments)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(started.pid, signal.SIGTERM)
    stopped = started.wait()
    assert stopped.status == 128 + signal.SIGTERM, stopped.err
    assert f"run_dir={tmp_path}" in stopped.err
    assert not (tmp_path / "result.json").exists()
    num_done = len(stopped.metrics)
    assert 3 <= num_done < STEPS
    ended = run_recipe("finetune", tmp_path, *arguments)
    assert ended.status == 0, ended.err
    assert ended.losses == runs["fsdp2", ranks, "sharded"].losses
    again = run_recipe("finetune", tmp_path, *arguments)
    assert again.status == 0, again.err
    assert again.result == ended.result, "a run that is finished is left as it is"


@pytest.mark.long
def test_a_finished_run_that_goes_on_is_not_finished(settings: list[str], tmp_path: Path) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, "train.steps=4", "train.schedule=constant")
    assert ended.result["status"] == "completed"
    longer = Started("finetune", tmp_path, *settings, "train.steps=2000", "train.schedule=constant")
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while len(metrics.read_text().splitlines()) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    config = (tmp_path / "config.yaml").read_text()
    other = run_recipe("finetune", tmp_path, *settings, "train.steps=5")
    assert (other.status, f"run_dir={tmp_path} is in use by another run" in other.err) == (2, True), other.err
    assert (tmp_path / "config.yaml").read_text() == config, "it is that of the run that is there"
    os.kill(longer.pid, signal.SIGKILL)
    longer.wait()
    assert not (tmp_path / "result.json").exists(), "what the shorter run came to is no longer so"


def test_a_tokenizer_that_brings_its_own_code(tiny_model: Path, settings: list[str], tmp_path: Path) -> None:
    """What the check before any rank reads, the ranks read too."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    told = json.loads((model / "tokenizer_config.json").read_text())
    told |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(told))
    given = [*settings, f"model.path={model}", "train.steps=1", "train.warmup_steps=0"]
    ended = run_recipe("finetune", tmp_path / "run", *given, "model.trust_remote_code=true")
    assert ended.status == 0, ended.err


@pytest.mark.long
def test_parts_of_a_model_that_text_does_not_reach_have_no_state(settings: list[str], tmp_path: Path) -> None:
    """A multimodal model trained on text: what sees pictures never has a gradient, before and after a resume."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    seen = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = [*settings, f"model.path={tmp_path / 'model'}", "train.steps=4", "checkpoint.every=2", "launch.ranks=2"]
    whole = run_recipe("finetune", tmp_path / "whole", *given)
    assert whole.status == 0, whole.err
    half = f"resume={whole.run_dir}/checkpoints/step-00000002"
    rest = run_recipe("finetune", tmp_path / "rest", *given, half)
    assert rest.status == 0, rest.err
    assert rest.losses == whole.losses[2:]
    with open_checkpoint(whole.checkpoint / "optimizer") as index:
        assert not any("vision" in name or "projector" in name for name in index.names)
    other = run_recipe("finetune", tmp_path / "other", *given, half, "optim=sgd")
    assert (other.status, "saved by another optimizer" in other.err) == (2, True), other.err
    copied = run_recipe("finetune", tmp_path / "ddp", *given, "shard=ddp", "shard.find_unused_parameters=true")
    assert copied.status == 0, copied.err
    assert copied.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2", "ddp"])
def test_an_optimizer_without_state_resumes_bit_equal(settings: list[str], tmp_path: Path, wrapper: str) -> None:
    given = [*settings, f"shard={wrapper}", "launch.ranks=2", "train.steps=6", "checkpoint.every=3", "optim=sgd"]
    given += ["optim.lr=0.1", "optim.momentum=0"]
    whole = run_recipe("finetune", tmp_path / "whole", *given)
    assert whole.status == 0, whole.err
    assert not (whole.checkpoint / "optimizer").exists()
    half = f"resume={whole.run_dir}/checkpoints/step-00000003"
    rest = run_recipe("finetune", tmp_path / "rest", *given, half)
    assert rest.status == 0, rest.err
    assert rest.losses == whole.losses[3:]
    with open_checkpoint(rest.checkpoint) as one, open_checkpoint(whole.checkpoint) as other:
        assert tensor_digests(one) == tensor_digests(other)
    refused = run_recipe("finetune", tmp_path / "other", *given, half, "optim.momentum=0.9")
    assert (refused.status, "or its optimizer keeps no state" in refused.err) == (2, True), refused.err


@pytest.mark.parametrize("dtype", ["float16", "fp32"])
def test_a_dtype_that_ddp_does_not_know_is_refused(settings: list[str], tmp_path: Path, dtype: str) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, "shard=ddp", f"shard.param_dtype={dtype}")
    assert (ended.status, f"shard.param_dtype={dtype}" in ended.err) == (2, True), ended.err


def test_older_steps_are_deleted_but_for_each_nth(settings: list[str], tmp_path: Path) -> None:
    keep = ["checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_every=2"]
    ended = run_recipe("finetune", tmp_path, *settings, "train.steps=5", *keep)
    assert ended.status == 0, ended.err
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-00000002", "step-00000004", "step-00000005"]
    assert json.loads((ended.checkpoint / "trainer.json").read_text())["step"] == 5


@pytest.mark.parametrize("part", ["trainer.json", "optimizer", "manifest.json", "model.safetensors"])
def test_a_step_with_a_part_missing_is_refused(
    runs: dict[tuple[str, int, str], Ended], settings: list[str], tmp_path: Path, part: str
) -> None:
    import shutil

    step = tmp_path / "step"
    shutil.copytree(runs["fsdp2", 2, "gathered"].checkpoint, step)
    target = step / part
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    ended = run_recipe("finetune", tmp_path / "run", *settings, "train.steps=40", f"resume={step}")
    assert ended.status == 2, (ended.status, ended.err)
    assert ended.err.startswith("error: ")
    assert str(step) in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.long
def test_a_run_starts_from_what_another_trainer_left(tiny_model: Path, settings: list[str], tmp_path: Path) -> None:
    """DCP inside a Trainer's directory, config and tokenizer further out: the losses of the model itself."""
    around = tmp_path / "trainer"
    shutil.copytree(tiny_model, around, ignore=shutil.ignore_patterns("*.safetensors"))
    convert(tiny_model, tmp_path / "dcp", format="dcp", nest="model")
    inner = around / "checkpoint-9" / "pytorch_model_fsdp_0"
    inner.mkdir(parents=True)
    for file in (".metadata", "__0_0.distcp"):
        shutil.move(tmp_path / "dcp" / file, inner / file)
    short = [setting for setting in settings if not setting.startswith(("train.steps", "train.warmup_steps"))]
    runs = [
        run_recipe("finetune", tmp_path / name, *short, "train.steps=2", f"model.path={path}")
        for name, path in (("one", around), ("two", tiny_model))
    ]
    assert [run.status for run in runs] == [0, 0], runs[0].err
    assert runs[0].losses == runs[1].losses
    convert(runs[0].checkpoint, tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_steps_of_a_run_are_not_written_over(
    runs: dict[tuple[str, int, str], Ended], settings: list[str], tmp_path: Path
) -> None:
    """To go on from elsewhere, in a run that has steps of its own, would end in the same step twice."""
    short = [setting for setting in settings if not setting.startswith("train.steps")]
    ended = run_recipe("finetune", tmp_path, *short, "train.steps=4")
    assert ended.status == 0, ended.err
    other = next(iter(runs.values())).checkpoint
    again = run_recipe("finetune", tmp_path, *short, "train.steps=30", f"resume={other}")
    assert again.status == 2
    assert f"run_dir={tmp_path} already holds checkpoints up to step 4" in again.err


@pytest.mark.long
def test_ddp_goes_on_from_another_wrapper_and_back(
    runs: dict[tuple[str, int, str], Ended], settings: list[str], tmp_path: Path
) -> None:
    whole = runs["fsdp2", 2, "sharded"]
    overrides = ["shard=ddp", "shard.explain=true", "launch.ranks=2", "checkpoint.every=5"]
    ddp = _resume_from_half(whole, tmp_path / "ddp", settings, *overrides)
    assert "model.layers.0-1  LlamaDecoderLayer" in ddp.err
    assert ddp.losses == pytest.approx(whole.losses[10:], abs=1e-5)
    assert verify(ddp.checkpoint).is_sound
    half = f"resume={ddp.run_dir}/checkpoints/step-00000015"
    back = run_recipe("finetune", tmp_path / "back", *settings, half, "shard=fsdp1", "launch.ranks=2")
    assert back.losses == pytest.approx(whole.losses[15:], abs=1e-5)
