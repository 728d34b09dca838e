"""The loss of a large vocabulary: out of the head in chunks, against the plain one. Memory and time of training steps.

    python benchmarks/loss.py [--vocabulary 262144] [--tokens 1024] [--width 640] [--layers 4] [--rounds 3]

A Gemma-like random model in float32, one process, whole steps with SGD. Each side is a process of its own, and both run
in every round. Memory is the peak of resident bytes during the steps above what the process had before the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDES = ("plain", "chunked")


def side(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Steps of one side in this process."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    from fsdp_shard.training import head_returns_loss, use_loss_head

    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    config = Gemma3TextConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    if name == "chunked":
        assert use_loss_head(model, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, arguments.vocabulary, (1, arguments.tokens + 1))
    inputs, labels = ids[:, :-1], ids[:, 1:]
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    seconds, losses = [], []
    for _ in range(3):
        began = time.perf_counter()
        with head_returns_loss(model, labels, float(labels.numel())) as is_loss:
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = logits.reshape(()) if is_loss else F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return {"seconds": min(seconds), "bytes": resident_bytes("VmHWM") - before, "loss": losses[-1]}


def resident_bytes(field: str) -> int:
    """`field` of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 262_144), ("tokens", 1024), ("width", 640), ("layers", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(side(arguments.side, arguments)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for _ in range(arguments.rounds):
        for name in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", name]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[name].append(json.loads(output.splitlines()[-1]))
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in results.items()
    }
    for name, row in medians.items():
        print(f"{name:8} {row['bytes'] / 1e6:10,.0f} MB  {row['seconds']:7.2f} s a step  loss {row['loss']:.6f}")
    plain, chunked = medians["plain"], medians["chunked"]
    memory, seconds = (chunked[key] / plain[key] for key in ("bytes", "seconds"))
    print(f"chunked / plain: memory {memory:.2f}, time {seconds:.2f}")


if __name__ == "__main__":
    main()
