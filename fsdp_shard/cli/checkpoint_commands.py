"""What `inspect`, `verify` and `diff` do with their arguments: call one function, print, end with the right status."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from pathlib import Path

from fsdp_shard.checkpoint import is_remote
from fsdp_shard.errors import CheckpointError, DifferenceError


def inspect(options: Namespace) -> None:
    """Print what is in the checkpoint `path`, or its tensors that fit the pattern `tensors`."""
    from fsdp_shard.checkpoint import describe

    description = describe(_there(options.path), options.tensors or "*")
    if options.json:
        print(description.to_json())
    else:
        print(description.to_list() if options.tensors else description.to_text())


def verify(options: Namespace) -> None:
    """Check the checkpoint `path`, alone or `against` another; DifferenceError if anything is wrong."""
    from fsdp_shard.checkpoint import verify

    report = verify(_there(options.path), options.against and _there(options.against))
    print(report.to_json() if options.json else report)
    if report.is_sound:
        return
    count = len(report.problems)
    problems = "1 problem" if count == 1 else f"{count:,} problems"
    where = options.path if options.against is None else f"{options.path} against {options.against}"
    raise DifferenceError(f"{where}: {problems}, listed above.")


def diff(options: Namespace) -> None:
    """Print how the checkpoints `a` and `b` differ, and with `logits` what that does; DifferenceError if they do."""
    from fsdp_shard.checkpoint import diff

    report = diff(_there(options.a), _there(options.b))
    if not options.json:
        print(report.to_text(options.all), flush=True)
    logits = None
    if options.logits is not None:
        from fsdp_shard.inference import diff_logits

        logits = diff_logits(options.a, options.b, options.logits)
        if not options.json:
            print(f"\n{logits}")
    if options.json:
        print(json.dumps({**report.to_dict(), "logits": logits and dataclasses.asdict(logits)}, indent=2))
    if not report.is_equal:
        tensors = "1 tensor" if report.num_differences == 1 else f"{report.num_differences:,} tensors"
        raise DifferenceError(f"{options.a} and {options.b} differ in {tensors}.")
    if logits is not None and not logits.is_equal:
        raise DifferenceError(f"{options.a} and {options.b} have the same tensors, but predict differently.")


def _there(path: str) -> str:
    if not is_remote(path) and not Path(path).exists():
        raise CheckpointError(f"{path}: there is no such file or directory.")
    return path
