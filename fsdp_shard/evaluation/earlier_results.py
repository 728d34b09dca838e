"""What an earlier evaluation has left in the run directory, which must not pass for results of the next one."""

from pathlib import Path

from fsdp_shard.utils import RESULT

DOCUMENTS, PREDICTIONS, PLOT, SAMPLES = "documents.jsonl", "predictions.jsonl", "speed.svg", "samples"


def remove_earlier(run_dir: Path) -> None:
    """Remove the results of all tasks: the evaluation that begins may end before it has any.

    Losses and answers to go on with stay; they are only used for what they are of.
    """
    for name in (RESULT, DOCUMENTS, PREDICTIONS, PLOT):
        (run_dir / name).unlink(missing_ok=True)
    for file in (run_dir / SAMPLES).glob("*.jsonl"):
        file.unlink()
