"""The device map planner: a pure function of blocks and budgets."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device, parse_budgets
from fsdp_shard.inference.device_map.device_plan import DevicePlan
from fsdp_shard.inference.device_map.strategies import plan_device_map
from fsdp_shard.models import Block


def block(fqn: str, num_bytes: int, *, direct: bool = False) -> Block:
    return Block(fqn, "Layer", num_bytes, num_bytes, repeated=True, direct=direct)


def layers(*sizes: int) -> list[Block]:
    return [block(f"layers.{number}", size) for number, size in enumerate(sizes)]


def places(plan: DevicePlan) -> list[Device]:
    return list(plan.devices.values())


MODEL = [block("embed", 40), *layers(10, 10, 10, 10), block("norm", 1), block("head", 0)]
TIES = [["embed", "head"]]


def test_everything_on_the_cpu_when_it_fits() -> None:
    plan = plan_device_map(MODEL, "auto", {"cpu": 81}, ties=TIES)
    assert places(plan) == ["cpu"] * 7
    assert (plan.execution_device, plan.buffer_bytes, plan.resident_bytes) == ("cpu", 0, {"cpu": 81})


def test_what_does_not_fit_is_on_disk_and_the_buffer_has_room() -> None:
    plan = plan_device_map(MODEL, "auto", {"cpu": 72}, ties=TIES)
    assert plan.devices == {
        "embed": "cpu",
        "layers.0": "cpu",
        "layers.1": "cpu",
        "layers.2": "disk",
        "layers.3": "disk",
        "norm": "cpu",
        "head": "cpu",
    }
    assert plan.buffer_bytes == 10
    assert plan.resident_bytes["cpu"] + plan.buffer_bytes <= 72


def test_sequential_fills_each_gpu_and_auto_shares_evenly() -> None:
    blocks = layers(*[10] * 6)
    budgets: dict[int | str, int] = {0: 50, 1: 50, "cpu": 100}
    assert places(plan_device_map(blocks, "sequential", budgets)) == [0, 0, 0, 0, 0, 1]
    assert places(plan_device_map(blocks, "auto", budgets)) == [0, 0, 0, 1, 1, 1]
    assert plan_device_map(blocks, "balanced", budgets) == plan_device_map(blocks, "auto", budgets)


def test_gpus_then_cpu_then_disk_and_room_for_what_is_streamed() -> None:
    plan = plan_device_map(layers(*[10] * 8), "auto", {0: 30, 1: 20, "cpu": 20})
    assert places(plan) == [0, 0, 1, 1, "cpu", "disk", "disk", "disk"]
    assert (plan.execution_device, plan.buffer_bytes, plan.staging_bytes) == (0, 10, 10)
    assert [plan.is_streamed(fqn) for fqn in plan.devices] == [False] * 4 + [True] * 4


def test_what_goes_from_disk_to_a_gpu_takes_cpu_memory_too() -> None:
    blocks = layers(*[10] * 8)
    plan = plan_device_map(blocks, "auto", {0: 40, "cpu": 40}, prefetch=1)
    assert places(plan) == [0, 0, "cpu", "cpu", "disk", "disk", "disk", "disk"]
    assert (plan.prefetch, plan.buffer_bytes, plan.staging_bytes) == (1, 20, 20)
    assert "20 B on cpu for what is read from disk" in plan.describe()
    assert plan_device_map(blocks, "auto", {0: 40, "cpu": 60}, prefetch=1).staging_bytes == 0
    assert plan_device_map(blocks, "auto", {"cpu": 40}, prefetch=1).staging_bytes == 0
    assert plan_device_map(blocks, "disk", {0: 40, "cpu": 10}, prefetch=1).prefetch == 0
    with pytest.raises(
        PlanError, match=r"needs 10 B on cpu, where max_memory gives 5 B: .* Give cpu: 1KiB, or more\.$"
    ):
        plan_device_map(blocks, "auto", {0: 40, "cpu": 5})


def test_a_gpu_that_is_full_is_not_gone_back_to() -> None:
    assert places(plan_device_map(layers(10, 30, 10), "sequential", {0: 25, 1: 40})) == [0, 1, 1]


def test_blocks_with_tied_parameters_stay_together() -> None:
    plan = plan_device_map(MODEL, "sequential", {0: 60, 1: 30}, ties=TIES)
    assert plan.devices["embed"] == plan.devices["head"] == 0
    assert plan.devices["norm"] == 1


def test_cpu_and_disk_put_everything_there() -> None:
    assert set(places(plan_device_map(MODEL, "cpu", {0: 100, "cpu": 81}))) == {"cpu"}
    plan = plan_device_map(MODEL, "disk", {"cpu": 40}, ties=TIES)
    assert (set(places(plan)), plan.buffer_bytes) == ({"disk"}, 40)


def test_parameters_beside_the_layers_are_never_streamed() -> None:
    blocks = [block("", 3, direct=True), *layers(10, 10)]
    assert plan_device_map(blocks, "disk", {"cpu": 13}).devices[""] == "cpu"
    assert plan_device_map(blocks, "auto", {"cpu": 13}).devices == {"": "cpu", "layers.0": "disk", "layers.1": "disk"}
    assert plan_device_map(blocks, {"": "disk"}, {}).devices[""] == "cpu"


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_parameters_beside_the_layers_are_where_the_inputs_are(strategy: str) -> None:
    last = block("norms", 40, direct=True)
    plan = plan_device_map([*layers(100, 100, 100), last], strategy, {0: 250, 1: 250})
    assert (plan.execution_device, plan.devices["norms"]) == (0, 0)
    assert set(plan.devices.values()) == {0, 1}, "nothing is streamed"


def test_a_mapping_takes_the_longest_name_and_tied_blocks_follow() -> None:
    mapping: dict[str, Device] = {"embed": "cpu", "layers": "disk", "layers.1": "cpu", "norm": "cpu"}
    plan = plan_device_map(MODEL, mapping, {}, ties=TIES)
    assert places(plan) == ["cpu", "disk", "cpu", "disk", "disk", "cpu", "cpu"]
    assert plan.execution_device == "cpu"
    assert plan_device_map(MODEL, {"": "disk", "layers.0": 3}, {}, ties=TIES).execution_device == 3


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"layers": "cpu"}, "names no device for embed, head"),
        ({"": "cpu", "layers.0.mlp": "disk"}, r"would divide the block layers\.0"),
        ({"": "cpu", "layer.0": "disk"}, r"not a module with parameters \(did you mean layers\.0\?\)"),
        ({"": "cpu", "head": "disk"}, "share tied parameters"),
    ],
)
def test_mappings_that_cannot_be(mapping: dict[str, Device], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan_device_map(MODEL, mapping, {}, ties=TIES)


def test_the_budget_of_a_mapping_is_kept() -> None:
    with pytest.raises(PlanError, match="needs 50 B on cpu, where max_memory gives 45 B: 5 B too little"):
        plan_device_map(MODEL[:3], {"embed": "cpu", "layers": "disk"}, {"cpu": 45})


@pytest.mark.parametrize("strategy", ["auto", "sequential", "disk", "cpu"])
def test_too_small_says_by_how_much_and_what_would_fit(strategy: str) -> None:
    blocks = [block("embed", 113_246_208), *layers(*[14_160_384] * 3)]
    with pytest.raises(PlanError) as caught:
        plan_device_map(blocks, strategy, {"cpu": 100_000_000})
    message = str(caught.value)
    lacking = {"cpu": "53.1 MiB too little"}.get(strategy, "12.6 MiB too little")
    assert lacking in message
    enough = re.search(r"Give cpu: (\w+)", message)
    assert enough is not None
    plan_device_map(blocks, strategy, parse_budgets({"cpu": enough[1]}) or {})


def test_blocks_ahead_take_at_most_half_of_the_memory() -> None:
    blocks = layers(*[10] * 10)
    roomy = plan_device_map(blocks, "auto", {"cpu": 60}, prefetch=2)
    assert (roomy.prefetch, roomy.buffer_bytes, roomy.resident_bytes["cpu"]) == (2, 30, 30)
    tight = plan_device_map(blocks, "auto", {"cpu": 45}, prefetch=2)
    assert (tight.prefetch, tight.buffer_bytes, tight.resident_bytes["cpu"]) == (1, 20, 20)
    assert plan_device_map(blocks, "auto", {"cpu": 15}, prefetch=2).prefetch == 0
    assert plan_device_map(blocks, "disk", {"cpu": 25}, prefetch=2).prefetch == 1
    assert plan_device_map(blocks, {"": "disk"}, {}, prefetch=2).prefetch == 2
    assert plan_device_map(blocks[:2], {"": "disk"}, {}, prefetch=2).prefetch == 1


def test_room_is_kept_for_keys_and_values_where_they_are_computed() -> None:
    blocks, cache = layers(*[10] * 4), {f"layers.{number}": 3 for number in range(4)}
    assert set(places(plan_device_map(blocks, "auto", {"cpu": 52}, cache_bytes=cache))) == {"cpu"}
    less = plan_device_map(blocks, "auto", {"cpu": 51}, cache_bytes=cache)
    assert places(less) == ["cpu", "cpu", "disk", "disk"]
    assert (less.cache_bytes, less.buffer_bytes) == ({"cpu": 12}, 10)
    assert "12 B on cpu for the KV cache" in less.describe()
    shared = plan_device_map(blocks, "sequential", {0: 35, 1: 30}, cache_bytes=cache)
    assert (places(shared), shared.cache_bytes) == ([0, 0, 1, 1], {0: 6, 1: 6})
    streamed = plan_device_map(blocks, "sequential", {0: 42, "cpu": 40}, cache_bytes=cache)
    assert (places(streamed), streamed.cache_bytes) == ([0, 0, "cpu", "cpu"], {0: 12})
    with pytest.raises(PlanError, match=r"12 B of it for the KV cache: 2 B too little. Give cpu: 22 B|22"):
        plan_device_map(blocks, "auto", {"cpu": 20}, cache_bytes=cache)
    with pytest.raises(PlanError, match="12 B too little"):
        plan_device_map(blocks, "cpu", {"cpu": 40}, cache_bytes=cache)


def test_the_first_gpu_is_left_as_empty_as_can_be() -> None:
    blocks = layers(*[10] * 6)
    budgets: dict[int | str, int] = {0: 50, 1: 40, 2: 40, "cpu": 100}
    assert places(plan_device_map(blocks, "balanced", budgets)) == [0, 0, 1, 1, 2, 2]
    assert places(plan_device_map(blocks, "balanced_low_0", budgets)) == [1, 1, 1, 2, 2, 2]
    assert places(plan_device_map(layers(*[10] * 10), "balanced_low_0", budgets)) == [0, 0, *[1] * 4, *[2] * 4]
    assert places(plan_device_map(blocks, "balanced_low_0", {0: 30, "cpu": 40}))[:2] == [0, 0]


SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=12)
BUDGETS = st.dictionaries(st.sampled_from([0, 1, 2, "cpu"]), st.integers(1, 600), min_size=1)


@settings(max_examples=200, deadline=None)
@given(SIZES, BUDGETS, st.sampled_from(["auto", "sequential"]), st.data())
def test_every_plan_keeps_every_budget(
    sizes: list[int], budgets: dict[Device, int], strategy: str, data: st.DataObject
) -> None:
    blocks = layers(*sizes)
    tied = data.draw(st.lists(st.sampled_from([b.fqn for b in blocks]), max_size=3, unique=True))
    execution_device = min((device for device in budgets if device != "cpu"), default="cpu")
    try:
        plan = plan_device_map(blocks, strategy, budgets, ties=[tied] if len(tied) > 1 else [])
    except PlanError:
        assert budgets[execution_device] < max(sizes) or budgets.get("cpu", sys.maxsize) < max(sizes)
        return
    assert list(plan.devices) == [b.fqn for b in blocks]
    assert len({plan.devices[fqn] for fqn in tied}) <= 1
    for device, budget in budgets.items():
        held = sum(b.num_bytes for b in blocks if plan.devices[b.fqn] == device)
        assert held == plan.resident_bytes.get(device, 0)
        buffers = plan.buffer_bytes if device == plan.execution_device else plan.staging_bytes if device == "cpu" else 0
        assert held + buffers <= budget
    streamed = [b.num_bytes for b in blocks if plan.is_streamed(b.fqn)]
    assert plan.buffer_bytes >= max(streamed, default=0)
    assert set(plan.devices.values()) <= {*budgets, "disk"}
