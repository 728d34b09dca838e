"""What saving, opening, resuming, verifying and converting cost at 64 ranks and more, without that many machines.

    python benchmarks/scale.py --work /big/disk/scale --models 70B 405B --ranks 64 256 1024 --json scale.json
    python benchmarks/scale.py --plot before.json scale.json docs/scale.svg

All of it is the code of the package. Steps that are opened and resumed from have every header, the manifest and every
index in full, of the shapes of real models; their data are holes, so that they take a few GB of disk instead of TB. A
save runs all of its ranks as threads of one process (`simulated_ranks`); it, verify and convert work on steps with a
512th of the columns, in chunks that are as much smaller (`scale_steps`). `--only init` starts real ranks, as many as
the machine holds, and `--only init-alone` one of them without the others; `--only plan` runs the command; `--only dcp`
reads a `.metadata` that torch's planner made. Each measurement has a process of its own (`scale_measures`). A step is
made when it is first needed; that takes longer than to measure it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import scale_measures
from scale_steps import CONFIGS, shapes_of

ROOT = Path(__file__).resolve().parent.parent
MEASURES = (
    "init",
    "init-alone",
    "plan",
    "dcp",
    "save",
    "open",
    "resume",
    "resume-fewer",
    "tensor-parallel",
    "verify",
    "convert",
)
ALWAYS = MEASURES[4:]
# Title, and for each line the measure, the figures on both axes, and its label; None for two lines, before and now.
CURVES = (
    ("opening the weights:\nseconds of processor", (("open", "ranks", "cpu_seconds", None),)),
    ("resuming:\nrank files opened by a rank", (("resume", "ranks", "opened", None),)),
    ("saving:\nbytes that a rank receives", (("save", "ranks", "median_received", None),)),
    ("index of rank files:\nbytes by pieces", (("open", "pieces", "index_bytes", "index"),)),
    ("resuming:\nseconds of processor of a rank", (("resume", "ranks", "cpu_seconds", None),)),
    (
        "saving:\nseconds of processor",
        (("save", "ranks", "main_cpu_seconds", "rank 0"), ("save", "ranks", "median_cpu_seconds", "another rank")),
    ),
)


def plot(before: Path, now: Path, target: Path) -> None:
    """Draw the curves over the number of ranks as an SVG, of the first model in the figures of two commits."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = {label: json.loads(file.read_text()) for label, file in (("before", before), ("now", now))}
    model = rows["now"][0]["model"]
    figure, axes = pyplot.subplots(2, len(CURVES) // 2, figsize=(10, 6), layout="constrained")
    for axis, (title, lines) in zip(axes.flat, CURVES, strict=True):
        for measure, x, y, label in lines:
            for side in ("before", "now") if label is None else ("now",):
                found = [row for row in rows[side] if (row["measure"], row["model"]) == (measure, model) and y in row]
                points = sorted((row[x], row[y]) for row in found)
                axis.plot(*zip(*points, strict=True), marker="o", label=label or side)
        axis.set(xscale="log", yscale="log", xlabel=x, title=title)
        axis.margins(y=0.3)
        axis.minorticks_off()
        if x == "ranks":
            ticks = sorted({row["ranks"] for row in rows["now"]})
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.legend()
    figure.savefig(target, metadata={"Date": None})


def plot_saves(figures: Path, target: Path) -> None:
    """Draw what saves cost rank 0 and another rank over the number of ranks, for each model, as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [row for row in json.loads(figures.read_text()) if row["measure"] == "save"]
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    kinds = (("cpu_seconds", "seconds of processor"), ("received", "bytes received"), ("opened", "rank files opened"))
    for axis, (key, title) in zip(axes, kinds, strict=True):
        for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            for side, style in (("main", "-"), ("median", "--")):
                points = sorted((row["ranks"], row[f"{side}_{key}"]) for row in rows if row["model"] == model)
                label = model if side == "main" else None
                axis.plot(*zip(*points, strict=True), style, marker="o", color=f"C{number}", label=label)
        ticks = sorted({row["ranks"] for row in rows})
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        axis.minorticks_off()
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes[1].legend()
    figure.suptitle("a save: rank 0 (solid), another rank (dashed)")
    figure.savefig(target, metadata={"Date": None})


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as columns, one line a measurement; KB are 1,000 bytes."""
    shown = (
        "cpu_seconds",
        "init_cpu_seconds",
        "main_cpu_seconds",
        "median_cpu_seconds",
        "pickle_cpu_seconds",
        "memory_bytes",
        "opened",
        "median_opened",
    )
    more = ("index_bytes", "manifest_bytes", "main_received", "median_received", "sockets_after_talk")
    names = [name for name in (*shown, *more) if any(name in row for row in rows)]
    lines = [["measure", "model", "ranks", *names]]
    for row in rows:
        lines.append([row["measure"], row["model"], f"{row['ranks']:,}", *(_cell(name, row) for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(name: str, row: dict[str, Any]) -> str:
    if name not in row:
        return ""
    value = row[name]
    return f"{value:.2f}" if "seconds" in name else f"{value / 1e3:,.1f} KB" if "_bytes" in name else f"{value:,.0f}"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/scale"), help="on a file system with holes")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["70B"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(ALWAYS))
    parser.add_argument("--keep", action="store_true", help="keep the steps that were made")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--plot", nargs=3, type=Path, metavar=("BEFORE", "NOW", "SVG"), help="draw figures instead")
    parser.add_argument("--plot-saves", nargs=2, type=Path, metavar=("FIGURES", "SVG"), help="draw saves instead")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(*arguments.plot)
        return
    if arguments.plot_saves:
        plot_saves(*arguments.plot_saves)
        return
    if arguments.measure:
        function = getattr(scale_measures, f"measure_{arguments.measure.replace('-', '_')}")
        print(json.dumps(function(arguments.work, arguments.models[0], arguments.ranks[0])))
        return
    rows = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    for model in arguments.models:
        shapes_of(model, arguments.work)
        for ranks in arguments.ranks:
            for name in arguments.only:
                figures = _child(arguments.work, name, model, ranks)
                rows.append({"measure": name, "model": model, "ranks": ranks, **figures})
                print(json.dumps(rows[-1]), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
            if not arguments.keep:
                for kind in ("sparse", "thin", "dcp"):
                    shutil.rmtree(arguments.work / f"{kind}-{model}-{ranks}", ignore_errors=True)
    print(table(rows))


def _child(work: Path, name: str, model: str, ranks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", str(work), "--measure", name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--models", model, "--ranks", str(ranks)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{name} of {model} at {ranks} ranks failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
