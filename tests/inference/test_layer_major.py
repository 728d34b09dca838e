"""Layer-major order: results equal bit for bit, each streamed block read once a wave, and nothing left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fsdp_shard.errors import ConfigError, PlanError, RunError
from fsdp_shard.inference import available_memory
from fsdp_shard.inference.batch_schedule import Schedule, plan_schedule, stream_of
from fsdp_shard.inference.config import DispatchConfig
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.inference.offload.hidden_state_file import HiddenStateFile
from fsdp_shard.inference.offload.layer_major import run_wave
from fsdp_shard.models import no_split_blocks
from fsdp_shard.utils import check
from tests.inference.families import inputs, random_model, settings

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "mixtral", "t5")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save a small random model of a family, once."""
    root = tmp_path_factory.mktemp("layer-major")

    def save(family: str) -> Path:
        if not (root / family).exists():
            random_model(family).save_pretrained(root / family)
        return root / family

    return save


def batches(model: PreTrainedModel, count: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of different contents and, as padding is masked, of different lengths."""
    found = []
    for number in range(count):
        given = {name: value.roll(number, -1) for name, value in inputs(model).items()}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, 9 - number :] = 0
        found.append(given)
    return found


def logits(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(**given, use_cache=False).logits
        return found.clone()


def passes(model: PreTrainedModel, count: int) -> list[Callable[[], torch.Tensor]]:
    return [partial(logits, model, given) for given in batches(model, count)]


def num_threads() -> int:
    return sum(thread.name == "fsdp-shard-pass" for thread in threading.enumerate())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wanted", ["disk", "auto in less", "sequential"])
def test_results_are_equal_bit_for_bit_and_blocks_are_read_once(
    saved: Callable[[str], Path], family: str, wanted: str
) -> None:
    path = saved(family)
    blocks = no_split_blocks(random_model(family))
    model = load_dispatched(path, **settings(wanted, blocks))
    stream = stream_of(model)
    assert stream is not None
    expected = [one() for one in passes(model, 5)]
    fresh = load_dispatched(path, **settings(wanted, blocks))
    stream = stream_of(fresh)
    assert stream is not None
    found = list(run_wave(stream, passes(fresh, 5)))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert stream.num_fetches == stream.num_blocks
    assert stream.num_bytes_fetched == stream.num_bytes
    assert num_threads() == 0
    assert torch.equal(passes(fresh, 1)[0](), expected[0])  # and the model runs as before


def test_each_wave_reads_the_weights_once(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_dispatched(saved("llama"), "disk")
    stream = stream_of(model)
    assert stream is not None
    expected = [one() for one in passes(model, 7)]
    stream.num_fetches = 0
    schedule = Schedule("layer_major", 7, stream.num_blocks, stream.num_bytes, waves=(3, 3, 1))
    found = list(schedule.run(model, passes(model, 7), tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert stream.num_fetches <= 3 * stream.num_blocks


@pytest.mark.long
def test_hidden_states_in_a_file_are_the_same(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def long(model: PreTrainedModel, number: int) -> torch.Tensor:
        ids = torch.randint(131, (32, 60), generator=torch.Generator().manual_seed(number))
        return logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril(30)})

    for family in ("llama", "gemma3", "gpt2"):
        model = load_dispatched(saved(family), "disk")
        stream = stream_of(model)
        assert stream is not None
        expected = [long(model, number) for number in range(4)]
        work = [partial(long, model, number) for number in range(4)]
        with HiddenStateFile(tmp_path) as file:
            found = list(run_wave(stream, work, embeddings=model.get_input_embeddings(), file=file))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert file.num_bytes_moved >= 4 * 3 * 32 * 60 * 24 * model.dtype.itemsize
        schedule = Schedule("layer_major", 4, stream.num_blocks, stream.num_bytes, waves=(4,), to_file=True)
        found = list(schedule.run(model, work, tmp_path))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not list(tmp_path.iterdir())


def test_the_file_takes_what_only_one_tensor_uses(tmp_path: Path) -> None:
    shared = torch.randn(300, 200)
    view = shared[1:]
    with HiddenStateFile(tmp_path) as file, torch.inference_mode():
        file.move([{"a": (shared,)}, torch.ones(3), None])
        assert file.num_bytes_moved == 0
        alone = torch.randn(400, 150)
        expected = alone.clone()
        file.move([alone, alone])
        assert torch.equal(alone, expected)
        assert file.num_bytes_moved == alone.nbytes
        del alone
        again = expected.clone()
        file.move(again)  # where the other was
        assert torch.equal(again, expected)
    del again
    shared.zero_()
    assert not view.any()


@pytest.mark.parametrize("at", ["the start", "the end"])
def test_an_error_in_one_pass_ends_all(saved: Callable[[str], Path], at: str) -> None:
    model = load_dispatched(saved("llama"), "disk")
    stream = stream_of(model)
    assert stream is not None

    def fail() -> torch.Tensor:
        if at == "the end":
            passes(model, 1)[0]()
        raise OSError("the disk is gone")

    work = passes(model, 4)
    expected = [one() for one in work]
    wave = run_wave(stream, [*work[:2], fail, *work[2:]])
    found: list[torch.Tensor] = []
    with pytest.raises(OSError, match="disk is gone"):
        found.extend(wave)
    assert num_threads() == 0
    assert torch.equal(work[3](), expected[3])
    assert all(torch.equal(one, other) for one, other in zip(run_wave(stream, work), expected, strict=True))


def test_results_are_given_before_a_later_pass_fails(saved: Callable[[str], Path]) -> None:
    model = load_dispatched(saved("llama"), "disk")
    stream = stream_of(model)
    assert stream is not None

    def fail() -> torch.Tensor:
        passes(model, 1)[0]()
        raise ValueError("late")

    wave = run_wave(stream, [*passes(model, 2), fail, *passes(model, 1)])
    assert len([next(wave), next(wave)]) == 2
    with pytest.raises(ValueError, match="late"):
        next(wave)
    assert num_threads() == 0


def test_ctrl_c_ends_all(saved: Callable[[str], Path]) -> None:
    model = load_dispatched(saved("llama"), "disk")
    stream = stream_of(model)
    assert stream is not None

    def interrupted() -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)  # which reaches the main thread, as that of a terminal does
        return passes(model, 1)[0]()

    expected = [one() for one in passes(model, 2)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            list(run_wave(stream, [*passes(model, 2), interrupted, *passes(model, 2)]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert num_threads() == 0
    assert all(torch.equal(one, other) for one, other in zip(run_wave(stream, passes(model, 2)), expected, strict=True))


def test_whoever_stops_taking_results_ends_all(saved: Callable[[str], Path]) -> None:
    model = load_dispatched(saved("llama"), "disk")
    stream = stream_of(model)
    assert stream is not None
    wave = run_wave(stream, passes(model, 3))
    next(wave)
    with pytest.raises(RunError, match="one pass at a time"):
        passes(model, 1)[0]()  # meanwhile
    wave.close()
    assert num_threads() == 0
    passes(model, 1)[0]()


def test_a_block_within_a_block_and_a_block_that_runs_twice() -> None:
    """Weights stay as long as a pass is inside the block."""
    from tests.inference.recorded_stream import Recorder

    recorder = Recorder(4, 1)
    first, second, third, _ = recorder.modules
    second.register_forward_pre_hook(lambda module, args: (args[0] * 0 * third(args[0]) + 1,))

    def work() -> list[float]:
        return [float(module(torch.ones(1, 2))[0, 0] / 2) for module in (first, second, third, first, first)]

    assert list(run_wave(recorder.stream, [work] * 3)) == [[0.0, 1.0, 2.0, 0.0, 0.0]] * 3
    assert all(module.weight.is_meta for module in recorder.modules)


def plan(model: PreTrainedModel, count: int, schedule: str = "auto") -> Schedule:
    return plan_schedule(model, DispatchConfig(schedule=schedule), [(2, 9)] * count)


def test_the_cheaper_order_is_chosen_and_told(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_dispatched(saved("llama"), "disk")
    chosen = plan(model, 8)
    assert (chosen.name, chosen.waves, chosen.to_file) == ("layer_major", (8,), False)
    assert "read once for 8 batches, whose hidden states are in memory" in chosen.describe()
    assert plan(model, 1).name == "batch_major"
    assert plan(model, 1, "layer_major").waves == (1,)
    kept = plan(model, 8, "batch_major")
    assert kept.name == "batch_major"
    assert "read for each of 8 batches" in kept.describe()
    # Memory for two batches, whose hidden states are small next to the weights: a file is written and read.
    spilled = plan_schedule(model, DispatchConfig(), [(1, 2)] * 8, 2 * 2 * 2 * (2 * 24 + 2))
    assert (spilled.waves, spilled.to_file) == ((8,), True)
    assert "in a temporary file of run_dir" in spilled.describe()
    # Without the disk for that, or with few threads, waves; with the memory of as many ranks, smaller ones.
    monkeypatch.setattr(available_memory, "free_disk_bytes", lambda directory: 100)
    without = plan_schedule(model, DispatchConfig(), [(1, 2)] * 8, 2 * 2 * 2 * (2 * 24 + 2), directory=tmp_path)
    assert (without.waves, without.to_file) == ((2, 2, 2, 2), False)
    monkeypatch.setattr(available_memory, "free_threads", lambda: 2 * 3 * torch.get_num_threads())
    assert plan(model, 8).waves == (3, 3, 2)
    assert plan_schedule(model, DispatchConfig(), [(2, 9)] * 8, num_ranks=3).name == "batch_major"
    # Where they are large, waves.
    large = plan_schedule(model, DispatchConfig(), [(64, 60)] * 8, 2 * 64 * 60 * 2 * (2 * 24 + 60))
    assert (large.waves, large.to_file) == ((2, 2, 2, 2), False)
    assert "read in each of 4 waves" in large.describe()


def test_a_wave_on_a_gpu_keeps_its_budget_with_the_workspace_of_each_thread(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_dispatched(saved("llama"), "disk")
    stream = stream_of(model)
    assert stream is not None
    monkeypatch.setattr(stream, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * (130 << 20), 1 << 40))
    assert plan(model, 8).waves == (4, 4)  # 32 MiB a thread of 130
    settings = DispatchConfig(max_memory={0: f"{4 * 65}MiB", "cpu": "1GiB"})
    assert plan_schedule(model, settings, [(2, 9)] * 8).waves == (2, 2, 2, 2)


def test_it_is_an_error_where_it_has_no_effect(saved: Callable[[str], Path]) -> None:
    resident = load_dispatched(saved("llama"), "cpu")
    assert plan(resident, 8).name == "batch_major"
    assert plan(resident, 8).describe() == ""
    with pytest.raises(PlanError, match="layer_major is for models with streamed blocks"):
        plan(resident, 8, "layer_major")
    for config, text in (
        (DispatchConfig("cpu", schedule="layer_major"), "no block is streamed"),
        (DispatchConfig(quantize="int8", schedule="batch_major"), "has no effect with quantize=int8|torchao"),
        (DispatchConfig(schedule="rows"), "batch_major"),
    ):
        with pytest.raises(ConfigError, match=text):
            check(config)
