"""What makes a function a recipe: a program with a config, run the same by `fsdp-shard`, `python` and `torchrun`.

A recipe is composition only; this module does what they all share. The config is composed and checked once, before any
rank starts; then RUN_DIR/config.yaml is written and the function is called on every rank. Knows no particular recipe.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fsdp_shard.checkpoint import refuse_remote
from fsdp_shard.cli.exit import run_as_program, start_garbage_collection, tell, wants_debug
from fsdp_shard.config import RunConfig, command_of, is_used
from fsdp_shard.distributed import check_machine, is_joined_rank, joined_rank, launch
from fsdp_shard.errors import ConfigError, FsdpShardError, InputError, Interrupted, RunError
from fsdp_shard.utils import walk, warnings_of

if TYPE_CHECKING:
    from fsdp_shard.config import Job

C = TypeVar("C", bound=RunConfig)

_SECONDS_TO_SPEAK = 20.0


def recipe(schema: type[C], *, check: Callable[[C], None] | None = None) -> Callable[[Callable[[C], None]], Recipe[C]]:
    """Make a function of a config into a recipe.

    `schema` is one of the config dataclasses in `fsdp_shard.config`, or a dataclass that extends one. `check(config)`
    is called once before any rank starts and raises one of our InputErrors when a file that the config names is not
    what it must be.
    """
    command_of(schema)

    def decorate(work: Callable[[C], None]) -> Recipe[C]:
        return Recipe(schema, work, check)

    return decorate


class Recipe(Generic[C]):
    """A function of a config that can be run as a program: `main()` reads the command line and leaves the process."""

    def __init__(self, schema: type[C], work: Callable[[C], None], check: Callable[[C], None] | None) -> None:
        self.schema, self.work, self.check = schema, work, check
        self.file = Path(work.__code__.co_filename).resolve()
        self.__doc__ = work.__doc__

    def __call__(self) -> None:
        """Run as a program, with the command line of this process."""
        arguments = sys.argv[1:]
        run_as_program(lambda: self.run(arguments, Path(sys.argv[0]).name), debug=wants_debug(arguments))

    def run(self, arguments: Sequence[str], program: str) -> None:
        """Compose the configs that `arguments` ask for, check them all, and then carry them out one by one."""
        run_jobs(self.schema, lambda: self, arguments, program)

    def perform(self, config: C) -> None:
        """The work of one rank."""
        self.work(config)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A started rank finds the recipe by its file: `main` of that module is this object, not the bare function.
        return load_recipe, (str(self.file),)


def run_jobs(schema: type[C], find: Callable[[], Recipe[C]], arguments: Sequence[str], program: str) -> None:
    """Carry out what `arguments` ask of a recipe with this schema.

    `find` gives that recipe, and is called after the configs have been composed, so that a wrong one costs no import
    of torch. A run of a sweep that fails does not keep the others from running; RunError at the end says which did.
    """
    with _one_voice():
        jobs = _prepare(schema, find, arguments, program)
    start_garbage_collection()
    failed = []
    for number, job in enumerate(jobs, start=1):
        if len(jobs) == 1:
            _carry_out(find(), job.config)
            continue
        print(f"[{number}/{len(jobs)}] {' '.join(job.overrides)} -> {job.config.run_dir}", flush=True)
        try:
            _carry_out(find(), job.config)
        except Interrupted:
            raise
        except FsdpShardError as error:
            failed.append(job.config.run_dir)
            tell(error, job.config.debug)
        gc.collect()  # reference cycles hold the job's model and optimizer, and the next one needs their memory
    if failed:
        raise RunError(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}.")


def _prepare(schema: type[C], find: Callable[[], Recipe[C]], arguments: Sequence[str], program: str) -> list[Job[C]]:
    """The jobs, checked. Nothing is loaded where there is nothing to do."""
    from fsdp_shard.config import compose_jobs

    jobs = compose_jobs(schema, [argument for argument in arguments if argument != "--debug"], program)
    for job in jobs:
        job.config.debug |= "--debug" in arguments
    if len(jobs) > 1:
        _refuse_joined(schema, [job.config for job in jobs])
    if joined_rank() == 0:
        for line in dict.fromkeys(line for job in jobs for line in warnings_of(job.config)):
            print(line, file=sys.stderr, flush=True)
    for job in jobs:
        _check(find(), job.config)
    return jobs


def _refuse_joined(schema: type[C], configs: Sequence[C]) -> None:
    """Ranks meet once, and so cannot for one job after the other."""
    if schema.ranks_are != "started":
        return
    if is_joined_rank():
        raise ConfigError(
            f"-m asks for {len(configs)} runs one after the other, and ranks that torchrun or srun has started meet "
            f"for one; start each run by itself, or have the ranks started here (launch.ranks)."
        )
    if (nodes := max(config.launch.max_nodes for config in configs)) > 1:
        raise ConfigError(
            f"-m asks for {len(configs)} runs one after the other, and {nodes} machines (launch.nodes) meet for one; "
            f"start each run by itself."
        )


@contextmanager
def _one_voice() -> Iterator[None]:
    """Ranks that something else started all find the same wrong, and the first of them says it. The others speak only
    if they are still there by then: torchrun ends them as soon as the first has ended.
    """
    try:
        yield
    except InputError:
        if joined_rank() > 0:
            time.sleep(_SECONDS_TO_SPEAK)
        raise


def _check(recipe: Recipe[C], config: C) -> None:
    """What can be found wrong before any rank starts."""
    if config.ranks_are == "started":
        check_machine(config.launch)
    _refuse_unused(config)
    refuse_remote(config.run_dir, "run_dir", "set checkpoint.remote to have what finetune saves uploaded.")
    if recipe.check is not None:
        recipe.check(config)


def _refuse_unused(config: RunConfig) -> None:
    """Nothing that is given is ignored."""
    schema = type(config)
    defaults = {name: value for name, _, value in walk(schema())}
    unused = [(name, value) for name, _, value in walk(config) if not is_used(schema, name)]
    given = [f"{name}={value}" for name, value in unused if value != defaults[name]]
    if given:
        raise ConfigError(f"{', '.join(given)} would do nothing: {config.command} does not use it. Leave it out.")


def _carry_out(recipe: Recipe[C], config: C) -> None:
    from fsdp_shard.config import write_config

    if config.ranks_are == "started":
        launch(recipe.perform, config, begin=write_config)
    else:
        if config.writes:
            write_config(config)
        recipe.perform(config)


_loaded: dict[Path, Recipe[Any]] = {}


def load_recipe(path: str | Path) -> Recipe[Any]:
    """The recipe in a Python file. InputError when there is none, or when the file cannot be loaded."""
    file = Path(path).resolve()
    if file in _loaded:
        return _loaded[file]
    if not file.is_file():
        raise InputError(f"{path} is not a file; give the path of a recipe, such as one that `fsdp-shard cp` made.")
    # As with `python FILE.py`, modules beside the recipe can be imported.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = f"fsdp_shard_recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; a recipe ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} could not be loaded: {type(error).__name__}: {error}.") from error
    found = [value for value in vars(module).values() if isinstance(value, Recipe)]
    if len(found) != 1:
        raise ConfigError(
            f"{path} has {len(found)} functions that are recipes and must have one: "
            f"decorate its main function with @recipe(...) from fsdp_shard.cli."
        )
    _loaded[file] = found[0]
    return found[0]
