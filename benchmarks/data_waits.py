"""What training waits for its samples: tokenized ahead into the cache, streamed, and streamed with workers.

    python benchmarks/data_waits.py MODEL ROWS.jsonl [--rounds 3] [--steps 60]

Two ranks, all sides in every round. Of each run the median step, the median and longest wait, and the time waited over
that of all steps, without the first two steps; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SIDES = {
    "cached": [],
    "streamed": ["data.streaming=true"],
    "streamed, data.workers=2": ["data.streaming=true", "data.workers=2"],
}


def train(run_dir: Path, arguments: list[str]) -> tuple[float, float, float, float]:
    """Run finetune; return seconds of the median step, of the median and the longest wait, and the share waited."""
    command = [sys.executable, "-m", "fsdp_shard", "finetune", f"run_dir={run_dir}", "launch.ranks=2", *arguments]
    subprocess.run(command, check=True, capture_output=True)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][2:]
    steps, waits = ([row[name] for row in rows] for name in ("step_seconds", "data_seconds"))
    return statistics.median(steps), statistics.median(waits), max(waits), sum(waits) / sum(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    settings = [f"model.path={given.model}", f"data.path={given.rows}", f"train.steps={given.steps}"]
    settings += ["train.global_batch_size=32", "train.micro_batch_size=16", "data.sequence_length=128"]
    settings += ["shard.param_dtype=float32", "checkpoint.every=0"]
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as work:
        for number in range(given.rounds):
            for name, more in SIDES.items():
                cache = [] if more else [f"data.cache_dir={work}/cache"]
                found[name].append(train(Path(work) / f"{number} {len(more)}", [*settings, *more, *cache]))
    for name, rounds in found.items():
        step, wait, longest, share = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{name}: step {step * 1e3:.0f} ms, wait {wait * 1e3:.2f} ms, longest {longest * 1e3:.1f} ms, "
            f"{share:.1%} of the time"
        )


if __name__ == "__main__":
    main()
