"""A checkpoint against the model that `from_pretrained` loads from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from fsdp_shard.checkpoint import match_names, open_checkpoint
from fsdp_shard.models import build_on_meta, load_config


def check_matched_values(directory: Path, loaded: PreTrainedModel) -> str:
    """Compare every matched tensor, whole and in part, with that of `loaded`; what matching notes."""
    expected, model = loaded.state_dict(), build_on_meta(load_config(directory))
    with open_checkpoint(directory) as index:
        matched = match_names(model, index)
        for name, stored in matched.stored.items():
            assert torch.equal(index.read(stored), expected[name]), name
            if expected[name].dim() > 1:
                assert torch.equal(index.read(stored, slice(1, 3)), expected[name][1:3]), name
    return matched.note
