"""Streams on real ranks: each row is tokenized on one of them, and the samples are those of one process, bit by bit.

`DIGESTS` are of the code in which every rank tokenized every row for itself; those of chats are newer, since answers
without text are left out. Where one changes, a stream that an earlier version saved goes on with other samples. Of a
new case, print `digest(...)` in `test_one_process`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds import running_text
from fsdp_shard.data.kinds.kind import plain_ids
from fsdp_shard.data.pipeline import TokenizedData, open_samples, prepare_on_ranks
from fsdp_shard.data.samples.protocol import Dataset
from fsdp_shard.data.streaming import block_reader, stream as stream_module
from fsdp_shard.data.task import SpecialTokens, Task
from fsdp_shard.data.tokenized.encoder import Encoder
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import DataError
from fsdp_shard.models import MASKED_LM
from tests.data.conftest import byte_tokenizer, positions_of_rank
from tests.data.streams import settle
from tests.support.ranks import on_ranks

NUM, BATCH, SEED = 120, 12, 3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"

# Name: model.task, data.kind and the settings of a stream.
CASES: dict[str, tuple[Task, dict[str, Any]]] = {
    "text": (Task(), {"sequence_length": 16}),
    "ordered": (Task(), {"sequence_length": 16, "shuffle_buffer": 1}),
    "packed": (Task(), {"sequence_length": 64, "packing": True}),
    "chat": (Task(), {"sequence_length": 48, "kind": "chat", "messages_column": "messages"}),
    "packed chat": (Task(), {"sequence_length": 96, "kind": "chat", "messages_column": "messages", "packing": True}),
    "instruction": (Task(), {"sequence_length": 64, "kind": "instruction"}),
    "masked": (Task(MASKED_LM), {"sequence_length": 16, "shuffle_buffer": 20}),
    "seq2seq": (Task("seq2seq", decoder_start=7, padding=9), {"kind": "pairs", "sequence_length": 12}),
    "classes": (
        Task("sequence_classification", num_labels=3, label_numbers={"high": 2, "low": 0}, padding=9),
        {"sequence_length": 12},
    ),
    "mixture": (Task(), {"sequence_length": 48, "shuffle_buffer": 6}),
    "packed mixture": (Task(), {"sequence_length": 96, "packing": True, "shuffle_buffer": 6}),
}

DIGESTS = {
    "text": "cde9652d68e08ce2",
    "ordered": "e16c7fb114c7ac31",
    "packed": "a63c58e3b13f6b78",
    "chat": "61aafecdcc279af7",
    "packed chat": "74a17aa7ffce738f",
    "instruction": "88ecc0a80a402e7a",
    "masked": "9480ae4f00a1b5d2",
    "seq2seq": "a39f2edc0d93b761",
    "classes": "75cdd88009cc2a45",
    "mixture": "06c8ba1d88948b1b",
    "packed mixture": "01e378fe68cfb00a",
}


def rows(directory: Path, first: int, count: int) -> str:
    """Write rows that every kind reads, some of them with nothing to learn, into two files."""
    directory.mkdir(exist_ok=True, parents=True)
    for part in range(2):
        lines = []
        for i in range(first + part * count // 2, first + (part + 1) * count // 2):
            word = "" if i % 11 == 5 else f"row {i} é " + "x" * (7 * i % 23)
            turns = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": word * (1 + i % 3)}]
            values = {"text": word, "source": f"from {i}", "target": word[:9], "label": "low" if i % 3 else "high"}
            asked = {"instruction": f"say {i}", "output": word, "messages": turns * (1 + i % 2)}
            lines.append(json.dumps(values | asked) + "\n")
        (directory / f"{part}.jsonl").write_text("".join(lines))
    return str(directory)


def tokenizer() -> Any:
    found = byte_tokenizer()
    found.add_special_tokens({"mask_token": "[MASK]"})
    found.chat_template = TEMPLATE
    return found


def config_of(directory: Path, name: str) -> tuple[DataConfig, Task]:
    task, settings = CASES[name]
    given: dict[str, Any] = {"path": rows(directory / "one", 0, 83), "streaming": True, "shuffle_buffer": 8, **settings}
    if "mixture" in name:
        chat = {"path": rows(directory / "two", 90, 47), "kind": "chat", "messages_column": "messages", "weight": 2}
        given |= {"path": "", "mixture": {"plain": {"path": given["path"], "weight": 3}, "chat": chat}}
    return DataConfig(**given), task


def open_alone(config: DataConfig, task: Task) -> Dataset:
    found = tokenizer()
    special = SpecialTokens.of(found) if task.name == MASKED_LM else None
    return open_samples(config, TokenizedData({}, {}, special), task, SEED, lambda: found).train


def sample(dataset: Dataset, index: int) -> Any:
    batch = dataset.batch([index])
    return [array.tolist() for array in (batch.input_ids, batch.labels, *list(batch.inputs.values())[1:])]


def place(state: Any) -> Any:
    """Leave out what a reader puts into its positions."""
    if isinstance(state, dict):
        return {key: place(value) for key, value in state.items() if key != "rows"}
    return state


def digest(samples: list[Any], states: list[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([samples, [place(state) for state in states]]).encode())


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    settle()


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows this process has read and tokenized from now on."""
    counts = {"read": 0, "tokenized": 0}
    read = block_reader.read_blocks

    def read_blocks(*args: Any) -> Iterator[Any]:
        for block in read(*args):
            counts["read"] += len(block.rows)
            yield block

    encode = Encoder.__call__

    def counting(self: Encoder, rows: Any) -> Any:
        counts["tokenized"] += len(rows)
        return encode(self, rows)

    monkeypatch.setattr(stream_module, "read_blocks", read_blocks)
    monkeypatch.setattr(Encoder, "__call__", counting)
    return counts


def train(dataset: Dataset, rank: int = 0, num_ranks: int = 1) -> tuple[dict[int, Any], list[Any]]:
    """The samples of one rank by index, and the state after each global batch."""
    samples, states = {}, []
    for first in range(0, NUM, BATCH):
        dataset.prepare(first, BATCH)
        for position in positions_of_rank(first, BATCH, rank, num_ranks):
            samples[position] = sample(dataset, position)
        states.append(dataset.state_dict(first + BATCH))
    return samples, states


@pytest.mark.parametrize("name", CASES)
def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    counts = counted(monkeypatch)
    samples, states = train(open_alone(*config_of(tmp_path, name)))
    assert digest([samples[index] for index in range(NUM)], states) == DIGESTS[name]
    settle()
    assert counts["tokenized"] == counts["read"]


def _train_all(context: DistributedContext, configs: dict[str, tuple[DataConfig, Task]]) -> dict[str, Any]:
    found = {}
    for name, (config, task) in configs.items():
        with pytest.MonkeyPatch.context() as patch:
            counts = counted(patch)
            dataset = prepare_on_ranks(config, tokenizer, context, task=task, seed=SEED).train
            samples, states = train(dataset, context.data_rank, context.num_data_ranks)
            settle()
        found[name] = samples, states, counts, dataset.identity, dataset.figures(NUM)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "tensor_parallel"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_each_row_is_tokenized_on_one_rank(tmp_path: Path, num_ranks: int, tensor_parallel: int) -> None:
    configs = {name: config_of(tmp_path / name, name) for name in CASES}
    ranks = on_ranks(num_ranks, _train_all, configs, tensor_parallel=tensor_parallel)
    for name in CASES:
        samples: dict[int, Any] = {}
        for own, *_ in (rank[name] for rank in ranks):
            assert all(samples.get(index, own[index]) == own[index] for index in own), name
            samples |= own
        of_ranks = [rank[name][1:] for rank in ranks]
        assert all(others[0] == of_ranks[0][0] and others[2:] == of_ranks[0][2:] for others in of_ranks), name
        assert digest([samples[index] for index in range(NUM)], of_ranks[0][0]) == DIGESTS[name], name
        num_read = {counts["read"] for _, counts, *_ in of_ranks}
        tokenized = [counts["tokenized"] for _, counts, *_ in of_ranks]
        assert num_read == {sum(tokenized)}, (name, tokenized)
        assert min(tokenized) > 0, (name, tokenized)


def test_one_exchange_ahead_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    path = rows(tmp_path / "many", 0, 3000)
    dataset = open_alone(
        DataConfig(path=path, sequence_length=64, streaming=True, shuffle_buffer=300, kind="instruction"), Task()
    )
    assert counts["read"] == 0
    for asked in (2, 3, 200):
        dataset.prepare(0, asked)
        settle()
        assert counts == {"read": 600, "tokenized": 600}
    dataset.prepare(200, 200)
    settle()
    assert counts["tokenized"] == 900


@pytest.mark.long
@pytest.mark.parametrize("name", ["text", "packed", "mixture", "packed mixture", "masked", "ordered"])
def test_it_goes_on_from_any_sample(tmp_path: Path, name: str) -> None:
    config, task = config_of(tmp_path, name)
    whole, again = open_alone(config, task), open_alone(config, task)
    expected, states = [], [whole.state_dict(0)]
    for index in range(NUM + BATCH):
        whole.prepare(index, 1)
        expected.append(sample(whole, index))
        states.append(json.loads(json.dumps(whole.state_dict(index + 1))))
    for cut in random.Random(name).choices(range(NUM), k=50):
        again.load_state_dict(states[cut])
        assert again.state_dict(cut) == states[cut]
        again.prepare(cut, BATCH)
        found = [sample(again, index) for index in range(cut, cut + BATCH)]
        assert found == expected[cut : cut + BATCH], cut
        assert again.state_dict(cut + BATCH) == states[cut + BATCH], cut


def _resume(context: DistributedContext, config: DataConfig, states: dict[int, Any]) -> dict[tuple[int, int], Any]:
    dataset = prepare_on_ranks(config, tokenizer, context, seed=SEED).train
    found = {}
    for cut, state in states.items():
        dataset.load_state_dict(state)
        dataset.prepare(cut, BATCH)
        for index in range(cut, cut + BATCH)[context.rank :: context.world_size]:
            found[cut, int(index)] = sample(dataset, int(index))
    return found


@pytest.mark.long
def test_it_goes_on_on_other_ranks(tmp_path: Path) -> None:
    config, task = config_of(tmp_path, "packed mixture")
    whole = open_alone(config, task)
    cuts = random.Random(1).sample(range(NUM), 20)
    expected, states = [], {}
    for index in range(NUM + BATCH):
        if index in cuts:
            states[index] = whole.state_dict(index)
        expected.append(sample(whole, index))
    found = {at: value for rank in on_ranks(3, _resume, config, states) for at, value in rank.items()}
    assert found == {(cut, index): expected[index] for cut in cuts for index in range(cut, cut + BATCH)}


def _fail(context: DistributedContext, config: DataConfig, other: Path | None) -> Any:
    if other is not None and context.rank == 1:
        config.path = str(other)
    num = 0
    try:
        dataset = prepare_on_ranks(config, tokenizer, context, seed=SEED).train
        while num < 10_000:
            dataset.prepare(num, BATCH)
            num += BATCH
    except DataError as error:
        return num, str(error)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bad", ['{"instruction": "a", "output": 7}', '{"instruction": "a"}', "no JSON"])
def test_a_bad_row_ends_all_ranks(tmp_path: Path, bad: str, workers: int) -> None:
    good = [json.dumps({"instruction": f"say {i}", "output": "x" * i}) for i in range(1, 1000)]
    (tmp_path / "a.jsonl").write_text("\n".join([*good[:800], bad, *good[800:]]))
    path, kind = str(tmp_path / "a.jsonl"), "instruction"
    config = DataConfig(path=path, sequence_length=64, kind=kind, streaming=True, shuffle_buffer=300)
    alone = open_alone(config, Task())
    alone.prepare(0, 600)
    with pytest.raises(DataError, match=r"a\.jsonl, line 801") as caught:
        alone.prepare(600, 1)
    config.workers = workers
    assert set(on_ranks(3, _fail, config, None)) == {(600, str(caught.value))}, "at the same sample"


def _kill_a_worker(context: DistributedContext, config: DataConfig) -> str:
    dataset = prepare_on_ranks(config, tokenizer, context, seed=SEED).train
    dataset.prepare(0, BATCH)
    try:  # torch may raise the error from a signal handler, at any moment from here on
        psutil.Process().children()[0].kill()
        for first in range(BATCH, 100_000, BATCH):
            dataset.prepare(first, BATCH)
    except (DataError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_killed_worker_is_an_error(tmp_path: Path) -> None:
    path = rows(tmp_path / "many", 0, 20_000)
    config = DataConfig(path=path, sequence_length=64, kind="instruction", streaming=True, workers=2)
    (message,) = on_ranks(1, _kill_a_worker, config)
    assert "data.workers=2" in message or "DataLoader worker" in message


ORPHANS = """
import psutil, sys
from pathlib import Path
from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.task import Task
from tests.data.test_stream_on_ranks import open_alone

config = DataConfig(path=sys.argv[1], sequence_length=64, kind="instruction", streaming=True, workers=2)
open_alone(config, Task()).prepare(0, 12)
print(*(child.pid for child in psutil.Process().children()), flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_workers_end_with_their_rank(tmp_path: Path) -> None:
    """Although more is ready than a pipe holds, which nobody reads once the rank is killed."""
    path = rows(tmp_path / "many", 0, 20_000)
    args = [sys.executable, "-c", ORPHANS, path]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(2)  # until both have parts ready
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive


@pytest.mark.parametrize("row", [0, 400])
def test_ranks_that_read_different_rows(tmp_path: Path, row: int) -> None:
    """From the first row on, or after the bytes that the identity covers, in a file of the same size."""
    for name, longer in {"a": row, "b": 999}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"text": "x" * (200 + (i == longer))}) + "\n" for i in range(1000)]
        (tmp_path / name / "0.jsonl").write_text("".join(lines))
    config = DataConfig(path=str(tmp_path / "a"), sequence_length=64, streaming=True, shuffle_buffer=300)
    one, two = on_ranks(2, _fail, config, tmp_path / "b")
    assert (one[0], one[0] > 0) == (two[0], row > 0)
    for _, message in (one, two):
        assert "between the machines of this run. Give all of them the same" in message


def test_streams_of_a_mixture_use_their_tokenizer_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not safe in several threads, as a call may change its settings."""
    users, at_once = list[int](), list[int]()

    def noted(texts: list[str], tokenizer: Any) -> Any:
        users.append(1)
        at_once.append(len(users))
        time.sleep(0.01)
        users.pop()
        return plain_ids(texts, tokenizer)

    mixture = {name: {"path": rows(tmp_path / name, 0, 400)} for name in "abcd"}
    config = DataConfig(path="", sequence_length=64, mixture=mixture, streaming=True, shuffle_buffer=50)
    dataset = open_alone(config, Task())
    monkeypatch.setattr(running_text, "plain_ids", noted)
    dataset.prepare(0, 40)
    settle()
    assert len(at_once) >= 8
    assert max(at_once) == 1


END = """
import sys, time, pyarrow
from fsdp_shard.data.streaming.block_reader import RowBlock, encode_blocks
from fsdp_shard.data.sources.row import Row

def encode(rows):
    time.sleep(0.05)
    print(len(rows), flush=True)
    return pyarrow.table({"tokens": pyarrow.array([0] * len(rows), pyarrow.int64())})

ahead = RowBlock([Row("here", {"text": "x" * (1 << 20)})] * 400, None, False)
next(encode_blocks("name", iter([RowBlock([], None, True)] * 300 + [ahead]), encode, None))
raise SystemExit("the main thread ends")
"""


def test_a_process_that_ends_tokenizes_no_further() -> None:
    ended = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "the main thread ends\n")
    assert len(ended.stdout.splitlines()) < 400
