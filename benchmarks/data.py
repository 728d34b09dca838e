"""Tokenizing JSON lines into the cache: beside the tokenizer alone, and beside a plain `datasets` script.

    python benchmarks/data.py [--megabytes 500] [--model org/name] [--rounds 3] [--workers 1] [--only ours]

Random words in rows of some 2,000 characters, and a tokenizer trained on them unless --model names one. Each side is a
process of its own, and all of them run in every round; imports and reading the tokenizer do not count. `tokenizer`
calls `encode_batch_fast` on texts that are in memory; `datasets` is `load_dataset("json")` and a batched `map` of a
call of the tokenizer. Processor time is that of all threads and workers. Memory is the peak of the process, with the
pages of files that it maps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = ("ours", "tokenizer", "datasets")


def write_rows(path: Path, num_bytes: int) -> None:
    """Write rows with a text until the file has that many bytes; words are as frequent as in a language."""
    source = random.Random(0)
    letters = "etaoinshrdlcumwfgypbvk"
    words = ["".join(source.choices(letters, range(22, 0, -1), k=source.randint(1, 11))) for _ in range(200_000)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))
    texts = [" ".join(source.choices(words, cum_weights=weights, k=350)) for _ in range(10_000)]
    with path.open("w") as file:
        for number in itertools.count():
            if file.tell() >= num_bytes:
                return
            file.write(json.dumps({"text": texts[number % len(texts)], "id": number}) + "\n")


def make_tokenizer(rows: Path, directory: Path) -> None:
    """Train a tokenizer such as GPT-2's on some of the rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    with rows.open() as file:
        texts = [json.loads(line)["text"] for line in itertools.islice(file, 5000)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(directory)


def side(name: str, path: str, work: Path, model: str, workers: int) -> dict[str, float]:
    """Tokenize in this process; return seconds, tokens and the peak of memory in MB."""
    import datasets
    from transformers import AutoTokenizer

    from fsdp_shard.data import DataConfig, tokenize_all

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    lines = Path(path).read_text().splitlines() if name == "tokenizer" else []
    texts = [json.loads(line)["text"] for line in lines]
    began, used = time.perf_counter(), sum(os.times()[:4])
    if name == "ours":
        config = DataConfig(path=path, workers=workers, cache_dir=str(work / "tokens"))
        file = tokenize_all(config, tokenizer).train[""]
        num_tokens = file.num_tokens
    elif name == "tokenizer":
        encode = tokenizer.backend_tokenizer.encode_batch_fast
        num_tokens = sum(
            len(found.ids)
            for start in range(0, len(texts), 500)
            for found in encode(texts[start : start + 500], add_special_tokens=False)
        )
    else:
        rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(work / "datasets"))
        encoded = rows.map(
            lambda batch: {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]},
            batched=True,
            remove_columns=rows.column_names,
            num_proc=workers if workers > 1 else None,
        )
        num_tokens = sum(len(ids) for batch in encoded.iter(1000) for ids in batch["input_ids"])
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    megabytes = int(status["VmHWM"].split()[0]) / 1024
    seconds, processor = time.perf_counter() - began, sum(os.times()[:4]) - used
    return {"seconds": seconds, "processor": processor, "tokens": num_tokens, "peak": megabytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--model", help="default: a tokenizer that is trained first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", choices=SIDES, action="append")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--rows")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(side(arguments.side, arguments.rows, arguments.work, arguments.model, arguments.workers)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only or SIDES}
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        rows = Path(work) / "rows.jsonl"
        write_rows(rows, arguments.megabytes << 20)
        model = arguments.model or f"{work}/tokenizer"
        if arguments.model is None:
            make_tokenizer(rows, Path(model))
        for number in range(arguments.rounds):
            for name in found:
                command = [sys.executable, __file__, "--side", name, "--rows", str(rows), "--model", model]
                command += ["--work", f"{work}/{number}", "--workers", str(arguments.workers)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, rounds in found.items():
        ours = found.get("ours", rounds)
        rate = statistics.median(one["tokens"] / one["seconds"] for one in rounds)
        ratios = {
            unit: statistics.median(that[unit] / one[unit] for one, that in zip(ours, rounds, strict=True))
            for unit in ("seconds", "processor")
        }
        print(
            f"{name}: {rate:,.0f} tokens/s ({rounds[0]['tokens']:,.0f}); speed of ours / this {ratios['seconds']:.2f}, "
            f"by processor time {ratios['processor']:.2f}; peak {max(one['peak'] for one in rounds):,.0f} MB"
        )


if __name__ == "__main__":
    main()
