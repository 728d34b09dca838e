"""The command `fsdp-shard`: what it can do, and which code does it.

Recipes are found by their file and run as programs of their own; the other commands call one function each. Imports
nothing heavy: a command loads what it needs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_shard.cli.exit import run_as_program, start_garbage_collection, wants_debug
from fsdp_shard.errors import InputError
from fsdp_shard.utils import nearest, set_environment

_HELP = """\
fsdp-shard: fine-tune Hugging Face models under FSDP, keep their checkpoints, run inference from them

  finetune [name=value ...]     fine-tune a causal language model on one or many ranks
  convert [name=value ...]      turn any checkpoint into a Hugging Face directory, or into rank files
  evaluate [name=value ...]     perplexity of a checkpoint, or tasks of lm-evaluation-harness
  generate [name=value ...]     text from a checkpoint, over the devices and the disk there are
  plan [name=value ...]         memory that each rank will need, from the config alone
  doctor [name=value ...]       what would go wrong in a finetune with these settings, before it does

  inspect PATH                  what is in a checkpoint of any format
  verify PATH [--against OTHER] every byte against its digest; or the content of two checkpoints
  diff A B                      what differs between two checkpoints, tensor by tensor

  ls                            the recipes and configs that ship
  cp NAME DEST                  copy one out to edit
  run FILE.py [name=value ...]  run a copied or own recipe like the shipped ones

`fsdp-shard COMMAND --help` lists its settings. --debug shows tracebacks, --version the version.

  fsdp-shard finetune model.path=org/name data.path=text.txt launch.ranks=2
  fsdp-shard generate checkpoint=outputs/finetune/... prompt="Once upon a time"
"""


def main() -> None:
    """Run the command line of this process, and leave with its exit status."""
    arguments = sys.argv[1:]
    run_as_program(lambda: run_command(arguments), debug=wants_debug(arguments))


def run_command(arguments: Sequence[str]) -> None:
    """Do what `arguments`, without the program's name, ask for."""
    command, *rest = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    flags = {"--help": _show_help, "-h": _show_help, "--version": _show_version}
    if command in flags:
        flags[command]()
    elif command in ("-sc", "--shell-completion"):
        _complete(rest)
    elif command in _RECIPES:
        _run_shipped(command, [*rest, *(["--debug"] if "--debug" in arguments else [])])
    elif command == "run":
        _run_file([*rest, *(["--debug"] if "--debug" in arguments else [])])
    elif command in _OTHERS:
        start_garbage_collection()
        _OTHERS[command](rest)
    else:
        raise InputError(
            f"{command} is no command of fsdp-shard{nearest(command, [*_RECIPES, *_OTHERS, 'run'])}. "
            f"`fsdp-shard --help` lists them."
        )


def _show_help() -> None:
    print(_HELP, end="")


def _show_version() -> None:
    from fsdp_shard import __version__

    print(f"fsdp-shard {__version__}")


_RECIPES = ("finetune", "convert", "evaluate", "generate", "plan", "doctor")


def _run_shipped(command: str, arguments: Sequence[str], program: str = "") -> None:
    from fsdp_shard.cli.recipes import load_recipe, run_jobs
    from fsdp_shard.config import schema_of
    from fsdp_shard.utils import shipped

    file = shipped("recipes") / f"{command}.py"
    run_jobs(schema_of(command), lambda: load_recipe(file), arguments, program or f"fsdp-shard {command}")


def _run_file(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("--help", "-h"):
        print("fsdp-shard run FILE.py [name=value ...]\n\n  Run a copied or own recipe like the shipped ones.")
        if not arguments:
            raise InputError("run needs the path of a recipe, such as one that `fsdp-shard cp` made.")
        return
    from fsdp_shard.cli.recipes import load_recipe

    file, *rest = arguments
    load_recipe(file).run(rest, f"fsdp-shard run {file}")


def _complete(arguments: Sequence[str]) -> None:
    """Shell completion: Hydra knows the settings of a recipe; the commands are completed here."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if not any(argument.startswith("query=") for argument in arguments):
        _run_shipped("finetune", ["-sc", *arguments], program="fsdp-shard")
    elif len(words) > 2 or (len(words) == 2 and line.endswith(" ")):
        if words[1] in _RECIPES:
            with set_environment({"COMP_LINE": line.replace(f" {words[1]}", "", 1)}):
                _run_shipped(words[1], ["-sc", *arguments])
    else:
        print(" ".join([*_RECIPES, *_OTHERS, "run"]))


class _Parser(argparse.ArgumentParser):
    """argparse with errors as all our commands tell them."""

    def error(self, message: str) -> None:  # type: ignore[override]  # ours raises, never returns
        raise InputError(f"{message[:1].upper()}{message[1:]}. `{self.prog} --help` shows how it is used.")


def _parser(command: str, description: str) -> _Parser:
    return _Parser(prog=f"fsdp-shard {command}", description=description, allow_abbrev=False)


def _list(arguments: Sequence[str]) -> None:
    from fsdp_shard.utils import configs, recipes

    _parser("ls", "The recipes and configs that ship.").parse_args(arguments)
    for title, items in (("Recipes", recipes()), ("Configs", configs())):
        print(title)
        width = max((len(item.name) for item in items), default=0)
        for item in items:
            print(f"  {item.name:<{width}}  {item.description}")
    print("\n`fsdp-shard cp NAME DEST` copies one out to edit.")


def _copy(arguments: Sequence[str]) -> None:
    from fsdp_shard.utils import configs, recipes

    parser = _parser("cp", "Copy a shipped recipe or config out, to edit it.")
    parser.add_argument("name", help="as `fsdp-shard ls` shows it")
    parser.add_argument("destination", help="a new file, or a directory to put it in")
    options = parser.parse_args(arguments)
    items = {item.name: item.path for item in [*recipes(), *configs()]}
    name = next((n for n in (options.name, f"{options.name}.yaml") if n in items), options.name.removesuffix(".py"))
    if name not in items:
        raise InputError(f"Nothing called {options.name} ships{nearest(name, list(items))}. `fsdp-shard ls` lists all.")
    target = Path(options.destination)
    if target.is_dir() or options.destination.endswith("/"):
        # A config keeps the name of its group, so that the directory can be given as --config-dir.
        target = target / (name if name.endswith(".yaml") else items[name].name)
    if target.exists():
        raise InputError(f"{target} is already there and is not overwritten; give another name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(items[name], target)
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.") from error
    hint = f"fsdp-shard run {target}" if target.suffix == ".py" else "--config-dir DIRECTORY"
    print(f"{target} is yours to edit; use it with {hint}")


def _inspect(arguments: Sequence[str]) -> None:
    from fsdp_shard.cli.checkpoint_commands import inspect

    parser = _parser("inspect", "What is in a checkpoint of any format. Reads headers only.")
    parser.add_argument("path", help="a checkpoint, a run directory (its latest step), or a .gguf file")
    parser.add_argument(
        "--tensors", metavar="PATTERN", help="list the tensors of these names, such as '*.3.*' or q_proj, one a line"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    inspect(parser.parse_args(arguments))


def _verify(arguments: Sequence[str]) -> None:
    from fsdp_shard.cli.checkpoint_commands import verify

    parser = _parser(
        "verify",
        "Every byte of a checkpoint against the digests in its manifest.json. Without one: its structure, config.json "
        "against the shapes, NaN and infinities.",
    )
    parser.add_argument("path", help="a checkpoint, or a run directory (its latest step)")
    parser.add_argument(
        "--against", metavar="OTHER", help="compare the content with this checkpoint's, across formats and dtypes"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    verify(parser.parse_args(arguments))


def _diff(arguments: Sequence[str]) -> None:
    from fsdp_shard.cli.checkpoint_commands import diff

    parser = _parser("diff", "How two checkpoints differ, tensor by tensor, whatever formats they are in.")
    parser.add_argument("a", help="a checkpoint of any format, or a run directory (its latest step)")
    parser.add_argument("b", help="the other one")
    parser.add_argument("--all", action="store_true", help="every tensor, not only those that differ most")
    parser.add_argument(
        "--logits", metavar="PROMPT", help="load both models, and compare what they predict after each token of it"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    diff(parser.parse_args(arguments))


_OTHERS: dict[str, Callable[[Sequence[str]], None]] = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "ls": _list,
    "cp": _copy,
}
