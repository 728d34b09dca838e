"""Scoring documents with a quarter of the weights in memory: layer-major, batch-major, in memory, and accelerate.

    python benchmarks/layer_major.py --work /big/disk/bench --size 2.4

Wants a machine with nothing else to do. The model is made once in `--work` and kept. In each of `--repeats` rounds each
side runs once, as a process of its own, and begins with its files out of the page cache; medians count. All sides run
the same batches, and ours must have the losses of the model in memory, bit for bit. Seconds are those of scoring, for
streamed sides with all reading that it takes; loading before the first batch is not counted. Targets are those of the
issue that asked for this. `--quick` is one round on a tiny model, to see that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from convert import Bench as Sources, Row
from generate_from import Peak, accelerate, evict, plain
from measure import MB, memory_limit, run

from fsdp_shard import convert

HERE = Path(__file__).resolve().parent
SIDES = ("in memory", "layer-major", "batch-major", "accelerate")


def score(model: Any, ids: Any) -> list[float]:
    """The loss of each document of a batch [documents, tokens]."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits
        losses = [
            torch.nn.functional.cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(logits, ids, strict=True)
        ]
        return [float(loss) for loss in losses]


def side(name: str, source: str, budget: int, documents: int, tokens: int, batch_size: int) -> dict[str, Any]:
    """Score the documents in this process, and return what it took."""
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401 - so that imports do not count in memory

    import fsdp_shard as fs
    from fsdp_shard.inference import DispatchConfig, plan_schedule, stream_of

    peak = Peak("VmRSS")  # mapped files included
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(200, (documents, tokens), generator=generator).split(batch_size)
    found: dict[str, Any] = {}
    if name.endswith("major"):
        model = fs.load_dispatched(source, "auto", {"cpu": budget})
        settings = DispatchConfig("auto", {"cpu": budget}, schedule=name.replace("-", "_"))
        schedule = plan_schedule(model, settings, [tuple(ids.shape) for ids in batches])
        passes: Sequence[Callable[[], list[float]]] = [partial(score, model, ids) for ids in batches]
        stream = stream_of(model)
        assert stream is not None
        evict(source)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            losses = [loss for batch in schedule.run(model, passes, Path(directory)) for loss in batch]
        found = {"weights_read": stream.num_bytes_fetched / stream.num_bytes, "streamed_bytes": stream.num_bytes}
        print(schedule.describe(), file=sys.stderr)
    else:
        model = plain(source) if name == "in memory" else accelerate(source, str(budget))
        evict(source)
        start = time.perf_counter()
        losses = [loss for ids in batches for loss in score(model, ids)]
    seconds = time.perf_counter() - start
    hidden = 2 * documents * tokens * model.config.hidden_size * model.dtype.itemsize  # with the embeddings
    return found | {
        "seconds": seconds,
        "losses": losses,
        "added_bytes": peak.num_bytes - peak.first_bytes,
        "hidden_bytes": hidden,
        "num_batches": len(batches),
    }


def compare(source: Path, budget: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run all sides, and return the medians of each."""
    sizes = [str(size) for size in (budget, options.documents, options.tokens, options.batch_size)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for number in range(options.repeats):
        for name in SIDES if number % 2 == 0 else reversed(SIDES):
            command = [sys.executable, str(HERE / "layer_major.py"), "--side", name, str(source), *sizes]
            is_limited = options.memory is not None and name != "in memory"
            limited: AbstractContextManager[list[str]] = nullcontext([])
            if is_limited:
                limited = memory_limit(options.memory * 1e9)
            with limited as limit:
                cost = run([*limit, *command])
            shutil.rmtree(f"{source}-offload", ignore_errors=True)
            found[name].append(dict(cost.inside))
            print(f"  {name:<12} {cost.inside['seconds']:9.2f} s", flush=True)
    medians: dict[str, dict[str, Any]] = {}
    for name, rounds in found.items():
        numbers = {key: statistics.median(one[key] for one in rounds) for key in rounds[0] if key != "losses"}
        medians[name] = numbers | {"losses": rounds[0]["losses"]}
    return medians


def rows(found: dict[str, dict[str, Any]], budget: int) -> list[Row]:
    """The table."""
    memory, ours, rest = found["in memory"], found["layer-major"], found["batch-major"]
    assert ours["losses"] == rest["losses"] == memory["losses"], "not equal bit for bit"
    peer = found["accelerate"]
    allowed = budget + ours["hidden_bytes"] + 300 * MB
    return [
        Row("streamed weights read, layer-major", ours["weights_read"], limit=1.0),
        Row("streamed weights read, batch-major", rest["weights_read"]),
        Row("layer-major / in memory, seconds", ours["seconds"] / memory["seconds"], limit=1.3),
        Row("batch-major / layer-major, seconds", rest["seconds"] / ours["seconds"]),
        Row("accelerate / layer-major, seconds", peer["seconds"] / ours["seconds"], limit=1, at_least=True),
        Row("peak memory / (budget + hidden states + 300 MB)", ours["added_bytes"] / allowed, limit=1),
        Row("peak memory, in memory", memory["added_bytes"] / MB, "MB"),
        Row("peak memory, layer-major", ours["added_bytes"] / MB, "MB"),
        Row("peak memory, batch-major", rest["added_bytes"] / MB, "MB"),
        Row("peak memory, accelerate", peer["added_bytes"] / MB, "MB"),
    ]


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        name, source, *sizes = sys.argv[2:]
        print(json.dumps(side(name, source, *map(int, sizes))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for what is made; it is kept")
    parser.add_argument("--size", type=float, default=2.4, help="gigabytes of the model (default 2.4)")
    parser.add_argument("--documents", type=int, default=64, help="documents to score (default 64)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each (default 256)")
    parser.add_argument("--batch-size", type=int, default=8, help="documents in a batch (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of which the median counts (default 3)")
    parser.add_argument("--float32", action="store_true", help="in float32, for processors that emulate bfloat16")
    parser.add_argument("--memory", type=float, help="gigabytes for each streamed side, page cache included")
    parser.add_argument("--quick", action="store_true", help="one round on a model of 30 MB")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    if options.quick:
        options.size, options.repeats, options.tokens = 0.03, 1, 16
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
    model = Sources(options.work.resolve(), options.size, options.repeats, "200MB", True).model()
    if options.float32:
        stored, model = model, model.with_name(f"{model.name}-float32")
        if not model.exists():
            convert(stored, model, dtype="float32")
    budget = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 4
    table = rows(compare(model, budget, options), budget)
    print("\n" + "\n".join(map(str, table)))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "is_met": row.is_met} for row in table], indent=2) + "\n")


if __name__ == "__main__":
    main()
