"""What the facts of several ranks come to. That real ranks meet is shown in `test_doctor`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_shard.doctor import rank_probe
from fsdp_shard.doctor.findings import OK, PROBLEM
from fsdp_shard.doctor.rank_probe import RankFacts, judge

_ONE = RankFacts("a", "GPU 0 (X)", {"torch": "2.13.0", "python": "3.11.9"}, {"/runs": True})


def test_ranks_that_are_alike() -> None:
    (finding,) = judge([_ONE, replace(_ONE, device="GPU 1 (X)"), replace(_ONE, host="b")], 1.25, 2e9)
    assert finding.mark == OK
    assert "3 ranks on 2 machines" in finding.text
    assert "met in 1.2 s" in finding.text
    assert "1.86 GiB/s" in finding.text


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(_ONE, host="b", versions={"torch": "2.12.0", "python": "3.11.9"}), "b has torch 2.12.0 instead of"),
        (replace(_ONE, host="b", versions={"torch": "2.13.0"}), "b has python none instead of 3.11.9"),
        (replace(_ONE, host="b", visible={"/runs": False}), "b does not see what a writes to /runs"),
        (_ONE, "two ranks use GPU 0 (X) of a"),
    ],
    ids=["version", "missing", "disk", "GPU"],
)
def test_what_keeps_ranks_from_working_together(other: RankFacts, said: str) -> None:
    first, last = judge([_ONE, other], 1.0, 1e9)
    assert first.mark == PROBLEM
    assert said in first.text
    assert last.mark == OK


def test_ranks_that_see_only_their_own_gpu_have_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun --gpus-per-task=1`: each GPU is number 0 of its rank. torch.cuda is stood in for."""
    seen = iter(("4f2a", "91c0"))
    found = lambda device: SimpleNamespace(name="X", uuid=next(seen))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", found)
    context: Any = SimpleNamespace(device=torch.device("cuda", 0))
    facts = [rank_probe._facts(context, {}) for _ in range(2)]
    assert [fact.device for fact in facts] == ["GPU 0 (X)"] * 2
    (finding,) = judge(facts, 1.0, 1e9)
    assert finding.mark == OK


def test_ranks_on_cores_share_a_device() -> None:
    cpu = replace(_ONE, device="cpu")
    (finding,) = judge([cpu, cpu], 1.0, 1e9)
    assert finding.mark == OK
