"""`fsdp-shard report`: compares runs once, or repeatedly while they are running."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fsdp_shard.errors import InputError
from fsdp_shard.evaluation.report.comparison import build_report
from fsdp_shard.evaluation.report.html_page import to_html
from fsdp_shard.evaluation.report.report_data import Report
from fsdp_shard.evaluation.report.run_files import is_run
from fsdp_shard.evaluation.report.same_weights import WeightDigests
from fsdp_shard.evaluation.report.tables import to_csv, to_markdown
from fsdp_shard.evaluation.report.terminal import to_text
from fsdp_shard.utils import format_count, format_size, refuse_remote, say, write_atomically

RELOAD_SECONDS = 5
_QUIET_SECONDS = 20.0  # within this time, a sweep starts its next run, and a launcher restarts its ranks
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
_SUFFIXES = {"html": (".html", ".htm"), "csv": (".csv",), "md": (".md",)}


class ReportFiles(NamedTuple):
    """The files to write; None for files that are not requested. Without any, the report is printed."""

    html: str | None = None
    csv: str | None = None
    md: str | None = None

    def check(self) -> None:
        """Raise InputError for a file that cannot be written, or whose name belongs to something else."""
        for option, name in self._asdict().items():
            if name is None:
                continue
            refuse_remote(name, f"--{option}", "write a local file and copy that.")
            path = Path(name).expanduser()
            if path.suffix.lower() not in _SUFFIXES[option]:
                raise InputError(
                    f"--{option} {name}: the name of the file must end in {' or '.join(_SUFFIXES[option])}, so that no "
                    "other file is replaced by mistake."
                )
            if path.is_dir() or not path.parent.is_dir():
                what = "is a directory" if path.is_dir() else f"cannot be written: there is no directory {path.parent}"
                raise InputError(f"--{option} {name} {what}; give a file in a directory that exists.")

    def write(self, report: Report, reload_seconds: int | None = None) -> list[Path]:
        """Write the files, and return their paths; the arguments are those of `to_html`."""
        makers: dict[str, Callable[[], str]] = {
            "html": lambda: to_html(report, reload_seconds),
            "csv": lambda: to_csv(report),
            "md": lambda: to_markdown(report),
        }
        written = []
        for option, name in self._asdict().items():
            if name is not None:
                written.append(Path(name).expanduser())
                write_atomically(written[-1], makers[option]())
        return written


def report_runs(paths: Sequence[str], files: ReportFiles, watch: bool = False) -> None:
    """Compare runs, and print the report or write it to files.

    Args:
        paths: Directories of runs, or directories with runs in them.
        files: The files.
        watch: Repeat until no run is running, or until Ctrl-C.

    Raises:
        InputError: There is no run at one of the paths, or a file cannot be written.
    """
    files.check()
    digests = WeightDigests()
    if watch:
        _follow(paths, files, digests)
        return
    report = build_report(paths, digests)
    if not any(files):
        say(to_text(report))
        return
    for path in files.write(report):
        say(f"{path}: {format_count(report.num_all, 'run')}, {format_size(path.stat().st_size)}")
    for failure in report.failures:
        say(f"failed: {failure}")
    for problem in report.problems:
        say(f"left out: {problem}")


def _follow(paths: Sequence[str], files: ReportFiles, digests: WeightDigests) -> None:
    may_grow = not all(is_run(Path(path).expanduser()) for path in paths)
    shown, last_running = "", time.monotonic()
    try:
        while True:
            report = build_report(paths, digests)
            shown = _show(report, files, shown)
            now = time.monotonic()
            last_running = now if report.num_running else last_running
            is_over = report.num_completed == report.num_all and not may_grow
            if not report.num_running and (is_over or now - last_running > _QUIET_SECONDS):
                say("No run is under way any more.")
                break
            time.sleep(RELOAD_SECONDS)
    except KeyboardInterrupt:
        say("")
    finally:
        if any(files):  # open pages must stop reloading themselves
            files.write(build_report(paths, digests))


def _show(report: Report, files: ReportFiles, shown: str) -> str:
    """Write the files, or print the report if it changed since it was last shown; return what is shown now."""
    if any(files):
        written = files.write(report, RELOAD_SECONDS)
        text = f"following {format_count(report.num_all, 'run')} in {', '.join(map(str, written))}; Ctrl-C ends it"
    else:
        text = to_text(report)
    if text != shown:
        is_redrawn = sys.stdout.isatty() and not any(files)
        if is_redrawn:
            sys.stdout.write(_CLEAR)
        say(text if is_redrawn or not shown else f"\n{text}")
    return text
