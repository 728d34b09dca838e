"""TRL's trainers of preferences in one process in float32 on the CPU: `trl_runs.py JOB.json OUT.json [--memory]`.

It is run by the Python of an environment that has TRL (`scripts/peers`), as a process of its own, and imports nothing
of this package. JOB is an object:

    model          directory of a causal language model and its tokenizer
    steps          number of updates
    batch_size     samples per update; there is no accumulation of gradients
    lr, betas, eps, schedule, max_grad_norm   as in our settings of `optim.*` and `train.*`; the optimizer is AdamW
                   without weight decay
    runs           name of a run -> {objective, rows, options, model, adapter}

`rows` is a JSON Lines file in the order of training, a row for each sample of each step; nothing is shuffled. Its
columns are `prompt`, `chosen`, `rejected`, for KTO `prompt`, `completion`, `label` and `mismatched`. `options` are
settings of TRL's config. `model` replaces the job's, `adapter` is a directory in peft's format whose LoRA is trained
from its values; the reference is the model without it.

OUT has, for each run, `steps`, a row a step with the loss and TRL's metrics in full precision, and `batch`, the token
ids of its first batch. The rows are the Trainer's history: it logs each step, and rounds nothing. Metrics have our
names.

For KTO, TRL pairs each prompt with the completion of the sample before in its batch, the first with the last's. Here
`mismatched` says which completion it is: it replaces that column of TRL's after the data is tokenized.

With --memory each run has a process of its own, and OUT has what it needs instead: `resident_bytes` is the most memory
in RAM, `imported_bytes` that before the model is loaded, `tensor_bytes` the most bytes of storages of tensors at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Freed memory goes back to the system, so that the peak in RAM is that of what was needed at once. Read at the start.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_OUR_NAMES = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}  # of the metrics of RewardTrainer


def build_trainer(job: dict[str, Any], run: dict[str, Any], directory: str) -> Any:
    """Build the trainer of a run; it keeps its files, of which there are hardly any, in `directory`."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    config_type, trainer_type, fixed = _types(run["objective"])
    steps, size = job["steps"], job["batch_size"]
    rows = [json.loads(line) for line in Path(run["rows"]).read_text(encoding="utf-8").splitlines()]
    if len(rows) != steps * size:
        raise SystemExit(f"error: {run['rows']} has {len(rows)} rows; {steps} steps of {size} are {steps * size}")
    mismatched = [row.pop("mismatched", None) for row in rows]
    arguments = config_type(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=size,
        train_sampling_strategy="sequential",
        optim="adamw_torch_fused",
        learning_rate=job["lr"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        lr_scheduler_type=job["schedule"],
        max_grad_norm=job["max_grad_norm"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_length=None if run["objective"] in ("dpo", "ipo", "kto", "reward") else 1 << 20,
        **fixed,
        **run.get("options", {}),
    )
    model = run.get("model", job["model"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = trainer_type(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **_adapter(run.get("adapter")),
    )
    if run.get("adapter"):
        _fill_adapter(trainer.model, Path(run["adapter"]))
    if run["objective"] == "kto":
        ids = [tokenizer(text + tokenizer.eos_token)["input_ids"] for text in mismatched]
        data = trainer.train_dataset.remove_columns("KL_completion_ids")
        trainer.train_dataset = data.add_column("KL_completion_ids", ids)
    return trainer


def _types(objective: str) -> tuple[Any, Any, dict[str, Any]]:
    """The classes of config and trainer of an objective, and the settings that make it that objective."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl

    if objective in ("dpo", "ipo"):
        return trl.DPOConfig, trl.DPOTrainer, {"loss_type": ["sigmoid" if objective == "dpo" else "ipo"]}
    if objective == "kto":
        return trl.KTOConfig, trl.KTOTrainer, {}
    if objective == "reward":
        return trl.RewardConfig, trl.RewardTrainer, {}
    if objective == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOConfig, ORPOTrainer, {"remove_unused_columns": False}
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOConfig, CPOTrainer, {"remove_unused_columns": False, "loss_type": "simpo", "cpo_alpha": 0.0}


def _adapter(directory: str | None) -> dict[str, Any]:
    """The argument for an adapter; TRL adds a new one, so that the reference is the model without it."""
    if directory is None:
        return {}
    import peft

    config = peft.LoraConfig.from_pretrained(directory)
    config.inference_mode = False  # what is saved is marked as no longer trained
    return {"peft_config": config}


def _fill_adapter(model: Any, directory: Path) -> None:
    import peft
    from safetensors.torch import load_file

    values = load_file(directory / "adapter_model.safetensors")
    loaded: Any = peft.set_peft_model_state_dict(model, values)  # a named tuple, whose fields its types leave out
    if unknown := loaded.unexpected_keys:
        raise SystemExit(f"error: {directory} has tensors that the model has not, such as {unknown[0]}")


def train(job: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Train a run to its end; what OUT has of it."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(job, run, directory)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.train()
    ids = {name: value.tolist() for name, value in batch.items() if name.endswith("ids")}
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return {"batch": ids, "steps": [{_OUR_NAMES.get(name, name): row[name] for name in row} for row in steps]}


def measure(job: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Train a run; what it needs of memory. In a process of its own."""
    _types(run["objective"])  # all that TRL imports
    before = _status_bytes("VmRSS")
    with counted_storages() as peak:
        train(job, run)
    return {"imported_bytes": before, "resident_bytes": _status_bytes("VmHWM"), "tensor_bytes": peak[0]}


@contextmanager
def counted_storages() -> Iterator[list[int]]:
    """Count the bytes of all storages that operations return while they live: the most at once, in bytes, in a list."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    now, peak, known = [0], [0], set[int]()

    def gone(key: int, size: int) -> None:
        known.discard(key)
        now[0] -= size

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves((args, kwargs, result)):  # what was loaded is only ever an argument
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in known:
                        known.add(storage._cdata)
                        now[0] += storage.nbytes()
                        weakref.finalize(storage, gone, storage._cdata, storage.nbytes()).atexit = False
            peak[0] = max(peak[0], now[0])
            return result

    with Counting():
        yield peak


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    job = json.loads(given.job.read_text())
    if given.memory:
        os.environ.update(_MALLOC)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            found = {name: pool.apply(measure, (job, run)) for name, run in job["runs"].items()}
    else:
        found = {name: train(job, run) for name, run in job["runs"].items()}
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
