"""Event files of TensorBoard, read back."""

from __future__ import annotations

from pathlib import Path


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads of the event files below a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
