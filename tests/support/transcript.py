"""A document of commands and what they printed: run it again, and write it anew or compare.

    python -m tests.support.transcript docs/first-hour.md --copy MODEL=llama TEXT=jargon.txt

A block of ```console has commands after `$ `, each followed by its output. A block of another language whose first line
is `# NAME: ...` or `{# NAME: ... #}` is the file NAME. All happens in one new directory, whose path is left out of what
is shown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"\{?# ([\w.-]+):")
_SECONDS = 300


@dataclass
class Command:
    """A command line, and the lines that it printed to the terminal."""

    line: str
    output: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error that it printed."""
        return any(line.startswith("error: ") for line in self.output)

    def __str__(self) -> str:
        return "\n".join([f"$ {self.line}", *self.output])


def commands_of(block: str) -> list[Command]:
    """The commands of a console block; a line that ends in a backslash goes on in the next."""
    commands: list[Command] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line.removeprefix("$ ")))
        elif commands[-1].line.endswith("\\") and not commands[-1].output:
            commands[-1].line += f"\n{line}"
        else:
            commands[-1].output.append(line)
    return commands


def commands_in(document: str) -> list[Command]:
    """All commands of a document, with the output that it shows."""
    return [command for kind, block in _FENCE.findall(document) if kind == "console" for command in commands_of(block)]


def run_again(document: str, directory: Path) -> str:
    """Run the commands of a document in `directory`, and return the document with what they print now."""

    def run_block(match: re.Match[str]) -> str:
        kind, block = match.groups()
        if kind != "console":
            if name := _FILE.match(block):
                (directory / name[1]).write_text(block, encoding="utf-8")
            return match[0]
        shown = "\n".join(str(Command(old.line, _run(old.line, directory))) for old in commands_of(block))
        return f"```console\n{shown}\n```"

    return _FENCE.sub(run_block, document)


def _run(line: str, directory: Path) -> list[str]:
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",  # what goes to the terminal keeps its order
        "XDG_CACHE_HOME": str(directory / ".cache"),
    }
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    lines = [part.rstrip() for part in done.stdout.replace(f"{directory}/", "").splitlines()]
    if (done.returncode != 0) != Command(line, lines).failed:
        raise RuntimeError(f"{line} ended with status {done.returncode}:\n{done.stdout}")
    return lines


def shape(command: Command) -> list[str]:
    """What of the output of a command depends on neither model, data, nor time: no numbers, no text of the model."""
    lines = list(_without_generated(command.output))
    masked = [re.sub(r"\d[\d.,:]*(e[+-]\d+)?( [KMGT]i?B?\b| B\b| [KMG]\b)?", "0", line) for line in lines]
    # Not progress, which is shown after two seconds, nor what `doctor` warns of on some processors.
    kept = [line for line in masked if not re.fullmatch(r"\w+: 0.* left|machine +warn .*", line)]
    return [re.sub(r"^(No problem found), 0 warnings?\.$", r"\1.", line) for line in kept]


def _without_generated(lines: Sequence[str]) -> Iterator[str]:
    is_inside = False
    for line in lines:
        is_inside = (is_inside or line.startswith("> ")) and not re.match(r"\d+ completions?, ", line)
        if not is_inside:
            yield line


def prepared(directory: Path, copies: Mapping[Path, str]) -> Path:
    """`directory`, with the models and texts that the commands need, by their names in there."""
    for source, name in copies.items():
        (shutil.copytree if source.is_dir() else shutil.copy)(source, directory / name)
    return directory


def main() -> None:
    """Run a document and write it anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("--copy", nargs="*", default=[], metavar="PATH=NAME", help="what the directory begins with")
    options = parser.parse_args()
    copies = {Path(source): name for source, _, name in (item.rpartition("=") for item in options.copy)}
    with TemporaryDirectory() as scratch:
        document = options.document.read_text(encoding="utf-8")
        options.document.write_text(run_again(document, prepared(Path(scratch), copies)), encoding="utf-8")


if __name__ == "__main__":
    main()
