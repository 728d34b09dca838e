"""Zips, pickles and streams of torch.save. Those of tests/checkpoint."""

from __future__ import annotations

from tests.checkpoint.torch_pickle import bad_pickles
from tests.faults.corpus.case import Case
from tests.faults.corpus.safetensors_files import with_model_files

CASES = [Case(name, with_model_files(make, damage)) for name, (make, damage, _) in bad_pickles.CASES.items()]
