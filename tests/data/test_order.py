"""The order of samples: the same on any ranks and with any workers, cached and streamed, and from any sample on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.pipeline import prepare_on_ranks
from fsdp_shard.data.samples.protocol import Dataset
from fsdp_shard.distributed import DistributedContext
from tests.data.conftest import byte_tokenizer, positions_of_rank
from tests.support.ranks import on_ranks

NUM, BATCH, SEED, NUM_CUTS = 96, 12, 3, 300
CASES = [(kind, streaming) for kind in ("plain", "packed", "mixture") for streaming in (False, True)]


def write_rows(directory: Path, first: int, count: int) -> str:
    directory.mkdir(parents=True)
    for part in range(3):
        rows = [{"text": f"row {i} é " + "x" * (7 * i % 23)} for i in range(first + part, first + count, 3)]
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def config_of(directory: Path, kind: str, streaming: bool, workers: int = 1) -> DataConfig:
    given: dict[str, Any] = {"sequence_length": 24, "packing": kind != "plain", "workers": workers}
    given |= {"streaming": True, "shuffle_buffer": 10} if streaming else {"cache_dir": str(directory / "cache")}
    one = str(directory / "one")
    if kind == "mixture":
        mixture = {"one": {"path": one, "weight": 2}, "two": {"path": str(directory / "two")}}
        return DataConfig(path="", mixture=mixture, **given)
    return DataConfig(path=one, **given)


def sample(dataset: Dataset, position: int) -> Any:
    batch = dataset.batch([position])
    return [array.tolist() for array in (*batch.inputs.values(), batch.labels)]


def _samples(context: DistributedContext, configs: list[DataConfig]) -> list[tuple[dict[int, Any], list[Any]]]:
    """The samples of this rank by position, and the state after each global batch, of each config."""
    found = []
    for config in configs:
        dataset = prepare_on_ranks(config, byte_tokenizer, context, seed=SEED).train
        samples, states = dict[int, Any](), []
        for first in range(0, NUM, BATCH):
            dataset.prepare(first, BATCH)
            for position in positions_of_rank(first, BATCH, context.data_rank, context.num_data_ranks):
                samples[position] = sample(dataset, position)
            states.append(dataset.state_dict(first + BATCH))
        found.append((samples, states))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_rows(directory / "one", 0, 83)
    write_rows(directory / "two", 90, 47)
    return directory


@pytest.fixture(scope="module")
def alone(data: Path) -> Any:
    """What one rank gets, in one process."""
    return on_ranks(1, _samples, [config_of(data, *case) for case in CASES])[0]


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "workers"), [(2, 0), (3, 0), (4, 0), (1, 2), (2, 2), (3, 2), (4, 2)])
def test_any_ranks_and_workers(data: Path, alone: Any, tmp_path: Path, num_ranks: int, workers: int) -> None:
    (tmp_path / "one").symlink_to(data / "one")
    (tmp_path / "two").symlink_to(data / "two")  # a cache of its own
    ranks = on_ranks(num_ranks, _samples, [config_of(tmp_path, *case, workers) for case in CASES])
    for number, case in enumerate(CASES):
        samples, states = alone[number]
        of_ranks = [rank[number] for rank in ranks]
        assert {at: one for own, _ in of_ranks for at, one in own.items()} == samples, case
        assert all(others == states for _, others in of_ranks), case


def _resume(context: DistributedContext, config: DataConfig, cuts: list[int]) -> list[list[Any]]:
    """The samples of a global batch from each cut on, with the state of a run that was cut off there."""
    whole, again = (prepare_on_ranks(config, byte_tokenizer, context, seed=SEED).train for _ in range(2))
    states = [json.dumps(whole.state_dict(0))]
    for position in range(NUM):
        whole.prepare(position, 1)
        sample(whole, position)
        states.append(json.dumps(whole.state_dict(position + 1)))
    found = []
    for cut in cuts:
        again.load_state_dict(json.loads(states[cut]))
        again.prepare(cut, BATCH)
        found.append([sample(again, position) for position in range(cut, cut + BATCH)])
    return found


@pytest.mark.long
@pytest.mark.parametrize(("kind", "streaming"), CASES)
def test_from_any_sample_on(data: Path, alone: Any, kind: str, streaming: bool) -> None:
    samples = alone[CASES.index((kind, streaming))][0]
    cuts = random.Random(f"{kind} {streaming}").choices(range(NUM - BATCH), k=NUM_CUTS // 3)
    (found,) = on_ranks(1, _resume, config_of(data, kind, streaming), cuts)
    for cut, batch in zip(cuts, found, strict=True):
        assert batch == [samples[position] for position in range(cut, cut + BATCH)], cut
