"""`ResumableLoader` without a trainer: which states it goes on with."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from fsdp_shard.errors import CheckpointError
from fsdp_shard.integrations import ResumableLoader


def _loader(first: int) -> ResumableLoader:
    return ResumableLoader(Dataset.from_dict({"x": [*range(first, first + 8)]}), 2)


def test_it_does_not_go_on_with_other_rows() -> None:
    loader = _loader(0)
    next(iter(loader))
    state = loader.state_dict()
    again = _loader(0)
    again.load_state_dict(state)
    assert [batch["x"].tolist() for batch in again] == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(CheckpointError, match=f"some of the rows have the digest {state['rows']}, and now "):
        _loader(1).load_state_dict(state)


def test_it_goes_on_with_states_without_a_digest_of_rows() -> None:
    """As earlier versions, and data whose rows are not read for it, have them."""
    tensors = ResumableLoader(torch.arange(8), 2)
    state = tensors.state_dict()
    assert "rows" not in state
    tensors.load_state_dict(state)
    _loader(1).load_state_dict(state)
    tensors.load_state_dict(_loader(1).state_dict())
