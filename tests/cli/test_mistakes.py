"""Wrong commands and settings of every command: one `error:` paragraph, a status that says so, and nothing written."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_shard.cli import print_error, run_command
from fsdp_shard.errors import FsdpShardError
from tests.support.runs import run_arguments

# The command line, with {m} for a model, {t} for a text and {d} for a directory of its own, and words of the error.
_TRAIN = "finetune model.path={m} data.path={t} data.sequence_length=64 run_dir={d}/run"
_GENERATE = "generate checkpoint={m} run_dir={d}/run"
_EVALUATE = "evaluate checkpoint={m} run_dir={d}/run"
_CONVERT = "convert source={m} run_dir={d}/run"
_PLAN = "plan model.path={m} run_dir={d}/run"

MISTAKES = [
    # Commands
    ("trian", "trian is not a command of fsdp-shard. `fsdp-shard --help`"),
    ("finetun model.path={m}", "(did you mean finetune?)"),
    ("--finetune", "--finetune is not a command"),
    ("run", "run needs the path of a recipe"),
    ("run {d}/none.py", "none.py is not a file"),
    ("run {t}", "is not a Python file"),
    ("ls everything", "Unrecognized arguments: everything"),
    ("cp", "arguments are required: name, destination"),
    ("cp nothing {d}/x", "nothing is not a shipped recipe or config"),
    ("cp finetune {t}/x.py", "cannot be written"),
    ("cp finetune.yaml {t}", "already exists"),
    # Checkpoints
    ("inspect", "arguments are required: path"),
    ("inspect {d}/none", "there is no such file or directory"),
    ("inspect {t}", "train.txt"),
    ("inspect {m} --tensor x", "Unrecognized arguments: --tensor x"),
    ("inspect {m} --tensors nothing", "has no tensor that nothing fits"),
    ("inspect {m} {m}", "Unrecognized arguments"),
    ("inspect checkpoint={m}", "there is no such file or directory"),
    ("verify", "arguments are required: path"),
    ("verify {d}/none", "there is no such file or directory"),
    ("verify {m} --against", "expected one argument"),
    ("verify {m} --against {d}/none", "there is no such file or directory"),
    ("verify {m}@step-3", "has no finished checkpoint"),
    ("diff {m}", "arguments are required: b"),
    ("diff {m} {d}/none", "there is no such file or directory"),
    ("diff {m} {m} --logits", "expected one argument"),
    ("diff {m} {m} --logits a --config {m}", "both checkpoints have a config.json"),
    ("diff {m} {m} --tokenizer {m}", "needs --logits PROMPT"),
    ("diff {m} {m} --base {m}", "error: The base model "),
    ("verify {m} --base {m}", "error: The base model "),
    # Settings of any command
    (f"{_TRAIN} train.stepz=3", "train.stepz is not a setting of finetune (did you mean train.steps?)"),
    (f"{_TRAIN} learning_rate=1e-4", "here it is optim.lr"),
    (f"{_TRAIN} --learning_rate 1e-4", "here it is optim.lr"),
    (f"{_TRAIN} gradient_accumulation_steps=4", "train.global_batch_size"),
    (f"{_TRAIN} adapter.rank=4", "adapter.rank needs adapter=lora"),
    (f"{_TRAIN} train.steps", "train.steps is not of the form name=value"),
    (f"{_TRAIN} train.steps=ten", "train.steps=ten is not a whole number"),
    (f"{_TRAIN} train.steps=0", "at least 1"),
    (f"{_TRAIN} train.steps=-1", "at least 1"),
    (f"{_TRAIN} train.steps=", "train.steps="),
    (f"{_TRAIN} train.steps=1,2", "train.steps=1,2"),
    (f"{_TRAIN} train.steps=[1]", "train.steps"),
    (f"{_TRAIN} optim.lr=1e-3,1e-4", "has several values, which only -m takes"),
    (f"{_TRAIN} adapter=lora adapter.target_modules=q_proj,v_proj", "[q_proj,v_proj] where a list is expected"),
    (f"{_TRAIN} adapter=lora adapter.target_modules=q_proj", "is a list, which is written [a,b]"),
    (f"{_TRAIN} adapter=lora adapter.target_modules=[q_proj", "A list is written adapter.target_modules=[a,b]"),
    (f"{_TRAIN} optim.betas=0.9", "optim.betas is a list"),
    (f"{_TRAIN} optim.betas=[0.9]", "must be two numbers"),
    (f"{_TRAIN} train.warmup_steps=0.1", "train.warmup_steps=0.1 is not a whole number"),
    (f"{_TRAIN} train.steps=10k", "train.steps=10k is not a whole number"),
    (f"{_TRAIN} train.epochs=1 train.steps=5", "both say how long to train"),
    (f"{_TRAIN} bf16=true", "here it is shard.param_dtype=bfloat16"),
    (f"{_TRAIN} shard=fsdp", "did you mean fsdp2?"),
    (f"{_TRAIN} optim.lr=nan", "optim.lr=nan"),
    (f"{_TRAIN} optim=adam", "optim has adamw"),
    (f"{_TRAIN} shard.blocks=[a", "shard.blocks=[a cannot be parsed"),
    (f"{_TRAIN} data=x.txt", "did you mean data.path=x.txt?"),
    (f"{_TRAIN} seed=-1", "at least 0"),
    (f"{_TRAIN} debug=perhaps", "debug=perhaps is not true or false"),
    (f"{_TRAIN} mine.yaml", "one file of settings is read, and must come first"),
    ("finetune {d}/none.yaml", "there is no such file of settings"),
    ("finetune {d}/list.yaml", "must have settings"),
    ("finetune {d}/typo.yaml", "typo.yaml: train.stepz is not a setting"),
    (f"{_TRAIN} -m model.path=a,b", "is one text. Quote each"),
    (f"{_TRAIN} --config-dir {{d}}/none", "there is no such directory"),
    (f"{_TRAIN} --cfg", "Argument --cfg/-c: invalid choice"),
    # What finetune is given
    ("finetune", "model.path"),
    ("finetune model.path={m}", "data.path"),
    ("finetune model.path= data.path={t}", "model.path is empty"),
    (f"{_TRAIN} model.path={{d}}/none", "does not exist"),
    (f"{_TRAIN} data.path={{d}}/none.txt", "there is no such file"),
    (f"{_TRAIN} data.kind=chatt", "(did you mean chat?)"),
    (f"{_TRAIN} data.sequence_length=0", "data.sequence_length=0 is out of range"),
    (f"{_TRAIN} run_dir=", "run_dir is empty"),
    (f"{_TRAIN} run_dir=null", "run_dir is null; give a directory"),
    (f"{_TRAIN} run_dir={{m}}", "holds the weights of a model"),
    (f"{_TRAIN} run_dir={{t}}", "is a file, not a directory"),
    ("finetune model.path={t} data.path={t}", "train.txt is not a weight file"),
    ("finetune {m} {t}", "is not of the form name=value"),
    (f"{_TRAIN} data.mixture={{{{a:x.jsonl}}}} data.path=", "data.path is empty"),
    (f"{_TRAIN} data.eval_path={{t}} data.eval_fraction=0.1", "both say what to hold out"),
    (f"{_TRAIN} data.eval_fraction=50%", "is not a number"),
    (f"{_TRAIN} train.eval_every=5", "needs held-out text"),
    (f"{_TRAIN} data.roles=bot", "is not a mapping"),
    (f"{_TRAIN} data.kind=preference", "Choose one, such as objective=dpo, or another data.kind."),
    (f"{_TRAIN} data.kind=preferences", "(did you mean preference?)"),
    (f"{_TRAIN} data.text_column=content", "data.text_column=content is for rows with columns, and data.path="),
    (f"{_EVALUATE} data.path={{t}} data.text_column=content", "data.text_column=content is for rows with columns"),
    (f"{_TRAIN} data.chosen_column=good", "data.chosen_column=good is for data.kind=preference, not text"),
    (f"{_TRAIN} data.kind=preference data.label_column=x", "data.label_column=x is for data.kind=text, not preference"),
    (f"{_TRAIN} resume=yes", "give a run directory, a step directory, auto or never"),
    (f"{_TRAIN} resume={{d}}/none", "does not exist"),
    (f"{_TRAIN} model.task=masked_lm", "Set model.task=causal_lm"),
    (f"{_TRAIN} adapter=lora adapter.target_modules=[query]", "its linear layers are q_proj"),
    (f"{_TRAIN} train.trackers=[wandbb]", "wandbb"),
    (f"{_TRAIN} checkpoint.max_shard_size=big", "is not a size"),
    (f"{_TRAIN} launch.ranks=3 train.global_batch_size=4", "train.global_batch_size=4"),
    (f"{_TRAIN} launch.device=tpu", "launch.device=tpu"),
    (f"{_TRAIN} optim=muon optim.not_muon=[lm_haed,score]", "optim.not_muon has lm_haed, and no module of the model"),
    (f"{_TRAIN} train.neftune_alpha=5 shard.context_parallel=2", "train.neftune_alpha=5.0 cannot be combined with"),
    (f"{_TRAIN} launch.device=cpu launch.numa_binding=node", "launch.numa_binding=node has no effect without GPUs"),
    (f"{_TRAIN} launch.device=cpu train.tf32=true", "train.tf32=true has no effect: the ranks of this run are on the"),
    # generate
    ("generate", "checkpoint"),
    (_GENERATE, "prompt"),
    (f"{_GENERATE} prompt=", "prompt is empty"),
    ("generate {m} hello", "is not of the form name=value, such as checkpoint="),
    ("generate --checkpoint={m} prompt=a", "did you mean checkpoint=VALUE?"),
    ("generate checkpoint={m}@best prompt=a", "has no finished checkpoint"),
    ("generate checkpoint={t} prompt=a", "is not a checkpoint that fsdp-shard can read"),
    (f"{_GENERATE} prompt=a prompts={{d}}/p.txt", "both are given"),
    (f"{_GENERATE} prompts={{d}}/none.txt", "no such file"),
    (f"{_GENERATE} prompt=a output={{d}}/o.txt", "must end in .jsonl"),
    (f"{_GENERATE} prompt=a output={{t}}/o.jsonl", "is a file, not a directory"),
    (f"{_GENERATE} prompt=a generation.temperature=0.5", "do_sample"),
    ("generate checkpoint={m} prompt=a generation.output_scores=true", "this run only prints; add output=FILE.jsonl"),
    (f"{_GENERATE} prompt=a max_new_tokens=5", "generation.max_new_tokens"),
    (f"{_GENERATE} prompt=a model_name_or_path=x", "here it is checkpoint"),
    (f"{_GENERATE} prompt=a dispatch.device_map=gpu", "dispatch.device_map=gpu"),
    (f"{_GENERATE} prompt=a dispatch.max_memory={{{{cpu:lots}}}}", "is not a size"),
    (f"{_GENERATE} prompt=a dispatch.device_map=cpu dispatch.max_memory={{{{0:1GB}}}}", "does not use; remove it"),
    ("generate checkpoint={d}/none prompt=a", "does not exist"),
    # evaluate
    ("evaluate", "checkpoint"),
    (_EVALUATE, "data.path"),
    (f"{_EVALUATE} data.path={{d}}/none.txt", "none.txt"),
    (f"{_EVALUATE} data.path={{t}} task=perplexty", "perplexity"),
    (f"{_EVALUATE} data.path={{t}} data.kind=preference", "which only preference objectives of finetune do"),
    (f"{_EVALUATE} data.path={{t}} batch_size=0", "at least 1"),
    (f"{_EVALUATE} data.path={{t}} data.shuffle_buffer=3", "is for training with data.streaming=true"),
    (f"{_EVALUATE} data.path={{t}} launch.device=cpu", "launch.device=cpu is for several ranks"),
    (f"{_GENERATE} prompt=x launch.device=cpu", "launch.device=cpu is for several ranks"),
    (f"{_EVALUATE} task=lm_eval", "lm_eval.tasks"),
    # convert
    ("convert source={m}", "target"),
    ("convert source={m} target={m}", "exists already"),
    (f"{_CONVERT} target={{t}}/x", "is a file, not a directory"),
    (f"{_CONVERT} target={{d}}/x format=gguf", "format=gguf is not one of"),
    (f"{_CONVERT} target={{d}}/x format=sharded ranks=0", "ranks"),
    (f"{_CONVERT} target={{d}}/x dtype=int4", "dtype=int4 is not one of"),
    (f"{_CONVERT} target={{d}}/x output_dir=y", "here it is target"),
    # plan and doctor
    ("plan", "model.path"),
    ("plan {m}", "is a model, not the run_dir of a run of finetune; plan it by model.path="),
    (f"{_PLAN} device.memory=big", "is not a size"),
    (f"{_PLAN} launch.ranks=0", "1 to 99,999 ranks"),
    (f"{_PLAN} data.path=x", "data.path is a setting of finetune, not of plan; remove it."),
    (f"{_PLAN} seed=1 data.path=x train.steps=3 loss=y", "seed, data.path, loss are settings of finetune, not of plan"),
    (f"{_PLAN} dispatch.device_map=everywhere", "dispatch.device_map=everywhere"),
    ("plan model.path={d}/none", "does not exist"),
    (f"{_PLAN} dispatch=default", "dispatch=default: dispatch is a section of settings and has no value itself"),
    (f"{_PLAN} launch.timeout_seconds=5", "launch.timeout_seconds=5.0 has no effect: plan does not use it"),
    (f"{_PLAN} launch.max_restarts=3", "launch.max_restarts=3 has no effect: plan does not use it"),
    (f"{_GENERATE} prompt=a dispatch=planned", "dispatch=planned: there is no such option; dispatch has default"),
    (f"{_EVALUATE} data.path={{t}} dispatch=planned", "dispatch=planned: there is no such option"),
    (f"{_PLAN} search=true device.memory=80GB trace=true", "trace=true is for one plan, and search=true makes many"),
    ("doctor train.stepz=1", "train.stepz is not a setting of doctor"),
]


def test_there_are_many() -> None:
    assert len(dict(MISTAKES)) == len(MISTAKES) >= 60


@pytest.mark.parametrize(("line", "said"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_error(line: str, said: str, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("[a]")
    (tmp_path / "typo.yaml").write_text("train: {stepz: 3}")
    before = sorted(tmp_path.rglob("*"))
    arguments = [part.format(m=tiny_model, t=texts / "train.txt", d=tmp_path) for part in line.split()]
    ended = run_arguments(arguments)
    assert ended.status == 2, (ended.status, ended.err, ended.out)
    assert ended.err.startswith("error: "), ended.err
    assert len(ended.err.splitlines()) == 1, ended.err
    assert said in ended.err
    assert "Give debug=true" not in ended.err, "an error that nobody foresaw"
    assert sorted(tmp_path.rglob("*")) == before


SPACES = [
    ("prompt = hi there", "prompt = hi there has spaces around its =; write prompt=hi there."),
    ("generation.max_new_tokens = 5", "write generation.max_new_tokens=5."),
]


@pytest.mark.parametrize(("argument", "said"), SPACES)
def test_spaces_around_the_equals_sign(argument: str, said: str, tiny_model: Path, tmp_path: Path) -> None:
    ended = run_arguments(["generate", f"checkpoint={tiny_model}", f"run_dir={tmp_path / 'run'}", argument])
    assert (ended.status, len(ended.err.splitlines())) == (2, 1)
    assert said in ended.err


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "convert", "generate", "evaluate", "finetune"])
def test_a_damaged_checkpoint_is_one_error(command: str, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    given: dict[str, list[str | Path]] = {
        "diff": [copy, tiny_model],
        "convert": [f"source={copy}", f"target={tmp_path}/target", f"run_dir={tmp_path}/run"],
        "generate": [f"checkpoint={copy}", "prompt=a"],
        "evaluate": [f"checkpoint={copy}", f"data.path={texts}/train.txt", f"run_dir={tmp_path}/run"],
        "finetune": [f"model.path={copy}", f"data.path={texts}/train.txt", f"run_dir={tmp_path}/run"],
    }
    ended = run_arguments([command, *map(str, given.get(command, [copy]))])
    assert ended.status == (1 if command == "verify" else 2), (ended.status, ended.err)
    assert ended.err.startswith("error: "), ended.err
    assert len(ended.err.splitlines()) == 1, ended.err
    assert "copy" in ended.err
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "command", [["inspect"], ["inspect", "--tensors", "*"], ["verify"], ["verify", "--against"], ["diff"]]
)
def test_names_in_files_reach_the_screen_as_escapes(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("a\x1b[2J\nsound\u202e", f"b{'x' * 600}")
    for value, file in ((1.0, "one"), (torch.nan, "two")):
        save_file({name: torch.full((2,), value) for name in names}, tmp_path / f"{file}.safetensors")
    one, two = (str(tmp_path / f"{file}.safetensors") for file in ("one", "two"))
    with contextlib.suppress(FsdpShardError):
        run_command([command[0], two, *command[1:], *([one] if command[-1] in ("diff", "--against") else [])])
    said = capsys.readouterr().out
    assert "a\\x1b[2J\\nsound\\u202e" in said
    assert [character for character in said if not character.isprintable() and character != "\n"] == []
    assert len(said) < 20_000


def test_an_error_shows_what_a_file_says_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x\x1b[2J\u202e"}}))
    with pytest.raises(FsdpShardError) as raised:
        run_command(["inspect", str(tmp_path)])
    print_error(raised.value, debug=True)
    said = capsys.readouterr().err
    assert "x\\x1b[2J\\u202e" in said
    assert [character for character in said if not character.isprintable() and character != "\n"] == []
