"""The corpus of damaged and hostile files through the commands: a clear error or rightly accepted, and no harm.

In `make faults`, each case goes through all commands, each in a child of its own, and the table by class is printed.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.corpus import pickles
from tests.faults.corpus.case import Case, all_cases, cases, subjects
from tests.faults.harness.commands import READERS
from tests.faults.harness.outcome import BAD, GOOD, WALL_SECONDS, Outcome
from tests.faults.harness.warm_process import WarmProcess
from tests.faults.saves import LONG

pytestmark = pytest.mark.skipif(not LONG, reason="some cases end in unforeseen errors still; make faults shows them")

_TABLE: dict[str, Counter[str]] = {}
_ALWAYS = ("open", "inspect", "verify")


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    process = WarmProcess(tmp_path_factory.mktemp("corpus") / "warm")
    yield process
    process.close()


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    if LONG and _TABLE:
        print("\n" + "\n".join(table(_TABLE)))


def table(counts: dict[str, Counter[str]]) -> list[str]:
    """A Markdown table of runs by class, a row for each file of the corpus."""
    classes = [*GOOD, *BAD]
    rows = [["subject", "cases", *classes]]
    for subject, found in sorted(counts.items()):
        rows.append([subject, str(len(cases(subject))), *(str(found[name]) for name in classes)])
    total = sum(counts.values(), Counter[str]())
    num_cases = sum(len(cases(subject)) for subject in counts)
    rows.append(["all", str(num_cases), *(str(total[name]) for name in classes)])
    rows.insert(1, ["---"] * len(rows[0]))
    return [f"| {' | '.join(row)} |" for row in rows]


def _chosen(case: Case, number: int, every: list[str]) -> list[str]:
    """The commands of the short form; of a case that must be refused, one that must refuse it is among them."""
    if LONG:
        return every
    able = READERS[case.damages] if case.expect == "error" else every
    others = [name for name in able if name not in _ALWAYS] or [*able]
    return list(dict.fromkeys([*_ALWAYS, others[number % len(others)]]))


def _run(warm: WarmProcess, subject: str, case: Case, chosen: list[str]) -> list[Outcome]:
    if not LONG:
        return warm.run(subject, case.name, chosen)
    return [outcome for command in chosen for outcome in warm.run(subject, case.name, [command])]


@pytest.mark.timeout(1500 if LONG else 300)
@pytest.mark.parametrize("subject", subjects())
def test_every_case_is_refused_or_rightly_accepted(subject: str, warm: WarmProcess) -> None:
    counts, bad = _TABLE.setdefault(subject, Counter()), []
    for number, case in enumerate(cases(subject).values()):
        for outcome in _run(warm, subject, case, _chosen(case, number, list(warm.healthy))):
            kind = outcome.classify(case, warm.root)
            counts[kind] += 1
            if kind in BAD:
                bad.append(f"{kind}: {case.name}, {outcome.command}: {outcome.harm} {outcome.error or outcome.said}")
    assert bad == [], f"{len(bad)} of {sum(counts.values())} runs\n" + "\n".join(bad)


def test_the_canary_sings_where_it_is_loaded(tmp_path: Path) -> None:
    pickle.loads(pickles.pickles(tmp_path / "canary")["protocol 2"])
    assert (tmp_path / "canary").exists()


def test_the_corpus_covers_every_format() -> None:
    assert len(list(all_cases())) >= 300


def test_a_sound_model_passes_within_the_limits(warm: WarmProcess, tmp_path: Path) -> None:
    assert max(warm.healthy.values()) < WALL_SECONDS
    (outcome,) = warm.run("config_files", "an unknown key", ["generate"])
    assert outcome.status == 0
    assert outcome.cpu_seconds < 1
