"""The same work by others, as a user runs it: NAME SOURCE TARGET [MAX_SHARD_SIZE], each in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path


def transformers(source: str, target: str, max_shard_size: str) -> None:
    """`from_pretrained`, `save_pretrained`."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(target, max_shard_size=max_shard_size)


def accelerate(source: str, target: str, max_shard_size: str) -> None:
    """An empty model, `load_checkpoint_and_dispatch` to the CPU, `Accelerator.save_model`."""
    from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model = load_checkpoint_and_dispatch(model, source, device_map={"": "cpu"})
    Accelerator(cpu=True).save_model(model, target, max_shard_size=max_shard_size)


def merge_weights(source: str, target: str) -> None:
    """`accelerate merge-weights` of a DCP directory."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(source, target)


def dcp_to_torch_save(source: str, target: str) -> None:
    """torch's own way from a DCP directory to one file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    Path(target).mkdir()
    dcp_to_torch_save(source, f"{target}/model.pt")


def consolidate(source: str, target: str) -> None:
    """torch's own way from its per-rank safetensors to one file."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = HuggingFaceStorageReader(source).read_metadata().state_dict_metadata
    Path(target).mkdir()
    consolidate_safetensors_files(source, target, dict.fromkeys(names, 1), num_threads=2)


PEERS = {peer.__name__: peer for peer in (transformers, accelerate, merge_weights, dcp_to_torch_save, consolidate)}

if __name__ == "__main__":
    PEERS[sys.argv[1]](*sys.argv[2:])
