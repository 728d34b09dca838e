"""Convert a checkpoint to another format, file size or dtype: rank files to a model directory, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fsdp_shard.checkpoint import run_conversion
from fsdp_shard.cli import recipe
from fsdp_shard.config import ConvertConfig
from fsdp_shard.utils import check_writable, format_count, format_size, say, write_result


def check(config: ConvertConfig) -> None:
    """What can be found wrong before anything is read."""
    check_writable(Path(config.target).expanduser().parent, f"target={config.target}")


@recipe(ConvertConfig, check=check)
def main(config: ConvertConfig) -> None:
    """Convert `source` into the directory `target`."""
    report = run_conversion(config)
    write_result(config.run_dir, asdict(report))
    checked = "read back and compared" if report.verified else "not read back"
    for note in report.notes:
        say(note)
    for kind, count in report.left_out.items():
        print(f"left out: {format_count(count, f'{kind} tensor')}")
    if not Path(config.target).expanduser().joinpath("config.json").exists():
        print(
            "no config.json was found with the weights: give config=PATH (a directory or hub id) for a model that runs"
        )
    print(f"{config.target}: {format_count(report.num_tensors, 'tensor')}, {format_size(report.num_bytes)}, {checked}")


if __name__ == "__main__":
    main()
