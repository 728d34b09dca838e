"""What hypothesis makes of sound files, format by format: a clear error or none, in bounded time, without harm."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.faults.counts import count
from tests.faults.fuzz.formats import FORMATS, Ops, encode, examples
from tests.faults.harness.outcome import BAD
from tests.faults.harness.warm_process import Job, WarmProcess
from tests.faults.saves import LONG

pytestmark = pytest.mark.skipif(not LONG, reason="takes minutes, in the long form; what it found is in the corpus")

_NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))  # of each format


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    process = WarmProcess(tmp_path_factory.mktemp("fuzz") / "warm")
    yield process
    process.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_no_change_of_a_sound_file_is_unforeseen(name: str, warm: WarmProcess) -> None:
    @settings(
        max_examples=_NUM_EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(examples(name))
    def check(example: tuple[int, Ops, str]) -> None:
        number, ops, command = example
        commands = list(dict.fromkeys(["open", "verify", command]))
        job = Job("fuzz", encode(name, number, ops), commands)
        (outcomes,) = warm.run([job])
        bad = [(kind, one.command, one.describe()) for one in outcomes if (kind := one.classify(job.case)) in BAD]
        count(f"changes of {name}", failed=bool(bad), times=len(commands))
        assert bad == []

    check()
