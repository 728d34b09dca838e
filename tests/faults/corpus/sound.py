"""Every sound checkpoint that cases damage, undamaged: all commands do with it what they should."""

from __future__ import annotations

from tests.faults.corpus.bases import BASES, damaged
from tests.faults.corpus.case import Case

CASES = [Case(name, damaged(name, lambda root: None), expect="accepted") for name in BASES]
