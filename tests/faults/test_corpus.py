"""The corpus of damaged and hostile files through the commands: a clear error or rightly accepted, and no harm.

In `make check` each case goes through one command, which changes from case to case; in `make faults` through all, and
the table by class is printed.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.faults.corpus import pickles
from tests.faults.corpus.case import Case, all_cases, cases, subjects
from tests.faults.harness.commands import READERS, SLOW
from tests.faults.harness.outcome import BAD, GOOD, GROWTH_BYTES, Outcome, cpu_budget
from tests.faults.harness.warm_process import Job, WarmProcess
from tests.faults.saves import LONG

_TABLE: dict[str, Counter[str]] = {}
_AT_ONCE = 1 if LONG else 8  # cases in one child
_NUM_PROCESSES = 2 if LONG else 1  # the short form runs beside other tests


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WarmProcess]]:
    root = tmp_path_factory.mktemp("corpus")
    processes = [WarmProcess(root / f"warm-{number}") for number in range(_NUM_PROCESSES)]
    yield processes
    for process in processes:
        process.close()


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    if LONG and _TABLE:
        print("\n" + "\n".join(table(_TABLE)))


def table(counts: dict[str, Counter[str]]) -> list[str]:
    """A Markdown table of runs by class, a row for each file of the corpus."""
    classes = [*GOOD, *BAD]
    rows = [["files", "cases", *classes]]
    for subject, found in sorted(counts.items()):
        rows.append([subject.replace("_", " "), str(len(cases(subject))), *(str(found[name]) for name in classes)])
    total = sum(counts.values(), Counter[str]())
    num_cases = sum(len(cases(subject)) for subject in counts)
    rows.append(["all", str(num_cases), *(str(total[name]) for name in classes)])
    rows.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _chosen(case: Case, number: int, every: list[str]) -> list[str]:
    """The commands of the short form; of a case that must be refused, one that must refuse it."""
    if LONG:
        return every
    able = list(READERS[case.damages] if case.expect == "error" else every)
    quick = [name for name in able if name not in SLOW]
    able = able if number % 5 == 0 or not quick else quick
    return [able[number % len(able)]]


def _run(jobs: list[Job], idle: SimpleQueue[WarmProcess]) -> list[list[Outcome]]:
    process = idle.get()
    try:
        return process.run(jobs)
    finally:
        idle.put(process)


@pytest.mark.long
@pytest.mark.timeout(1500 if LONG else 300)
@pytest.mark.parametrize("subject", subjects())
def test_every_case_is_refused_or_rightly_accepted(subject: str, warm: list[WarmProcess]) -> None:
    found, every = cases(subject), list(warm[0].healthy)
    jobs = [Job(subject, name, _chosen(case, n, every)) for n, (name, case) in enumerate(found.items())]
    parts = [jobs[start : start + _AT_ONCE] for start in range(0, len(jobs), _AT_ONCE)]
    idle: SimpleQueue[WarmProcess] = SimpleQueue()
    for process in warm:
        idle.put(process)
    counts, bad = _TABLE.setdefault(subject, Counter()), []
    with ThreadPoolExecutor(len(warm)) as pool:
        ended = [outcomes for part in pool.map(lambda part: _run(part, idle), parts) for outcomes in part]
    for job, outcomes in zip(jobs, ended, strict=True):
        assert [outcome.command for outcome in outcomes] == list(job.commands)
        for outcome in outcomes:
            kind = outcome.classify(found[job.name])
            counts[kind] += 1
            if kind in BAD:
                bad.append(f"{kind}: {job.name}, {outcome.command}: {outcome.describe()}")
    assert bad == [], f"{len(bad)} of {sum(counts.values())} runs\n" + "\n".join(bad)


def test_the_canary_sings_where_it_is_loaded(tmp_path: Path) -> None:
    pickle.loads(pickles.pickles(tmp_path / "canary")["protocol 2"])
    assert (tmp_path / "canary").exists()


def test_the_corpus_covers_every_format() -> None:
    assert len(list(all_cases())) >= 300


@pytest.mark.long
def test_the_limits_are_far_above_what_a_sound_model_takes(warm: list[WarmProcess]) -> None:
    ((outcome,),) = warm[0].run([Job("sound", "model", ["generate"])])
    assert outcome.status == 0
    assert outcome.cpu_seconds < cpu_budget() / 4
    assert outcome.growth_bytes < GROWTH_BYTES / 2
