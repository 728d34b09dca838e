"""The command `fsdp-shard` and its commands that are not recipes: inspect, verify, diff, report, push, ls, cp.

Recipes are found by their file and run as programs. Heavy modules are imported only when a command needs them.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_shard import __version__, checkpoint, evaluation
from fsdp_shard.cli.exit import run_as_program, start_garbage_collection, wants_debug
from fsdp_shard.errors import CheckpointError, DifferenceError, InputError
from fsdp_shard.utils import (
    configs,
    format_count,
    is_remote,
    nearest,
    printable,
    recipes,
    refuse_remote,
    say,
    set_environment,
    shipped_directory,
)

_HELP = """\
fsdp-shard: fine-tune Hugging Face models under FSDP, keep their checkpoints, run inference from them

  finetune [name=value ...]     fine-tune a Hugging Face model on one or more ranks
  convert [name=value ...]      convert a checkpoint to another format, file size or dtype
  evaluate [name=value ...]     perplexity, tasks of lm-eval, classes, answers, speed
  generate [name=value ...]     generate text from a checkpoint, on GPUs, CPU and disk
  plan [name=value ...]         estimate the memory that each rank will need, from the config alone
  plan RUN                      plan a run of finetune, and compare with what it measured
  doctor [name=value ...]       dry run: report the problems that finetune would hit

  inspect PATH                  show what is in a checkpoint of any format
  verify PATH [--against OTHER] check a checkpoint against its digests, or compare two checkpoints
  diff A B                      show the differences between two checkpoints, tensor by tensor
  report RUN...                 compare runs: in the terminal, as CSV, Markdown, or one HTML page
  push SOURCE org/name          push a checkpoint to the Hugging Face hub, private, with a model card

  ls                            list the recipes and configs that ship with fsdp-shard
  cp NAME DEST                  copy one of them, to edit
  run FILE.py [name=value ...]  run your own recipe, launched like the shipped ones

`fsdp-shard COMMAND --help` shows its settings. --debug shows tracebacks, --version the version.
Settings can be kept in a YAML file, given first: fsdp-shard finetune my.yaml train.steps=100

  fsdp-shard finetune model.path=org/name data.path=text.txt launch.ranks=2
  fsdp-shard generate checkpoint=outputs/finetune/... prompt="Once upon a time"
"""

_PATH_HELP = "checkpoint of any format, a run directory (its latest step), RUN@best, or RUN@step-400"


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    arguments = sys.argv[1:]
    run_as_program(lambda: run_command(arguments), debug=wants_debug(arguments))


def run_command(arguments: Sequence[str]) -> None:
    """Run a command in this process.

    Args:
        arguments: The command and its arguments, without the name of the program.

    Raises:
        FsdpShardError: The arguments are wrong, or the command fails or finds a difference.
    """
    command, *rest = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    debug = ["--debug"] if "--debug" in arguments else []
    if command in ("--help", "-h"):
        print(_HELP, end="")
    elif command == "--version":
        print(f"fsdp-shard {__version__}")
    elif command in ("-sc", "--shell-completion"):
        _complete(rest)
    elif command in _RECIPES:
        _run_shipped(command, [*rest, *debug])
    elif command == "run":
        _run_file([*rest, *debug])
    elif command in COMMANDS:
        start_garbage_collection()
        COMMANDS[command](rest)
    else:
        raise InputError(
            f"{command} is not a command of fsdp-shard{nearest(command, _NAMES)}. `fsdp-shard --help` lists them."
        )


def _run_shipped(command: str, arguments: Sequence[str], program: str = "") -> None:
    from fsdp_shard.cli.run_recipe import load_recipe, run_jobs
    from fsdp_shard.config import COMMANDS as SCHEMAS

    file = shipped_directory("recipes") / f"{command}.py"
    run_jobs(SCHEMAS[command], lambda: load_recipe(file), arguments, program or f"fsdp-shard {command}")


def _run_file(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("--help", "-h"):
        print("fsdp-shard run FILE.py [name=value ...]\n\n  Run your own recipe, launched like the shipped ones.")
        if not arguments:
            raise InputError("run needs the path of a recipe, such as a copy made with `fsdp-shard cp`.")
        return
    from fsdp_shard.cli.run_recipe import load_recipe

    file, *rest = arguments
    load_recipe(file).run(rest, f"fsdp-shard run {file}")


def _complete(arguments: Sequence[str]) -> None:
    """Complete for the shell: command names here, the settings of a recipe through Hydra."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if not any(argument.startswith("query=") for argument in arguments):
        _run_shipped("finetune", ["-sc", *arguments], program="fsdp-shard")
    elif len(words) > 2 or (len(words) == 2 and line.endswith(" ")):
        if words[1] in _RECIPES:
            with set_environment({"COMP_LINE": line.replace(f" {words[1]}", "", 1)}):
                _run_shipped(words[1], ["-sc", *arguments])
    else:
        print(" ".join(_NAMES))


class _Parser(argparse.ArgumentParser):
    """An argparse parser with the errors of the other commands."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"fsdp-shard {command}", description=description, allow_abbrev=False)

    def add_json(self) -> None:
        """Add the option --json."""
        self.add_argument("--json", action="store_true", help="print JSON, for programs")

    def error(self, message: str) -> None:  # type: ignore[override]  # ours raises, never returns
        raise InputError(f"{message[:1].upper()}{message[1:]}. `{self.prog} --help` shows the usage.")


def inspect(arguments: Sequence[str]) -> None:
    """Print a summary of a checkpoint, or a list of its tensors."""
    parser = _Parser("inspect", "Show what is in a checkpoint of any format. Reads headers only.")
    parser.add_argument("path", help=f"{_PATH_HELP}, or a .gguf file")
    parser.add_argument(
        "--tensors", metavar="PATTERN", help="list the tensors whose names match, such as '*.3.*' or q_proj"
    )
    parser.add_json()
    options = parser.parse_args(arguments)
    description = checkpoint.summarize_checkpoint(_existing_path(options.path), options.tensors or "*")
    if options.json:
        print(description.to_json())
    else:
        print(printable(description.to_list() if options.tensors else description.to_text()))


def verify(arguments: Sequence[str]) -> None:
    """Check a checkpoint, alone or against another one; raise DifferenceError if anything is wrong."""
    parser = _Parser(
        "verify",
        "Check every byte of a checkpoint against the digests in its manifest.json. Without a manifest: check its "
        "structure, its shapes against config.json, and that there are no NaN or infinite values.",
    )
    parser.add_argument("path", help=_PATH_HELP)
    parser.add_argument(
        "--against", metavar="OTHER", help="compare the content with this checkpoint, across formats and dtypes"
    )
    parser.add_argument("--base", metavar="MODEL", help="with --against: base model of an adapter, if it has moved")
    parser.add_json()
    options = parser.parse_args(arguments)
    report = checkpoint.verify(
        _existing_path(options.path), options.against and _existing_path(options.against), base=options.base
    )
    print(report.to_json() if options.json else printable(str(report)))
    if not report.is_sound:
        compared = options.path if options.against is None else f"{options.path} against {options.against}"
        raise DifferenceError(f"{compared}: {format_count(len(report.problems), 'problem')}, listed above.")


def diff(arguments: Sequence[str]) -> None:
    """Print how two checkpoints and, with --logits, their predictions differ; raise DifferenceError if they do."""
    parser = _Parser("diff", "Show the differences between two checkpoints of any formats, tensor by tensor.")
    parser.add_argument("a", help=_PATH_HELP)
    parser.add_argument("b", help="the other checkpoint")
    parser.add_argument("--all", action="store_true", help="list every tensor, not only those that differ most")
    parser.add_argument(
        "--logits", metavar="PROMPT", help="load both models and compare their predictions after each token of PROMPT"
    )
    parser.add_argument("--base", metavar="MODEL", help="base model of an adapter, if it has moved")
    parser.add_argument("--config", metavar="MODEL", help="with --logits: the model of weights without config.json")
    parser.add_argument("--tokenizer", metavar="MODEL", help="with --logits: the tokenizer for PROMPT")
    parser.add_json()
    options = parser.parse_args(arguments)
    a, b = (
        checkpoint.locate(_existing_path(path))
        .based_on(options.base)
        .with_config_and_tokenizer(options.config, options.tokenizer)
        for path in (options.a, options.b)
    )
    if options.config is not None and a.config_path is b.config_path is None:
        parser.error(f"--config {options.config} has no effect: both checkpoints have a config.json; remove it")
    if options.tokenizer is not None and options.logits is None:
        parser.error(f"--tokenizer {options.tokenizer} needs --logits PROMPT; add that, or remove it")
    checkpoint.refuse_unused_base(options.base, a, b, are_run=options.logits is not None)
    report = checkpoint.diff(a, b)
    if not options.json:
        print(printable(report.to_text(options.all)), flush=True)
    logits = None
    if options.logits is not None:
        from fsdp_shard.inference import diff_logits

        logits = diff_logits(a, b, options.logits)
        if not options.json:
            print(f"\n{logits}")
    if options.json:
        print(json.dumps({**report.to_dict(), "logits": logits and dataclasses.asdict(logits)}, indent=2))
    if not report.is_equal:
        raise DifferenceError(
            f"{options.a} and {options.b} differ in {format_count(report.num_differences, 'tensor')}."
        )
    if logits is not None and not logits.is_equal:
        raise DifferenceError(f"{options.a} and {options.b} have the same tensors but predict differently.")


def report(arguments: Sequence[str]) -> None:
    """Compare runs, in the terminal or in files."""
    parser = _Parser("report", "Compare runs: losses, settings that differ, throughput, memory, checkpoints, samples.")
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="directory of a run, of a sweep, or any other with runs in it"
    )
    parser.add_argument("--html", metavar="FILE", help="write one HTML page, which needs no other file or network")
    parser.add_argument("--csv", metavar="FILE", help="write a row for each trained run")
    parser.add_argument("--md", metavar="FILE", help="write the tables in Markdown")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow runs that are under way: show or write the report again until they end, or until Ctrl-C",
    )
    options = parser.parse_args(arguments)
    evaluation.report_runs(
        options.runs, evaluation.ReportFiles(options.html, options.csv, options.md), watch=options.watch
    )


def push(arguments: Sequence[str]) -> None:
    """Push a checkpoint to the hub."""
    parser = _Parser(
        "push",
        "Push a checkpoint to a repository of the Hugging Face hub, with a model card made from its run. Pushing again "
        "resumes where it stopped. The token is that of `hf auth login` or HF_TOKEN.",
    )
    parser.add_argument("source", help=_PATH_HELP)
    parser.add_argument("repository", metavar="org/name", help="the repository, created if it does not exist")
    parser.add_argument("--public", action="store_true", help="create it public, or push to one that is public")
    parser.add_argument("--revision", metavar="BRANCH", help="branch, created if it does not exist (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")
    parser.add_argument(
        "--adapter", metavar="BASE", help="push a LoRA adapter as such, for the model BASE of the hub, not merged"
    )
    parser.add_argument(
        "--evaluations", metavar="RUN", nargs="+", default=[], help="evaluations of these weights, for the model card"
    )
    options = parser.parse_args(arguments)
    from fsdp_shard.cli.push_command import push_to_hub

    report = push_to_hub(
        _existing_path(options.source),
        options.repository,
        public=options.public,
        revision=options.revision,
        message=options.message,
        adapter_base=options.adapter,
        evaluations=options.evaluations,
    )
    say(report.describe())


def ls(arguments: Sequence[str]) -> None:
    """List the recipes and configs that ship with the package."""
    _Parser("ls", "List the recipes and configs that ship with fsdp-shard.").parse_args(arguments)
    for title, items in (("Recipes", recipes()), ("Configs", configs())):
        print(title)
        width = max((len(item.name) for item in items), default=0)
        for item in items:
            print(f"  {item.name:<{width}}  {item.description}")
    print("\n`fsdp-shard cp NAME DEST` copies one, to edit.")


def cp(arguments: Sequence[str]) -> None:
    """Copy a shipped recipe or config."""
    parser = _Parser("cp", "Copy a recipe or config that ships with fsdp-shard, to edit.")
    parser.add_argument("name", help="name of the recipe or config in `fsdp-shard ls`")
    parser.add_argument("destination", help="new file, or a directory for it")
    options = parser.parse_args(arguments)
    items = {item.name: item.path for item in [*recipes(), *configs()]}
    name = next((n for n in (options.name, f"{options.name}.yaml") if n in items), options.name.removesuffix(".py"))
    if name not in items:
        raise InputError(
            f"{options.name} is not a shipped recipe or config{nearest(name, list(items))}. `fsdp-shard ls` lists them."
        )
    refuse_remote(options.destination, "DEST", "copy to a local file.")
    target = Path(options.destination)
    in_directory = target.is_dir() or options.destination.endswith("/")
    if in_directory:
        # A config keeps the name of its group, so the directory can be passed as --config-dir.
        target = target / (name if name.endswith(".yaml") else items[name].name)
    if target.exists():
        raise InputError(f"{target} already exists and is not overwritten; give another name.")
    kind = items[name].suffix
    if target.suffix != kind:
        raise InputError(f"{name} is a {kind} file, and {target} is not; give it a name that ends with {kind}.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_content(items[name], is_first_argument=not in_directory), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.") from error
    print(f"Copied to {target}; use it with {_how_to_use(name, target, options.destination if in_directory else '')}")


def _how_to_use(name: str, target: Path, directory: str) -> str:
    """How to run a copy of the recipe or config `name`, in the file `target` or below `directory`."""
    group, _, option = name.removesuffix(".yaml").rpartition("/")
    if target.suffix == ".py":
        return f"fsdp-shard run {target}"
    if not group:
        return f"fsdp-shard {option} {target}"
    if directory:
        return f"--config-dir {directory} {group}={option}"
    return f"fsdp-shard finetune {target}" if group == "experiment" else f"--config-dir, in a directory {group}/"


def _content(file: Path, *, is_first_argument: bool) -> str:
    """The content of a copy: without Hydra's directive if it is to be the first argument of a command."""
    text = file.read_text(encoding="utf-8")
    return text.removeprefix("# @package _global_\n") if is_first_argument else text


def _existing_path(path: str) -> str:
    if not is_remote(path) and not checkpoint.local_path(path).exists():
        raise CheckpointError(f"{path}: there is no such file or directory.")
    return path


COMMANDS = {"inspect": inspect, "verify": verify, "diff": diff, "report": report, "push": push, "ls": ls, "cp": cp}
_RECIPES = ("finetune", "convert", "evaluate", "generate", "plan", "doctor")
_NAMES = (*_RECIPES, *COMMANDS, "run")
