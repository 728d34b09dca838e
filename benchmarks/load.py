"""What it costs to fill a model that its user has sharded with `fully_shard`: time, and peak memory of the worst rank.

    python benchmarks/load.py --work /big/disk/bench

Beside `fs.load_weights`: torch's `set_model_state_dict` with a broadcast from rank 0, and `from_pretrained` on every
rank before it is sharded. Two gloo ranks on this machine, each side in processes of its own in each round. Memory is
the peak above what a rank has once everything is imported and the ranks have met.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import MB, warm

RANKS = 2
SIZES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32000},
    "quick": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
}
OURS, BROADCAST, EVERYWHERE = "fs.load_weights", "set_model_state_dict, broadcast", "from_pretrained on every rank"


def model_on_meta(source: Path) -> Any:
    """The model of `source` without memory, in its dtype."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)


def sharded(model: Any) -> Any:
    """`model`, each layer a unit."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def load_ours(source: Path) -> Any:
    """Each rank reads its own shards."""
    import fsdp_shard as fs

    model = sharded(model_on_meta(source)).to_empty(device="cpu")
    fs.load_weights(model, source)
    return model


def load_broadcast(source: Path) -> Any:
    """Rank 0 reads all of it, and hands out shards."""
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = sharded(model_on_meta(source)).to_empty(device="cpu")
    whole: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for file in sorted(source.glob("*.safetensors")):
            whole |= load_file(file)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def load_everywhere(source: Path) -> Any:
    """Each rank reads all of it, and keeps its shards."""
    import torch
    from transformers import AutoModelForCausalLM

    return sharded(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16))


SIDES = {OURS: load_ours, BROADCAST: load_broadcast, EVERYWHERE: load_everywhere}


def rank_main(side: str, source: Path) -> None:
    """One rank: fill the model, and print the figures of the worst rank on rank 0."""
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401 - is part of the program, not of loading

    import fsdp_shard as fs
    from fsdp_shard.utils import peak_resident_bytes

    dist.init_process_group("gloo")
    assert callable(fs.load_weights)  # imported now, as it is part of the program
    dist.all_reduce(torch.zeros(1))
    before, start = peak_resident_bytes(), time.perf_counter()
    model = SIDES[side](source)
    dist.barrier()
    seconds, peak = time.perf_counter() - start, peak_resident_bytes()
    shard = sum(param.to_local().nbytes for param in model.parameters())
    sums = torch.tensor([float(param.to_local().double().abs().sum()) for param in model.parameters()]).sum()
    dist.all_reduce(sums)
    worst = torch.tensor([seconds, peak - before, shard], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    block = max(sum(p.numel() * p.itemsize for p in layer.parameters()) for layer in model.model.layers)
    if dist.get_rank() == 0:
        names = ("seconds", "growth_bytes", "shard_bytes", "block_bytes", "sum")
        print(json.dumps(dict(zip(names, [*worst.tolist(), block, float(sums)], strict=True))), flush=True)
    dist.destroy_process_group()
    # A thread of gloo that frees its last tensors while Python exits would abort the process (torch 2.13).
    sys.stdout.flush()
    os._exit(0)


def measure(side: str, source: Path) -> dict[str, float]:
    """Run a side once, on ranks of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, __file__, "--rank", side, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def make_model(directory: Path, size: str) -> Path:
    """A Llama with random weights in bfloat16, in files of 1 GB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (directory / "config.json").exists():
        config = LlamaConfig(**SIZES[size], num_attention_heads=16, num_key_value_heads=16)
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="1GB")
    return directory


def main() -> None:
    """Measure all sides, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="directory for the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a model of a few MB: only to see that all of it runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rank", nargs=2, metavar=("SIDE", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank[0], Path(options.rank[1]))
        return
    size = "quick" if options.quick else "1B"
    source = make_model(options.work / f"load-{size}", size)
    warm(source)
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side, found in rounds.items():
            found.append(measure(side, source))
    medians = {
        side: {key: statistics.median(one[key] for one in found) for key in found[0]} for side, found in rounds.items()
    }
    sums = {row["sum"] for row in medians.values()}
    assert len(sums) == 1, f"they have loaded different weights: {sums}"
    print("| loaded by | seconds | peak after imports | shard of a rank | peak beyond shard and block |")
    print("|---|---:|---:|---:|---:|")
    for side, row in medians.items():
        beyond = row["growth_bytes"] - row["shard_bytes"] - row["block_bytes"]
        mb = [f"{value / MB:,.0f} MB" for value in (row["growth_bytes"], row["shard_bytes"], beyond)]
        print(f"| {side} | {row['seconds']:.2f} | {' | '.join(mb)} |")
    if options.json:
        options.json.write_text(json.dumps([{"side": side, **row} for side, row in medians.items()]))


if __name__ == "__main__":
    main()
