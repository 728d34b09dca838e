"""Whole training programs as people write them today: NAME MODEL TEXT DTYPE SEQUENCE_LENGTH STEPS LOG, on each rank.

Each tokenizes TEXT, trains on one window a rank and step, and appends to LOG a JSON line a step as soon as it is made.
The last line of its output says, as JSON, whether parameters were sharded, and what wrapped the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LR = 1e-5


class StepLog:
    """Lines of step_seconds, from rank 0; the file is there when the first step begins."""

    def __init__(self, path: str) -> None:
        self._path, self._before = path, time.perf_counter()

    def begin(self) -> None:
        if os.environ.get("RANK", "0") == "0":
            Path(self._path).touch()
        self._before = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        if os.environ.get("RANK", "0") == "0":
            with open(self._path, "a") as stream:
                stream.write(json.dumps({"step_seconds": now - self._before}) + "\n")
        self._before = now


def windows(model: str, text: str, length: int) -> Any:
    """Token ids [num_windows, length] of the text."""
    import torch
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(Path(text).read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def describe(module: Any, wrapper: Any) -> None:
    from torch.distributed.tensor import DTensor

    if os.environ.get("RANK", "0") == "0":
        sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        print(json.dumps({"sharded": sharded, "wrapper": type(wrapper).__name__}), flush=True)


def bare(model: str, text: str, dtype: str, length: int, steps: int, log: str) -> None:
    """Plain PyTorch: `fully_shard` on each decoder layer and on the root."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    data, rank, size = windows(model, text, length), dist.get_rank(), dist.get_world_size()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    for layer in network.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, fused=True)
    record = StepLog(log)
    record.begin()
    for step in range(steps):
        ids = data[(step * size + rank) % len(data)][None]
        network(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.step()
    describe(network, network)
    dist.destroy_process_group()


def trainer(network: Any, data: Any, dtype: str, steps: int, log: str, **arguments: Any) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    record = StepLog(log)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            record.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            record.step()

    rows = data.tolist()
    with TemporaryDirectory() as directory:
        settings = TrainingArguments(
            directory,
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            bf16=dtype == "bfloat16",
            use_cpu=True,
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            **arguments,
        )
        engine = Trainer(
            model=network,
            args=settings,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            data_collator=default_data_collator,
            callbacks=[Steps()],
        )
        engine.train()
        describe(engine.model, engine.model_wrapped)


def trainer_distributed_config(model: str, text: str, dtype: str, length: int, steps: int, log: str) -> None:
    """The Trainer with a model that `from_pretrained(distributed_config=DistributedConfig(fsdp_size=N))` sharded."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.distributed.init_process_group("gloo")
    config = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]), fsdp_mixed_precision=dtype == "bfloat16")
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, distributed_config=config, device_map="cpu"
    )
    trainer(network, windows(model, text, length), dtype, steps, log)


def trainer_accelerate(model: str, text: str, dtype: str, length: int, steps: int, log: str) -> None:
    """The Trainer with FSDP2 of accelerate asked for. On a CPU accelerate runs DDP instead, and does not say so."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    trainer(network, windows(model, text, length), dtype, steps, log, fsdp="full_shard auto_wrap", fsdp_config=config)


def fabric(model: str, text: str, dtype: str, length: int, steps: int, log: str) -> None:
    """Lightning Fabric, which LitGPT is made with: its FSDP strategy wants GPUs, so this is its DDP."""
    import torch
    from lightning.fabric import Fabric
    from transformers import AutoModelForCausalLM

    data = windows(model, text, length)
    precision: Any = "bf16-mixed" if dtype == "bfloat16" else "32-true"
    engine = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", precision=precision)
    engine.launch()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, fused=True)
    wrapped, optimizer = engine.setup(network, optimizer)
    record = StepLog(log)
    record.begin()
    for step in range(steps):
        ids = data[(step * engine.world_size + engine.global_rank) % len(data)][None]
        engine.backward(wrapped(input_ids=ids, labels=ids).loss)
        engine.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.step()
    describe(network, wrapped)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, model, text, dtype, length, steps, log = sys.argv[1:]
    globals()[name](model, text, dtype, int(length), int(steps), log)
