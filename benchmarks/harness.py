"""lm-evaluation-harness with a dispatched model, compared with its own `hf` model: log-likelihoods, tokens a second.

    python benchmarks/harness.py --model DIR [--questions 16] [--batch-size 8] [--rounds 7] [--threads 1]

The questions are those of the task `everyday`. Needs the extra `eval` (scripts/peers makes such an environment). Both
models are in one process in float32 and are asked alternately, each of them first in every second round. Processor
seconds are compared, because both do the same work on the same cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

Requests = list[Any]


def everyday_requests(tokenizer: Any, limit: int) -> tuple[Requests, int]:
    """The harness's requests for the first `limit` questions, and how many tokens they score over."""
    from lm_eval.tasks import TaskManager

    from fsdp_shard.utils import shipped_directory

    manager = TaskManager(include_path=[str(shipped_directory("conf") / "lm_eval")])
    task = manager.load(["everyday"])["tasks"]["everyday"]
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    requests = list(task.instances)
    return requests, sum(len(tokenizer("".join(request.args))["input_ids"]) for request in requests)


def ask(model: Any, requests: Requests) -> tuple[float, list[float]]:
    """Processor seconds for all requests, and their log-likelihoods."""
    began = time.process_time()
    answers = model.loglikelihood(requests, disable_tqdm=True)
    return time.process_time() - began, [float(value) for value, _ in answers]


def main() -> None:
    """Ask both alternately, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a causal language model")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()

    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    import fsdp_shard as fs
    from fsdp_shard.distributed import OnlyRank
    from fsdp_shard.evaluation import wrap_for_harness

    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    dispatched = fs.load_dispatched(given.model, "cpu", dtype="float32")
    sides: dict[str, Any] = {
        "hf": HFLM(pretrained=given.model, device="cpu", dtype="float32", batch_size=given.batch_size),
        "ours": wrap_for_harness(dispatched, tokenizer, given.batch_size, OnlyRank()),
    }
    requests, num_tokens = everyday_requests(tokenizer, given.questions)
    for model in sides.values():
        ask(model, requests[:4])  # the first pass of a process makes threads and buffers, whoever is first
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[float]] = {}
    for at in range(given.rounds):
        for name in sorted(sides, reverse=at % 2 == 1):
            spent, answers[name] = ask(sides[name], requests)
            seconds[name].append(spent)
            print(f"round {at + 1}  {name:<5} {spent:7.2f} CPU s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    apart = max(abs(a - b) for a, b in zip(answers["hf"], answers["ours"], strict=True))
    for name, median in medians.items():
        print(f"{name:<5} {num_tokens / median:10,.0f} tokens/s of a core")
    print(f"ours / hf: {medians['hf'] / medians['ours']:.3f} of its speed; log-likelihoods at most {apart:g} apart")


if __name__ == "__main__":
    main()
