"""How many of transformers' architectures work: built, resolved into blocks, sharded, and trained equal to one process.

Every config class with every class for causal, seq2seq and masked models and classifiers, and of all others one. Each
runs in a process of its own with a limit on time and memory, and is recorded when it ends, so that the work can be done
in pieces: `python benchmarks/coverage.py --work DIR` goes on where it was stopped, and writes docs/coverage.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage_stages import TASKS, Case, shard_as_it_is, train_small
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "classifier": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
# Name -> what is tried, and the steps that it reports.
STAGES = {
    "structure": (shard_as_it_is, ("built", "resolved", "sharded")),
    "training": (train_small, ("trained by one process", "trained", "equal", "dispatched")),
}
REPORT = Path(__file__).resolve().parent.parent / "docs/coverage.md"
_FORK = multiprocessing.get_context("fork")


def cases() -> Iterator[Case]:
    """Every class of each kind once, and a class of each type of config that has none of them."""
    seen: set[str] = set()
    known: set[str] = set()
    for kind, names in KINDS.items():
        for model_type, found in names.items():
            known.add(model_type)
            for cls in [found] if isinstance(found, str) else found:
                if f"{kind}/{cls}" not in seen and hasattr(transformers, cls):
                    seen.add(f"{kind}/{cls}")
                    yield Case(kind, model_type, cls)
    others = sorted(name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING_NAMES", name))
    for name in ["MODEL_MAPPING_NAMES", *others]:
        for model_type, found in getattr(modeling_auto, name).items():
            cls = found if isinstance(found, str) else found[0]
            if model_type not in known and model_type in CONFIG_MAPPING and hasattr(transformers, cls):
                known.add(model_type)
                yield Case("other", model_type, cls)


def run_case(case: Case, stage: str, seconds: float, memory_bytes: int) -> dict[str, Any]:
    """Try `stage` with `case` in a process of its own; a row of the record."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(case, stage, memory_bytes, sender))
    began, reason = time.perf_counter(), ""
    process.start()
    sender.close()
    done: list[str] = []
    while not reason:
        if not receiver.poll(max(0.0, began + seconds - time.perf_counter())):
            reason = f"no answer in {seconds:.0f} s"
            break
        try:
            word, value = receiver.recv()
        except EOFError:
            reason = "the process died"
            break
        if word == "end":
            reason = value
            break
        done.append(value)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # the ranks that it started too
    process.join()
    return {"case": case.name, "done": done, "reason": reason, "seconds": round(time.perf_counter() - began, 1)}


def _child(case: Case, stage: str, memory_bytes: int, out: Connection) -> None:
    os.setsid()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        for step in STAGES[stage][0](case):
            out.send(("done", step))
    except BaseException as error:  # of any kind, from models that expect other sizes
        out.send(("end", _reason(error)))
        return
    out.send(("end", ""))


def _reason(error: BaseException) -> str:
    """The error in one line; of one in a rank, that of its traceback."""
    text = f"{type(error).__name__}: {error}"
    raised = (
        re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b: .*", str(error), re.MULTILINE) if "raised\n" in text else []
    )
    text = re.sub(r"/\S*/model\b", "the model", raised[-1] if raised else text)  # a temporary directory
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"  # some begin with the whole model


def report(work: Path) -> str:
    """docs/coverage.md, of all that is recorded in `work`."""
    lines = [
        "# Architectures",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}. Written by "
        "`make bench-coverage WORK=DIR`, which goes on where it",
        "was stopped; the reasons are the errors of that time.",
        "",
        "*Structure*: each class is built on meta with its real widths and at most 4 layers, resolved into blocks, and",
        "sharded by fsdp2 on two ranks. *Training*: each class is trained with random weights, 2 layers and small",
        "widths, in two SGD steps on two ranks. Losses and saved weights must be within 1e-4 of one process.",
        "transformers then reloads the model, and dispatch must give equal logits. Classes that transformers cannot",
        "build from its own defaults, or train small in one process, say nothing about sharding; they are counted",
        "separately.",
        "",
        "Both sides start from the same saved model, as loaded by transformers, which computes Marian's positions",
        "(they are not stored) and zeroes the row of Funnel's padding token, whatever is stored. Buffers that training",
        "changes are not compared: I-BERT's activation ranges are statistics of each rank's own samples, and a saved",
        "step keeps those of the first rank. Speech models that are not encoder-decoders are trained as causal models.",
        "",
        "Musicgen counts a sample's four codebooks as four rows, so a micro-batch of one row is less than a sample.",
        "T5Gemma's classifiers fail if called with `use_cache`, which both sides pass to every model.",
        "",
    ]
    for stage, (_, steps) in STAGES.items():
        rows = _recorded(work / f"{stage}.jsonl")
        lines += [
            f"## {stage.capitalize()}",
            "",
            f"| kind | tried | {' | '.join(steps)} |",
            "|---" * (2 + len(steps)) + "|",
        ]
        kinds = [kind for kind in (*KINDS, "other") if any(row["case"].startswith(f"{kind}/") for row in rows)]
        for kind in (*kinds, "all"):
            of_kind = [row for row in rows if kind in ("all", row["case"].partition("/")[0])]
            counts = Counter(step for row in of_kind for step in row["done"])
            lines.append(f"| {kind} | {len(of_kind)} | {' | '.join(str(counts[step]) for step in steps)} |")
        lines += ["", *_failures(rows, steps), ""]
    return "\n".join(lines)


def _failures(rows: Sequence[dict[str, Any]], steps: Sequence[str]) -> Iterator[str]:
    for number, step in enumerate(steps):
        failed = [row for row in rows if len(row["done"]) == number]
        if failed:
            yield from ["", f"Not {step}:", ""]
            yield from (f"- {row['case']}: {row['reason']}" for row in sorted(failed, key=lambda row: row["case"]))


def _recorded(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def main(arguments: Sequence[str]) -> None:
    """Try what is not recorded yet, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory of the record")
    parser.add_argument("--stage", choices=[*STAGES, "none"], help="only this stage; none only writes the report")
    parser.add_argument(
        "--only", default="", help="part of the names to try, as causal/ or Qwen3; tried again if recorded"
    )
    parser.add_argument("--seconds", type=float, default=120, help="limit for each model")
    parser.add_argument("--memory-gb", type=float, default=6, help="limit for each process")
    parser.add_argument("--report", type=Path, help="file to write; docs/coverage.md, but with --only the terminal")
    chosen = parser.parse_args(arguments)
    chosen.work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES if chosen.stage is None else [chosen.stage] if chosen.stage != "none" else []:
        log = chosen.work / f"{stage}.jsonl"
        known = {row["case"]: row for row in _recorded(log)}
        for case in cases():
            is_wanted = chosen.only in case.name if chosen.only else case.name not in known
            if is_wanted and (stage == "structure" or case.kind in TASKS):
                known[case.name] = run_case(case, stage, chosen.seconds, int(chosen.memory_gb * 2**30))
                log.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
                print(stage, json.dumps(known[case.name]), flush=True)
    if chosen.report is None and chosen.only:
        print(report(chosen.work))
        return
    (chosen.report or REPORT).write_text(report(chosen.work))


if __name__ == "__main__":
    main(sys.argv[1:])
