"""Turns functions into recipes: programs with a config that run alike under `fsdp-shard`, `python` and `torchrun`.

The config is composed and checked once, before any rank starts. Then RUN_DIR/config.yaml is written, unless the recipe
does so itself, and the function is called on every rank.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from fsdp_shard import checkpoint, config as configs
from fsdp_shard.cli.error_file import remove_error, write_error
from fsdp_shard.cli.exit import print_error, run_as_program, start_garbage_collection, wants_debug
from fsdp_shard.cli.machine_check import MachineCheck
from fsdp_shard.cli.sweep_table import refuse_other_sweep, refuse_shared, sweep_table, varied_settings
from fsdp_shard.distributed import check_machine, is_joined_rank, joined_rank, launch, may_restart
from fsdp_shard.errors import ConfigError, FsdpShardError, InputError, Interrupted, RunError
from fsdp_shard.training import lock_directory
from fsdp_shard.utils import RESULT, check_writable, first_line, is_out_of_memory, is_shipped, warnings_of

C = TypeVar("C", bound=configs.RunConfig)

_SECONDS_TO_REPORT = 20.0


def recipe(
    schema: type[C], *, check: Callable[[C], None] | None = None, writes_config: bool = False
) -> Callable[[Callable[[C], None]], Recipe[C]]:
    """Turn a function of a config into a recipe.

    Args:
        schema: A config dataclass of `fsdp_shard.config`, or a dataclass that extends one.
        check: Called with the config once before any rank starts; raises an InputError if a file named in the config is
            unsuitable.
        writes_config: The function itself writes RUN_DIR/config.yaml, once the directory is known to belong to this
            run.

    Returns:
        The decorator.

    Example:
        >>> @fs.recipe(fs.FinetuneConfig, check=fs.check_finetune, writes_config=True)  # doctest: +SKIP
        ... def main(config: fs.FinetuneConfig) -> None: ...
    """
    configs.command_of(schema)
    return lambda work: Recipe(schema, work, check, writes_config=writes_config)


class Recipe(Generic[C]):
    """A function of a config that can be run as a program: `main()` reads the command line and exits the process.

    Args:
        schema: Config dataclass of the function.
        work: The function.
        check: Checks the config before any rank starts.
        writes_config: See `recipe`.
    """

    def __init__(
        self,
        schema: type[C],
        work: Callable[[C], None],
        check: Callable[[C], None] | None = None,
        *,
        writes_config: bool = False,
    ) -> None:
        self.schema, self.work, self._check, self.writes_config = schema, work, check, writes_config
        self.file = Path(work.__code__.co_filename).resolve()
        self.__doc__ = work.__doc__

    def __call__(self) -> None:
        """Run as a program, with the command line of this process."""
        arguments = sys.argv[1:]
        run_as_program(lambda: self.run(arguments, Path(sys.argv[0]).name), debug=wants_debug(arguments))

    def run(self, arguments: Sequence[str], program: str) -> None:
        """Compose the configs that `arguments` define, check them all, and then run them one by one."""
        run_jobs(self.schema, lambda: self, arguments, program)

    def check(self, config: C) -> None:
        """Check the files named in `config`; raise InputError if one is unsuitable."""
        if self._check is not None:
            with _siblings_importable(self.file):
                self._check(config)

    def run_on_rank(self, config: C) -> None:
        """Do the work of one rank. Raises RunError if its memory is exhausted."""
        with _siblings_importable(self.file):
            try:
                self.work(config)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise RunError(
                    f"Rank {joined_rank()} is out of memory: {first_line(error).rstrip('.')}. {config.for_less_memory} "
                    f"debug=true or --debug shows where it happened."
                ) from error

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A started rank finds the recipe by its file: `main` of that module is this object, not the bare function.
        return load_recipe, (str(self.file),)


def run_jobs(
    schema: type[C],
    find: Callable[[], Recipe[C]],
    arguments: Sequence[str],
    program: str,
    *,
    owns_process: bool = True,
    settle: Callable[[C], None] = lambda config: None,
) -> list[configs.Job[C]]:
    """Run the jobs that `arguments` define for a recipe. A failed run of a sweep does not stop the others.

    Args:
        schema: Config dataclass of the recipe.
        find: Returns the recipe; called after the configs have been composed, so a wrong config does not import torch.
        arguments: Overrides and flags.
        program: Name of the program in messages.
        owns_process: Whether this process runs nothing else: of several ranks that find the same mistake, one reports
            it, and ranks may be forked from it.
        settle: Called with each config before its check; may change settings left at their default.

    Returns:
        The jobs.

    Raises:
        RunError: Runs of a sweep failed.
    """
    one_report = _first_rank_reports if owns_process else nullcontext
    if {"-h", "--help"} & set(arguments):
        # Hydra's own help takes seconds: it copies the whole ConfigStore for each group that it lists.
        print(configs.help_text(schema, program))
        return []
    with one_report():
        jobs = configs.compose_jobs(schema, [argument for argument in arguments if argument != "--debug"], program)
        for job in jobs:
            job.config.debug |= "--debug" in arguments
            settle(job.config)
        if len(jobs) > 1:
            _check_sweep(schema, jobs)
            refuse_shared(jobs)
        if joined_rank() == 0:
            for line in dict.fromkeys(line for job in jobs for line in warnings_of(job.config)):
                print(line, file=sys.stderr, flush=True)
        if not jobs:
            return jobs
        recipe = find()
        is_joined = schema.rank_mode == "started" and is_joined_rank(jobs[0].config.launch)
        if not is_joined:  # otherwise, one rank of each machine checks the job
            for job in jobs:
                _check(recipe, job.config)
        if len(jobs) > 1:
            refuse_other_sweep(jobs)
    if owns_process:
        start_garbage_collection()
    if len(jobs) > 1:
        _run_sweep(recipe, jobs)
        return jobs
    with one_report() if is_joined else nullcontext():
        _run_job(recipe, jobs[0].config, may_fork=owns_process)
    return jobs


def _run_sweep(recipe: Recipe[C], jobs: Sequence[configs.Job[C]]) -> None:
    """Run all jobs one by one, and print their figures as a table; raise RunError if any failed."""
    failed: list[str] = []
    for number, (job, changed) in enumerate(zip(jobs, varied_settings(jobs), strict=True), start=1):
        settings = " ".join(f"{name}={value}" for name, value in changed.items())
        print(f"[{number}/{len(jobs)}] {settings} -> {job.config.run_dir}", flush=True)
        try:
            _run_job(recipe, job.config)
        except FsdpShardError as error:
            if isinstance(error, Interrupted):
                raise
            failed.append(job.config.run_dir)
            print_error(error, job.config.debug)
        gc.collect()  # reference cycles hold the job's model and optimizer, whose memory the next job needs
    print(f"\n{sweep_table(jobs, failed)}", flush=True)
    if failed:
        raise RunError(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}.")


def _check_sweep(schema: type[C], jobs: Sequence[configs.Job[C]]) -> None:
    """Reject a sweep whose ranks cannot go on together after a failed run."""
    if schema.rank_mode != "started":
        return
    if any(is_joined_rank(job.config.launch) for job in jobs):
        raise ConfigError(
            f"-m would run {len(jobs)} jobs one after the other, but ranks that torchrun or srun has started cannot "
            f"continue together after a failed run; start each run separately, or have fsdp-shard start the ranks "
            f"(launch.ranks)."
        )
    if (nodes := max(job.config.launch.max_nodes for job in jobs)) > 1:
        raise ConfigError(
            f"-m would run {len(jobs)} jobs one after the other, but {nodes} machines (launch.nodes) meet only once; "
            f"start each run separately."
        )


@contextmanager
def _first_rank_reports() -> Iterator[None]:
    """Let only the first of several ranks report wrong input, which the others also find or are notified of.

    The others report it only if they are still running after a while: torchrun ends them as soon as the first has
    exited. A rank that was only notified of a failure exits later, so that it does not end a rank that has yet to
    report.
    """
    try:
        yield
    except InputError:
        if joined_rank() > 0:
            time.sleep(_SECONDS_TO_REPORT)
        raise
    except SystemExit:
        time.sleep(2 * _SECONDS_TO_REPORT)
        raise


def _check(recipe: Recipe[C], config: C) -> None:
    """Find mistakes before any rank starts."""
    if config.rank_mode == "started":
        check_machine(config.launch)
    if config.writes and not config.takes_training_run:
        _refuse_training_run(config)
    if config.kept_run_dir is not None:
        configs.refuse_nested(config)
        check_writable(config.run_dir, f"run_dir={config.run_dir}")
    trains = config.takes_training_run and config.rank_mode == "started"
    if trains and config.is_default_run_dir and may_restart(config.launch):
        raise ConfigError(
            "torchrun --max-restarts starts failed ranks again, and a run_dir named by date would be another one each "
            "time, in which the run begins anew; set run_dir=DIRECTORY, in which it continues."
        )
    recipe.check(config)


def _refuse_training_run(config: configs.RunConfig) -> None:
    latest = checkpoint.StepStore(Path(config.run_dir) / checkpoint.CHECKPOINTS).latest()
    if latest is not None:
        raise ConfigError(
            f"run_dir={config.run_dir} is the directory of a training run, with checkpoints up to step {latest}, and "
            f"{config.command} would replace its {checkpoint.CONFIG_FILE} and {RESULT}; give another run_dir."
        )


def _run_job(recipe: Recipe[C], config: C, *, may_fork: bool = True) -> None:
    """Run one job in its locked run directory; if it fails, its error is recorded there."""
    if not is_shipped(recipe.file):
        config.own_recipe = recipe.file.name
    with _recorded_failure(config), _lock(config):
        _start_ranks(recipe, config, may_fork=may_fork)


@contextmanager
def _recorded_failure(config: configs.RunConfig) -> Iterator[None]:
    """Write an error of the block to the run directory; remove the directory if the config was rejected at once."""
    named = config.run_dir
    missing = _missing_directories(Path(named).absolute())
    before = _last_write(config)
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if isinstance(error, InputError) and joined_rank() == 0:
            _remove_made(missing if config.run_dir == named else [Path(config.run_dir).absolute()])
        is_at_once = isinstance(error, InputError) and _last_write(config) == before
        if not is_at_once and config.rank_mode != "planned":
            write_error(config.run_dir, error)
        raise


@contextmanager
def _lock(config: configs.RunConfig) -> Iterator[None]:
    """Keep other commands out of a given run directory; training does so itself, in rank 0."""
    is_shared = config.launch.max_nodes > 1 or joined_rank() > 0
    if config.takes_training_run or config.kept_run_dir is None or config.is_default_run_dir or is_shared:
        yield
        return
    with ExitStack() as locked:
        try:
            locked.enter_context(lock_directory(config.run_dir))
        except OSError as error:
            raise configs.not_writable(config.run_dir, error) from error
        yield


def _start_ranks(recipe: Recipe[C], config: C, *, may_fork: bool) -> None:
    """Start the ranks of a job and wait for them; a recipe without ranks runs in this process."""
    if joined_rank() == 0 and config.rank_mode != "planned":  # the run_dir of plan and doctor is that of another run
        remove_error(config.run_dir)
    if config.rank_mode == "started":
        begin = partial(_make_run_dir, writes_config=recipe.writes_config)
        check: MachineCheck[C] = MachineCheck(lambda config: _check(recipe, config))
        launch(recipe.run_on_rank, config, check=check, begin=begin, may_fork=may_fork)
    else:
        if not recipe.writes_config:
            _make_run_dir(config)
        recipe.run_on_rank(config)


def _last_write(config: configs.RunConfig) -> int:
    """The time at which settings were last written to the run directory, in nanoseconds; 0 if never."""
    try:
        return (Path(config.run_dir) / checkpoint.CONFIG_FILE).stat().st_mtime_ns
    except OSError:
        return 0


def _missing_directories(run_dir: Path) -> list[Path]:
    """The run directory and its missing parents, innermost first."""
    return list(takewhile(lambda path: not path.exists(), (run_dir, *run_dir.parents)))


def _remove_made(directories: Sequence[Path]) -> None:
    """Remove directories created for a rejected config, unless they contain more than the config."""
    for number, directory in enumerate(directories):
        names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
        if names - ({checkpoint.CONFIG_FILE} if number == 0 else set()):
            return
        for name in names:
            (directory / name).unlink(missing_ok=True)
        if directory.is_dir():
            directory.rmdir()


def _make_run_dir(config: configs.RunConfig, *, writes_config: bool = False) -> None:
    """Create the run directory, with its config.yaml unless the recipe `writes_config` later."""
    try:
        # With several machines, ranks that are restarted continue in the directory named after the time of the start.
        if config.is_default_run_dir and config.kept_run_dir is not None and config.launch.max_nodes == 1:
            config.run_dir = _new_directory(config.run_dir)
        if writes_config:
            Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        else:
            configs.write_config(config)
    except OSError as error:
        raise configs.not_writable(config.run_dir, error) from error


def _new_directory(path: str) -> str:
    """Create `path`, or `path`_2 and so on if another run began in the same second; return the created one."""
    created, number = Path(path), 1
    while True:
        try:
            created.mkdir(parents=True)
        except FileExistsError:
            if not created.is_dir():
                raise
            number += 1
            created = Path(f"{path}_{number}")
        else:
            return str(created)


_loaded: dict[Path, Recipe[Any]] = {}


def load_recipe(path: str | Path) -> Recipe[Any]:
    """Load the recipe in a Python file.

    As with `python FILE.py`, it can import modules from its directory, both while it is loaded and while it runs.

    Args:
        path: The file.

    Returns:
        The recipe: the one function in the file that is decorated with `@recipe(...)`.

    Raises:
        InputError: The file does not exist, cannot be loaded, or does not have exactly one recipe.
    """
    file = Path(path).resolve()
    if file in _loaded:
        return _loaded[file]
    if not file.is_file():
        raise InputError(f"{path} is not a file; give the path of a recipe, such as a copy made with `fsdp-shard cp`.")
    name = f"fsdp_shard_recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; the name of a recipe ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _siblings_importable(file):
            spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} could not be loaded: {type(error).__name__}: {error}.") from error
    found = [value for value in vars(module).values() if isinstance(value, Recipe)]
    if len(found) != 1:
        raise ConfigError(
            f"{path} has {len(found)} functions that are recipes and must have exactly one: decorate its main function "
            f"with @fs.recipe(...), where fs is fsdp_shard."
        )
    _loaded[file] = found[0]
    return found[0]


@contextmanager
def _siblings_importable(file: Path) -> Iterator[None]:
    """Make the modules in a recipe's directory importable within the block.

    Those of shipped recipes come last: `recipes/evaluate.py` is not the `evaluate` of Hugging Face, which
    lm-evaluation-harness imports.
    """
    sys.path.insert(len(sys.path) if is_shipped(file) else 0, str(file.parent))
    try:
        yield
    finally:
        sys.path.remove(str(file.parent))
