"""Streamed data alone: tokens a second over the ranks, and what a step waits for its samples.

    torchrun --nproc-per-node 2 benchmarks/stream.py ROWS.jsonl TOKENIZER [--kind chat] [--packing] [--step-seconds 0.5]

Each step takes its samples as training does, and then sleeps. For one core a rank, set RAYON_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from fsdp_shard.data import DataConfig, prepare_on_ranks
from fsdp_shard.distributed import init_distributed
from fsdp_shard.models import load_tokenizer
from fsdp_shard.training import micro_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--kind", default="text")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=48, help="samples of a step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    given = parser.parse_args()
    config = DataConfig(
        path=given.path,
        kind=given.kind,
        packing=given.packing,
        sequence_length=given.sequence_length,
        streaming=True,
    )
    with init_distributed("cpu") as context:
        data = prepare_on_ranks(config, lambda: load_tokenizer(given.tokenizer), context).train
        context.barrier()
        num_tokens, waits = 0, []
        for step in range(given.steps):
            asked = time.perf_counter()
            data.prepare(step * given.batch, given.batch)
            samples = np.arange(step * given.batch, (step + 1) * given.batch)
            parts = micro_batches(samples, given.batch // context.world_size, context.rank, context.world_size)
            num_step = sum(data.batch(part).num_predictions for part in parts)
            data.state_dict((step + 1) * given.batch)
            waits.append(time.perf_counter() - asked)
            if step:
                num_tokens += num_step
            else:
                began = time.perf_counter()  # the first step waits for all of its block
            time.sleep(given.step_seconds)
        context.barrier()
        seconds = time.perf_counter() - began
        total = context.all_reduce([num_tokens])[0]
        if context.is_main:
            print(
                f"{context.world_size} rank(s): {total / seconds:,.0f} tokens/s; a step waits "
                f"{statistics.mean(waits[1:]):.3f} s, at most {max(waits[1:]):.3f} s, the first {waits[0]:.3f} s"
            )


if __name__ == "__main__":
    main()
