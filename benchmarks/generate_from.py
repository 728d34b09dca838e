"""A token from a checkpoint, by one way of many: NAME SOURCE [ARGUMENTS], each in a process of its own; prints JSON.

The ways that read a checkpoint where it lies print the seconds of a token too, warm and after its files were put out of
the page cache before each token. All are greedy, batch 1, on the CPU, in the dtype of the files.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = [1, 5, 9, 13, 17, 21, 25, 29]
WORDS = "Once upon a time"


def plain(source: str) -> Any:
    """`from_pretrained`, everything in memory."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype="auto")


def script(source: str) -> None:
    """A whole script as people write it: a token after a prompt, as text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    out = model.generate(**tokenizer(WORDS, return_tensors="pt"), max_new_tokens=1, do_sample=False)
    print(tokenizer.decode(out[0]))


def transformers_disk(source: str, budget: str = "1") -> Any:
    """transformers' own disk offload; `budget` bytes of the CPU."""
    from transformers import AutoModelForCausalLM

    folder = f"{source}-offload"
    shutil.rmtree(folder, ignore_errors=True)
    kept = {"": "disk"} if budget == "1" else "auto"
    return AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", device_map=kept, max_memory={"cpu": int(budget)}, offload_folder=folder
    )


def accelerate(source: str, budget: str = "1") -> Any:
    """accelerate's `load_checkpoint_and_dispatch`, all weights on disk; `budget` bytes of the CPU."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    folder = f"{source}-offload"
    shutil.rmtree(folder, ignore_errors=True)
    kept: Any = "auto"
    if budget == "1":
        parts = [f"model.layers.{name}" for name, _ in model.model.layers.named_children()]
        kept = dict.fromkeys(["model.embed_tokens", *parts, "lm_head"], "disk")
        kept |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}  # it refuses a map of nothing but disk
    return load_checkpoint_and_dispatch(
        model, source, device_map=kept, max_memory={"cpu": int(budget)} if budget != "1" else None,
        offload_folder=folder, no_split_module_classes=["LlamaDecoderLayer"], dtype=config.dtype,
    )  # fmt: skip


def ours(source: str, device_map: str = "cpu", budget: str = "") -> Any:
    """Ours, in place; `budget` bytes of the CPU."""
    import fsdp_shard

    return fsdp_shard.load_dispatched(source, device_map, {"cpu": int(budget)} if budget else None)


def ours_int8(source: str) -> Any:
    """Ours, in place, in 8 bits."""
    import fsdp_shard

    return fsdp_shard.load_dispatched(source, "cpu", quantize="int8")


def merged(source: str, merge: str) -> Any:
    """A merging peer first (`accelerate` or `torch`, from a DCP directory), then `from_pretrained` of what it wrote."""
    target = Path(f"{source}-merged")
    shutil.rmtree(target, ignore_errors=True)
    if merge == "accelerate":
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(source, str(target))
    else:
        import torch
        from safetensors.torch import save_file
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        target.mkdir()
        dcp_to_torch_save(source, f"{target}/model.pt")
        state = torch.load(f"{target}/model.pt", mmap=True)
        state = state.get("model", state)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{target}/model.safetensors")
    shutil.copy(Path(source) / "config.json", target / "config.json")
    return plain(str(target))


def read(source: str) -> Any:
    """No model: the best read of the same bytes that the machine gives, of several ways, each from a cold cache."""
    from reading import best_cold_read

    return best_cold_read(_files(source))


def lookup_ours(source: Path) -> float:
    """Seconds to find and map a tensor: the mean over all in the file, with what it takes to open it."""
    import torch

    import fsdp_shard
    from fsdp_shard.inference import MappedFiles

    start = time.perf_counter()
    index = fsdp_shard.open_checkpoint(source)
    files, names = MappedFiles(index), list(index.tensors)
    for name in names:
        assert files.view(name, torch.float32) is not None
    return (time.perf_counter() - start) / len(names)


def lookup_accelerate(source: Path) -> float:
    """The same of what its disk offload looks weights up with, over a hundred of them."""
    from accelerate.utils import OffloadedWeightsLoader
    from safetensors import safe_open

    (file,) = source.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        names = sorted(opened.keys())
    loader = OffloadedWeightsLoader(
        index={name: {"safetensors_file": str(file), "weight_name": name, "dtype": "float32"} for name in names}
    )
    start = time.perf_counter()
    for name in names[:: len(names) // 100]:
        assert loader[name] is not None
    return (time.perf_counter() - start) / 100


LOOKUPS = {look.__name__: look for look in (lookup_ours, lookup_accelerate)}


def first_token(model: Any) -> int:
    import torch

    with torch.inference_mode():
        return int(model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1].argmax())


def per_token(model: Any, count: int, before: Callable[[], None]) -> float:
    """Median seconds of one token with a cache of keys and values, `before` called ahead of each."""
    import torch

    from fsdp_shard.models import kv_cache_of

    seconds = []
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([PROMPT]), use_cache=True)
        for _ in range(count + 1):
            token = out.logits[:, -1:].argmax(-1)
            before()
            start = time.perf_counter()
            out = model(input_ids=token, **kv_cache_of(out), use_cache=True)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _files(source: str) -> list[Path]:
    folders = [Path(source), Path(f"{source}-offload")]
    return [file for folder in folders if folder.exists() for file in sorted(folder.rglob("*")) if file.is_file()]


def evict(source: str) -> None:
    """Put the files of SOURCE, and the offload folder beside it, out of the page cache."""
    for file in _files(source):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Peak:
    """The most memory of this process since it was made, looked at every 5 ms: a field of /proc/self/status."""

    def __init__(self, field: str) -> None:
        self._field, self.first_bytes = field, _status(field)
        self.num_bytes = self.first_bytes
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, _status(self._field))
            time.sleep(0.005)


WAYS = {way.__name__: way for way in (plain, transformers_disk, accelerate, ours, ours_int8, merged)}


def main(name: str, source: str, *arguments: str) -> None:
    tokens = int(os.environ.get("TOKENS", "0"))
    if name == "read":
        print(json.dumps(read(source)))
        return
    if name == "script":
        script(source)
        return
    if name in LOOKUPS:
        print(json.dumps({"seconds": LOOKUPS[name](Path(source))}))
        return
    from transformers import LlamaForCausalLM  # noqa: F401 - so that imports do not count in what loading takes

    if name.startswith("ours"):
        from fsdp_shard.inference import dispatch_model  # noqa: F401 - likewise
    peak = Peak("RssAnon")  # of anonymous memory the kernel keeps no peak
    start = time.perf_counter()
    model = WAYS[name](source, *arguments)
    found = {"token": first_token(model), "seconds": time.perf_counter() - start}
    found["anonymous_bytes"] = _status("RssAnon") - peak.first_bytes
    found["peak_anonymous_bytes"] = peak.num_bytes
    if tokens:
        found["warm_token_seconds"] = per_token(model, tokens, lambda: None)
        if "disk" in name or name == "accelerate" or (name == "ours" and arguments[:1] != ("cpu",)):
            found["cold_token_seconds"] = per_token(model, max(tokens // 2, 2), lambda: evict(source))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
