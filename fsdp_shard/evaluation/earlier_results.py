"""Removes an earlier evaluation's files from the run directory, so that they cannot pass for new results."""

from pathlib import Path

from fsdp_shard.utils import RESULT

DOCUMENTS, PREDICTIONS, PLOT, SAMPLES = "documents.jsonl", "predictions.jsonl", "speed.svg", "samples"


def remove_earlier(run_dir: Path) -> None:
    """Remove the results of all tasks, because the new evaluation may end before it has any.

    Losses and answers to continue from stay; they are used only with matching inputs.
    """
    for name in (RESULT, DOCUMENTS, PREDICTIONS, PLOT):
        (run_dir / name).unlink(missing_ok=True)
    for file in (run_dir / SAMPLES).glob("*.jsonl"):
        file.unlink()
