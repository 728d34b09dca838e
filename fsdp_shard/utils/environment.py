"""The environment of this process: variables, the user's cache directory, optional packages, torch modes."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils.text import first_line


@contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and restore their previous values on exit."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def user_cache(name: str) -> Path:
    """Return the cache directory `name` of this user, below XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fsdp-shard" / name


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages `names` that are installed."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def require_package(module: str, extra: str, needed_by: str, alternative: str = "") -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        module: Top-level module of the package, such as `liger_kernel`.
        extra: Extra of fsdp-shard that installs it.
        needed_by: The setting or file that needs it, such as `adapter=lora`.
        alternative: What the user can do instead, such as `set adapter=none`.

    Raises:
        ConfigError: The package is not installed.
    """
    if find_spec(module) is None:
        instead = f", or {alternative}" if alternative else ""
        raise ConfigError(
            f"{needed_by} needs {module.replace('_', '-')}, which is not installed. Install it with "
            f"{install_command(extra)}{instead}."
        )


def install_command(extra: str) -> str:
    """The command that installs an extra of fsdp-shard in the same way and place as the package."""
    package = Path(__file__).resolve().parents[1]
    if (package / "_shipped").is_dir():  # from a wheel; pip uses the installed package even if no index has it
        return f"{_pip_install()} 'fsdp-shard[{extra}]'"
    checkout = package.parent
    return f"{_pip_install()} -e '{'.' if checkout == Path.cwd() else checkout}[{extra}]'"


def missing_file_system(shown: str, url: str, error: ImportError) -> ConfigError:
    """Return the error for an address that needs a package which fsspec lacks.

    Args:
        shown: The address as errors name it, such as `data.path=s3://bucket/a.txt`.
        url: The address.
        error: The exception of fsspec, which names the package.
    """
    advice = (
        f"Install it with {install_command('remote')}" if url.startswith("s3://") else first_line(error).rstrip(".")
    )
    return ConfigError(f"{shown} needs a package that is not installed. {advice}.")


def _pip_install() -> str:
    """`pip install` for the environment of this Python, which may not be that of the shell's pip."""
    python = Path(sys.executable)
    if find_spec("pip") is None:
        return f"uv pip install --python {python}"  # uv creates environments without pip
    found = shutil.which("pip")
    return "pip install" if found is not None and Path(found).parent == python.parent else f"{python} -m pip install"


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, and restore the number of threads on exit.

    Several threads would wait for each other in thousands of tiny operations, and OpenMP's do not survive a later fork.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_cudnn_attention() -> Iterator[None]:
    """Leave attention to torch's other kernels while a model generates.

    On Hopper, torch prefers cuDNN's, which needs a plan for each key length: with every new token, the host takes 20 ms
    to create one. Remove this once torch no longer creates a plan per length.
    """
    import torch

    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
