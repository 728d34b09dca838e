"""Where ranks come from: started here, by torchrun, by srun, on several machines; and what is heard of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from torch.numa.binding import AffinityMode, NumaOptions

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.distributed import (
    LaunchConfig,
    describe_missing_numactl,
    hardware,
    init_distributed,
    launch,
    launcher,
    local_workers,
    num_cores,
)
from fsdp_shard.distributed.launcher import check_machine
from fsdp_shard.distributed.local_workers import numa_options
from fsdp_shard.distributed.rank_reports import AttemptDirectory, RankFailure, first_cause, reports_directory
from fsdp_shard.distributed.signals import Stopped
from fsdp_shard.distributed.started_ranks import first_node, joins, slurm_variables
from fsdp_shard.errors import ConfigError, DataError, Interrupted, LossError, RankError, RunError
from tests.support.commands import OWN_RECIPE, environment, hear_signals, run
from tests.support.ranks import Launched

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
_SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}

# Who this process is


@pytest.mark.parametrize(
    ("environment", "settings", "expected"),
    [
        ({}, LaunchConfig(), False),
        (_TORCHRUN, LaunchConfig(), True),
        (_TORCHRUN, LaunchConfig(ranks=4), True),
        ({"WORLD_SIZE": "2", "RANK": "0"}, LaunchConfig(), False),  # as some schedulers set for machines
        (_SRUN, LaunchConfig(), True),
        (_SRUN, LaunchConfig(ranks=4), True),
        (_SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, LaunchConfig(ranks=4), False),  # one task a machine, ranks started here
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, LaunchConfig(ranks=4), False),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, LaunchConfig(nodes="1:4", rendezvous="a:1"), False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, LaunchConfig(), True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, LaunchConfig(), False),
    ],
)
def test_a_rank_that_others_started_joins_them(
    environment: dict[str, str], settings: LaunchConfig, expected: bool
) -> None:
    assert joins(settings, environment) is expected


def test_how_ranks_are_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked, until this process has computed: its threads would be missing. As many threads as the user says."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(launcher, "_has_computed", Event())
    monkeypatch.setattr(
        "fsdp_shard.distributed.local_workers.run_ranks",
        lambda *_, **given: asked.append((given["start_method"], given["num_threads"])),
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, two = (
        FinetuneConfig(run_dir=str(tmp_path), launch=LaunchConfig(ranks=ranks, device="cpu")) for ranks in (1, 2)
    )
    for config in (two, one, two):
        launcher.launch(lambda _: None, config)
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    launcher.launch(lambda _: None, two)
    share = max(1, num_cores() // 2)
    assert asked == [("fork", share), ("spawn", share), ("spawn", 7)]


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}])
def test_the_only_rank_waits_for_no_others(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some schedulers set WORLD_SIZE to the number of machines; what is set afterwards is as it was."""
    monkeypatch.setattr(launcher, "_has_computed", Event())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: list[tuple[int, int]] = []

    def work(config: FinetuneConfig) -> None:
        with init_distributed("cpu", timeout_seconds=config.launch.timeout_seconds) as context:
            found.append((context.rank, context.world_size))

    launch(work, FinetuneConfig(launch=LaunchConfig(device="cpu", timeout_seconds=2)))
    assert found == [(0, 1)]
    assert {name: os.environ.get(name) for name in variables} == variables


@pytest.mark.long
def test_tasks_that_nobody_has_started_are_not_waited_for_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"Not all of the 2 ranks connected to .*SLURM_NTASKS=2 .* start it with srun"):
        launch(lambda _: None, FinetuneConfig(run_dir=str(tmp_path), launch=LaunchConfig(timeout_seconds=1)))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(RunError, match=r"Not all of the 2 ranks connected to .* Check that all of them were started"):
        launch(lambda _: None, FinetuneConfig(run_dir=str(tmp_path), launch=LaunchConfig(timeout_seconds=1)))


def test_slurm_variables_become_those_of_torchrun() -> None:
    slurm = _SRUN | {"SLURM_STEP_NODELIST": "gpu[007-011,42]", "SLURM_JOB_ID": "12345"}
    assert slurm_variables(slurm) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "22345",
    }
    assert slurm_variables(slurm | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] == "22446"  # beside step 0 of the same job
    assert slurm_variables(slurm | {"MASTER_PORT": "5"})["MASTER_PORT"] == "5"
    with pytest.raises(ConfigError, match="SLURM_JOB_ID=x is not a number"):
        slurm_variables(slurm | {"SLURM_JOB_ID": "x"})
    assert slurm_variables(slurm | _TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}) == {}
    assert slurm_variables(slurm | {"WORLD_SIZE": "8", "RANK": "3"})["LOCAL_RANK"] == "1"
    lone = {**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}
    for name, variables in (("WORLD_SIZE", {"WORLD_SIZE": "2"}), ("RANK", {"RANK": "0"}), ("WORLD_SIZE", lone)):
        with pytest.raises(
            ConfigError, match=f"{name}=[012], but srun started .*=8 tasks, and this is task 3; unset {name}"
        ):
            slurm_variables(slurm | variables)
    assert slurm_variables(slurm | lone | {"WORLD_SIZE": "32"}) == {}, "each task has started some of them"
    # Of an allocation, in which srun has started nothing.
    assert slurm_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "WORLD_SIZE": "1"})["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("tasks", "node", "own"), [("8", None, "8"), ("8(x2),4", "1", "8"), ("8(x2),4", "2", "4"), ("8(x2)", None, None)]
)
def test_slurm_says_how_many_ranks_a_machine_has(tasks: str, node: str | None, own: str | None) -> None:
    """Else each would take its part of a machine's memory and GPUs for that of one among all ranks."""
    slurm = _SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks} | ({} if node is None else {"SLURM_NODEID": node})
    assert slurm_variables(slurm).get("LOCAL_WORLD_SIZE") == own


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[07,09-11].lan,m2", "n07.lan"),
        ("x-1[3]", "x-13"),
        ("a,n[1-2]", "a"),
        ("r[1-2]n[04-08],b", "r1n04"),
    ],
)
def test_the_first_of_a_node_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_the_world_is_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.world_sizes(LaunchConfig(ranks=3, nodes="2")) == [6]
    for name, value in _TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launcher.world_sizes(LaunchConfig(ranks=3, nodes="2")) == [2]
    assert launcher.joined_rank() == 1


# Whether the machine has a place for the ranks


@pytest.mark.parametrize(
    ("num_gpus", "settings", "said"),
    [
        (0, LaunchConfig(device="cuda"), "torch finds no GPU;"),
        (2, LaunchConfig(ranks=3), "launch.ranks=3 is more than the 2 GPU"),
        (2, LaunchConfig(ranks=3, device="cuda"), "use launch.ranks=2, or launch.device=cpu"),
        (0, LaunchConfig(ranks=64), ""),
        (2, LaunchConfig(ranks=64, device="cpu"), ""),
        (2, LaunchConfig(ranks=2), ""),
        (2, LaunchConfig(ranks=2, nodes="2", rendezvous="a:1"), ""),
    ],
)
def test_more_ranks_than_gpus(
    num_gpus: int, settings: LaunchConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "count_gpus", lambda: num_gpus)
    if not said:
        check_machine(settings)
        return
    with pytest.raises(ConfigError, match=said):
        check_machine(settings)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_the_processes_of_mpirun_are_no_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=rf"mpirun has started 4 processes \({name}\), and each would begin a run"):
        check_machine(LaunchConfig(device="cpu"))
    check_machine(LaunchConfig(nodes="4", rendezvous="a:1", device="cpu"))  # each starts the ranks of its machine
    for slurm in ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}):
        with monkeypatch.context() as of_slurm:
            for variable, value in slurm.items():
                of_slurm.setenv(variable, value)
            with pytest.raises(ConfigError, match="mpirun has started 4 processes"):
                check_machine(LaunchConfig(device="cpu"))
    with monkeypatch.context() as tasks:  # of srun --mpi=pmi2
        tasks.setenv("SLURM_PROCID", "0")
        tasks.setenv("SLURM_STEP_NUM_TASKS", "4")
        check_machine(LaunchConfig(device="cpu"))
    for variable, value in (_TORCHRUN | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(variable, value)
    check_machine(LaunchConfig(device="cpu"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            LaunchConfig(nodes="3", rendezvous="a:1"),
            "launch.rendezvous=a:1 has no effect on ranks that torchrun or srun",
        ),
        (LaunchConfig(max_restarts=3), "launch.max_restarts=3 has no effect on ranks that torchrun or srun"),
        (LaunchConfig(grace_seconds=1), "launch.grace_seconds=1 has no effect: it is for ranks that fsdp-shard starts"),
        (LaunchConfig(numa_binding="node"), "launch.numa_binding=node has no effect: it is for ranks that fsdp-shard"),
        (LaunchConfig(ranks=3), "launch.ranks=3, but torchrun or srun has started 8, 4 of them on this machine"),
        (LaunchConfig(ranks=4, numa_binding="none", timeout_seconds=3), ""),
        (LaunchConfig(ranks=8), ""),
    ],
)
@pytest.mark.parametrize("starter", ["torchrun", "srun"])
def test_settings_for_ranks_that_others_started(
    starter: str, settings: LaunchConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_srun = _SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "0"}
    monkeypatch.setattr(launcher, "count_gpus", lambda: 8)
    variables = of_srun if starter == "srun" else _TORCHRUN | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not said:
        check_machine(settings)
        return
    with pytest.raises(ConfigError, match=said):
        check_machine(settings)


def test_settings_for_started_ranks_with_one_in_this_process() -> None:
    with pytest.raises(ConfigError, match=r"launch\.grace_seconds=1 has no effect"):
        check_machine(LaunchConfig(grace_seconds=1))
    check_machine(LaunchConfig(grace_seconds=1, max_restarts=1))
    check_machine(LaunchConfig(grace_seconds=1, ranks=2, device="cpu"))


def _install_numactl(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs be found in `directory` only, where numactl is."""
    program = directory / "numactl"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(directory))


def test_ranks_are_bound_to_the_processors_near_their_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_numactl(tmp_path, monkeypatch)
    assert numa_options(LaunchConfig()) is None, "no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    auto, node = (numa_options(LaunchConfig(numa_binding=binding)) for binding in ("auto", "node"))
    assert auto == NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert node == NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=False)
    for unbound in (LaunchConfig(numa_binding="none"), LaunchConfig(device="cpu")):
        assert numa_options(unbound) is None


def test_without_numactl_ranks_are_not_bound_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prints two tracebacks for each rank; with one NUMA node there is nothing to say."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hardware, "_NUMA_NODES", tmp_path)
    monkeypatch.setenv("FSDP_SHARD_ATTEMPT", "1")
    auto, node = LaunchConfig(ranks=2), LaunchConfig(ranks=2, numa_binding="node")
    check_machine(auto)
    assert numa_options(auto) is None
    with pytest.raises(ConfigError, match=r"launch\.numa_binding=node needs the program numactl, which is not in"):
        check_machine(node)
    (tmp_path / "node0").mkdir()
    assert describe_missing_numactl(auto) == []
    (tmp_path / "node1").mkdir()
    (line,) = describe_missing_numactl(auto)
    assert line.startswith("launch.numa_binding=auto binds no rank to the processors near its GPU: the program numactl")
    assert describe_missing_numactl(LaunchConfig(ranks=2, device="cpu")) == []
    _install_numactl(tmp_path, monkeypatch)
    assert describe_missing_numactl(auto) == []
    check_machine(node)
    monkeypatch.delenv("FSDP_SHARD_ATTEMPT")
    monkeypatch.setenv("PATH", "")
    assert describe_missing_numactl(auto) == [], "started by others"


@pytest.mark.skipif(torch.version.cuda is not None, reason="asks torch about a GPU, which one without CUDA refuses")
def test_what_binding_raises_before_a_rank_works_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=False)
    monkeypatch.setattr(local_workers, "numa_options", lambda settings: options)
    run = Launched(str(tmp_path), LaunchConfig(ranks=2, device="cpu"))
    with pytest.raises(RankError) as raised:
        launch(lambda config: None, run)
    said = (
        r"Rank \d ended with exit status 1, before its work began: AssertionError: Torch not compiled with CUDA enabled"
    )
    assert re.match(rf"{said}\. The other", str(raised.value)), raised.value


# What is heard of ranks that failed


def _report(rank: int, kind: str, message: str, when: float, status: int = 1) -> RankFailure:
    return RankFailure(rank, kind, message, status, f"Traceback of {rank}", when)


def test_a_report_is_whole_or_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank may be killed while it writes it, and its disk may be full."""
    directory, report = AttemptDirectory.create(tmp_path, "1"), _report(1, "StorageError", "Make room.", 2.0)
    directory.write(report)
    (directory.path / "rank-0.new").write_text("{")
    assert directory.reports() == [report]
    shutil.rmtree(directory.path)
    directory.write(report)
    assert "Rank 1: StorageError: Make room. (not reported: " in capsys.readouterr().err


_LOST = "[gloo] Connection closed by peer [127.0.0.1]:35435"


def test_the_first_failure_is_the_cause() -> None:
    reports = [_report(1, "DataError", "no rows", 1.0, 2), _report(0, "RuntimeError", _LOST, 2.0)]
    error = first_cause(reports, (0, "ended with exit status 1"), {0, 1})
    assert type(error) is DataError
    assert str(error) == "no rows"
    assert isinstance(error.__cause__, RankError)
    assert error.__cause__.traceback == "Traceback of 1"


def test_a_stop_that_followed_a_failure_is_not_the_cause() -> None:
    reports = [_report(0, "Interrupted", "Stopped by SIGTERM.", 1.0, 143), _report(1, "LossError", "NaN", 2.0)]
    assert type(first_cause(reports, (0, "ended with exit status 143"), {0, 1})) is LossError


def test_a_rank_that_says_nothing_is_the_cause_where_the_others_lost_it() -> None:
    error = first_cause([_report(0, "RuntimeError", _LOST, 1.0)], (0, "ended with exit status 1"), {0, 1})
    assert str(error).startswith("Rank 1 exited without an error; it may have been killed by the out-of-memory killer")
    error = first_cause([_report(0, "RuntimeError", _LOST, 1.0)], (1, "was killed by SIGKILL"), {0, 1})
    assert str(error) == "Rank 1 was killed by SIGKILL. The other ranks were stopped."
    error = first_cause([], (1, "was killed by SIGSEGV"), set())
    assert str(error) == "Rank 1 was killed by SIGSEGV. The other ranks were stopped."


def test_a_failure_before_a_kill_is_the_cause() -> None:
    # A rank that hangs in a collective after another has failed is killed in the end, and says nothing.
    error = first_cause([_report(0, "ValueError", "wrong", 1.0)], (0, "ended with exit status 1"), {0, 1})
    assert str(error) == "Rank 0 raised ValueError: wrong."
    assert isinstance(error, RankError)
    assert error.traceback == "Traceback of 0"


def test_a_stop_that_python_wraps_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.11 does where a class is defined, in the middle of an import."""

    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            raise Stopped(signal.SIGTERM)

    monkeypatch.setenv("RANK", "1")
    try:
        type("Owner", (), {"field": Field()})
    except BaseException as error:
        found = RankFailure.of(error)
    assert (found.kind, found.message, found.exit_status) == ("Interrupted", "Stopped by SIGTERM.", 143)


def test_ranks_that_all_stopped_were_interrupted() -> None:
    reports = [_report(rank, "Interrupted", "Saved.", rank, 138) for rank in (0, 1)]
    error = first_cause(reports, (0, "ended with exit status 138"), {0, 1})
    assert isinstance(error, Interrupted)
    assert (str(error), error.exit_status) == ("Saved.", 138)


# Real ranks

_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.distributed.local_workers import run_ranks
from fsdp_shard.errors import FsdpShardError

def work(config):
    here, attempt, rank = config.run_dir, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    (Path(here) / f"attempt-{{attempt}}-rank-{{rank}}").write_text(os.environ["OMP_NUM_THREADS"])
    {body}

if __name__ == "__main__":
    settings = dict(ranks=2, grace_seconds=60, timeout_seconds=60, start_method="fork") | dict({settings})
    start_method = settings.pop("start_method")
    os.environ["OMP_NUM_THREADS"] = "3"  # is for what comes after, not for these ranks
    try:
        config = SimpleNamespace(run_dir=sys.argv[1], launch=LaunchConfig(**settings), debug=False)
        run_ranks(work, config, start_method=start_method, num_threads=1)
    except FsdpShardError as error:
        print(f"{{type(error).__name__}}: {{error}}")
    assert os.environ["OMP_NUM_THREADS"] == "3"
"""


def _program(place: Path, body: str, settings: str = "") -> list[str]:
    (place / "program.py").write_text(textwrap.dedent(_PROGRAM).format(body=body, settings=settings))
    return [sys.executable, "program.py", str(place)]


@pytest.mark.long
def test_a_program_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    """A spawned rank imports the program; forked ones do not, but `fs.finetune` forks none."""
    (tmp_path / "program.py").write_text(
        "from fsdp_shard import FinetuneConfig\n"
        "from fsdp_shard.distributed import LaunchConfig, launch\n"
        f"config = FinetuneConfig(run_dir={str(tmp_path)!r}, launch=LaunchConfig(ranks=2, device='cpu'))\n"
        "launch(print, config, may_fork=False)\n"
    )
    done = run([sys.executable, "program.py"], tmp_path)
    assert re.search(r"ConfigError: A rank imports \S+/program\.py, which starts ranks as soon as it is", done.err)
    assert re.search(r"RankError: Rank \d ended with exit status 1, before its work began; see its error", done.err)


def test_loggers_of_torch_are_left_as_they_were(tmp_path: Path) -> None:
    """Its launcher's loggers are disabled while ranks run only: the caller may want them afterwards."""
    program = (tmp_path / "check.py").resolve()
    program.write_text(
        "import logging\n"
        "from types import SimpleNamespace\n"
        "from fsdp_shard.distributed import LaunchConfig\n"
        "from fsdp_shard.distributed.local_workers import run_ranks\n"
        "config = SimpleNamespace(run_dir='run', launch=LaunchConfig(ranks=1), debug=False)\n"
        "work = lambda config: print(config.run_dir)\n"
        "run_ranks(work, config, start_method='fork', num_threads=1)\n"
        "names = [name for name in logging.root.manager.loggerDict if name.startswith('torch.distributed')]\n"
        "assert names and not any(logging.getLogger(name).disabled for name in names), names\n"
    )
    done = run([sys.executable, str(program)], tmp_path)
    assert (done.status, done.out, done.err) == (0, "run\n", "")


@pytest.mark.long
def test_a_stop_that_torch_sees_before_us_is_no_reason_to_restart(tmp_path: Path) -> None:
    """Between our look at the ranks and torch's own, both may end."""
    command = _program(
        tmp_path, "raise Interrupted('Stopped after step 6.', signal_number=15)", "max_restarts=2, grace_seconds=1"
    )
    program = tmp_path / "program.py"
    blind = "from fsdp_shard.distributed import agent\nfrom fsdp_shard.errors import Interrupted\n"
    blind += "agent._exit_status = lambda pid: None\n"
    program.write_text(program.read_text().replace("def work(", f"{blind}\ndef work(", 1))
    done = run(command, tmp_path)
    assert (done.status, done.out) == (0, "Interrupted: Stopped after step 6.\n"), done.err
    assert {file.name for file in tmp_path.glob("attempt-*")} == {"attempt-0-rank-0", "attempt-0-rank-1"}


@pytest.mark.long
def test_a_stop_while_ranks_are_forked_is_not_lost(tmp_path: Path) -> None:
    """Libraries close their connections around a fork, and Python swallows what a handler raises there."""
    command = _program(tmp_path, "time.sleep(100)", "grace_seconds=1")
    program = tmp_path / "program.py"
    stop = "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))"
    program.write_text(program.read_text().replace("def work(", f"import os, signal\n{stop}\n\ndef work(", 1))
    done = run(command, tmp_path)
    assert (done.status, done.out, done.err) == (0, "Interrupted: Stopped by SIGTERM.\n", "")


@pytest.mark.long
def test_ranks_can_be_spawned_as_gpus_need(tmp_path: Path) -> None:
    done = run(_program(tmp_path, "pass", "start_method='spawn'"), tmp_path)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert {file.name for file in tmp_path.glob("attempt-*")} == {"attempt-0-rank-0", "attempt-0-rank-1"}
    assert (tmp_path / "attempt-0-rank-1").read_text() == "1"


def test_no_rank_begins_before_all_are_forked(tmp_path: Path) -> None:
    """One that came to the store meanwhile could leave another with the resolver locked: a hang at the start."""
    body = """
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    (Path(here) / f"times-{rank}").write_text(f"{ticks / os.sysconf('SC_CLK_TCK')} {began}")
    """
    done = run(_program(tmp_path, body, "ranks=12"), tmp_path)
    assert (done.out, done.err) == ("", "")
    times = [[float(part) for part in file.read_text().split()] for file in tmp_path.glob("times-*")]
    assert len(times) == 12
    assert min(began for _, began in times) > max(forked for forked, _ in times)


def test_a_recipe_can_be_sent_to_a_spawned_rank(tmp_path: Path) -> None:
    import pickle

    from fsdp_shard.cli import load_recipe

    found = load_recipe(OWN_RECIPE)
    again = pickle.loads(pickle.dumps(found.run_on_rank))
    assert again.__self__.file == OWN_RECIPE
    assert again.__self__.work.__name__ == "main"


@pytest.mark.long
def test_a_failed_run_is_started_again_as_often_as_asked(tmp_path: Path) -> None:
    body = "if attempt == '0' and rank == '1': raise ValueError('once')"
    done = run(_program(tmp_path, body, "max_restarts=1"), tmp_path)
    assert (done.out, done.err) == ("", "")
    assert (tmp_path / "attempt-1-rank-0").exists()
    done = run(_program(tmp_path, body), tmp_path)
    assert done.out == "RankError: Rank 1 raised ValueError: once.\n"


@pytest.mark.long
def test_the_last_attempt_is_the_one_that_is_told_of(tmp_path: Path) -> None:
    body = "if rank == str(1 - int(attempt)): raise ValueError(f'attempt {attempt}')"
    done = run(_program(tmp_path, body, "max_restarts=1"), tmp_path)
    assert done.out == "RankError: Rank 0 raised ValueError: attempt 1.\n"


@pytest.mark.long
def test_ranks_that_do_not_stop_are_killed_after_their_grace(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (Path(here) / f'deaf-{rank}').touch(); time.sleep(100)"
    program = _program(tmp_path, body, "grace_seconds=1")
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(), preexec_fn=hear_signals
    )
    while len(list(tmp_path.glob("deaf-*"))) < 2:
        time.sleep(0.02)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert 1 <= time.monotonic() - start < 30
    assert out == "Interrupted: Stopped by SIGTERM.\n"


def test_ranks_that_end_their_work_after_a_signal_are_not_waited_for(tmp_path: Path) -> None:
    """They wait for the launcher, which waited for them as long as it waits for ranks that work, and killed them."""
    body = """
    signal.signal(signal.SIGTERM, lambda number, frame: (Path(here) / f'heard-{rank}').touch())
    (Path(here) / f'working-{rank}').touch()
    while not (Path(here) / f'heard-{rank}').exists():
        time.sleep(0.02)
    """
    program = _program(tmp_path, body, "grace_seconds=100")
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(), preexec_fn=hear_signals
    )
    while len(list(tmp_path.glob("working-*"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == ""
    assert len(list(tmp_path.glob("heard-*"))) == 2


@pytest.mark.long
def test_a_frozen_rank_is_found_and_the_next_attempt_meets_none_of_its_keys(tmp_path: Path) -> None:
    body = """
    from fsdp_shard.distributed import init_distributed
    with init_distributed("cpu", timeout_seconds=1000) as context:  # the others would wait for longer than this test
        if attempt == "0" and rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        (Path(here) / f"met-{attempt}-{rank}").write_text(str(context.all_gather_object(rank)))
    """
    done = run(_program(tmp_path, body, "max_restarts=1, timeout_seconds=6"), tmp_path)
    assert (done.out, done.err) == ("", "")
    assert sorted(file.name for file in tmp_path.glob("met-*")) == ["met-1-0", "met-1-1"]
    done = run(_program(tmp_path, body, "timeout_seconds=6"), tmp_path)
    assert done.out.startswith("RankError: Rank 1 sent no heartbeat for 4.5 s (of launch.timeout_seconds=6) and")


def test_what_would_fail_again_is_not_started_again(tmp_path: Path) -> None:
    body = "from fsdp_shard.errors import DataError\n    raise DataError('no rows')"
    done = run(_program(tmp_path, body, "max_restarts=3"), tmp_path)
    assert done.out == "DataError: no rows\n"
    assert not list(tmp_path.glob("attempt-1-*"))


@pytest.mark.long
def test_ranks_that_hang_when_another_has_died_are_killed(tmp_path: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == "1":
        (Path(here) / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
    """
    done = run(_program(tmp_path, body), tmp_path)
    assert done.out.startswith("RankError: Rank 1 was killed by SIGKILL")
    assert time.time() - (tmp_path / "died").stat().st_mtime < 29  # torch would wait for 30 s


@pytest.mark.parametrize("nodes", ["0", "3:2", "2:", "a", "1:4:5", "-1"])
def test_what_is_no_number_of_machines(nodes: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.nodes=.* is neither"):
        LaunchConfig(nodes=nodes, rendezvous="a:1").check("launch.")


def test_a_range_of_machines_has_several_worlds() -> None:
    settings = LaunchConfig(nodes="2:4", ranks=2, rendezvous="a:1")
    settings.check("launch.")
    assert (launcher.world_sizes(settings), settings.num_ranks) == ([4, 6, 8], 4)


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    done = run(_program(tmp_path, "raise ValueError('x')"), tmp_path, TMPDIR=str(tmp_path / "temporary"))
    assert done.out.endswith("raised ValueError: x.\n")
    assert not list((tmp_path / "temporary").iterdir())


def test_only_the_directory_of_a_killed_launcher_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of one that lives, nor what others have made, nor what a link leads to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (alien := tmp_path / "fsdp-shard-alien").mkdir()
    script = (
        "import os, signal; from fsdp_shard.distributed.rank_reports import reports_directory\n"
        "with reports_directory() as made: print(made, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run([sys.executable, "-c", script], tmp_path, TMPDIR=str(tmp_path))
    killed = Path(done.out.strip())
    assert killed.is_dir()
    kept = killed.rename(tmp_path / "kept")
    (link := tmp_path / "fsdp-shard-link").symlink_to(kept)
    with reports_directory() as alive:
        with reports_directory():
            assert alive.is_dir()
        assert kept.is_dir()
        link.unlink()
        kept.rename(killed)
        with reports_directory():
            assert not killed.exists()
        assert alive.is_dir()
    assert list(tmp_path.iterdir()) == [alien]


@pytest.mark.long
def test_a_failed_rank_reports_before_it_destroys_its_group(tmp_path: Path) -> None:
    """Which under NCCL may wait for ranks that wait for this one: so it does not destroy it at all."""
    body = """
    import torch.distributed as dist
    from fsdp_shard.distributed import init_distributed
    dist.destroy_process_group = lambda *_: time.sleep(1000)
    with init_distributed("cpu") as context:
        if context.is_main:
            raise ValueError("out of memory")
        context.barrier()
    """
    done = run(_program(tmp_path, body, "timeout_seconds=1000"), tmp_path)
    assert done.out == "RankError: Rank 0 raised ValueError: out of memory.\n"


@pytest.mark.long
def test_a_rank_that_nccl_ended_is_not_to_blame(tmp_path: Path) -> None:
    """Its watchdog aborts the ranks that wait, later than launch.timeout_seconds; which rank hangs is still to see."""
    body = """
    time.sleep({seconds} if rank == "0" else 1000)
    os.abort()
    """
    done = run(_program(tmp_path, body.format(seconds=5), "timeout_seconds=4"), tmp_path)
    said = "RankError: Rank 0 was killed by SIGABRT, as NCCL ends a rank that has waited for launch.timeout_seconds=4; "
    assert done.out.startswith(said + "rank(s) 1 did not join the collective, or waited too.")
    done = run(_program(tmp_path, body.format(seconds=0), "timeout_seconds=60"), tmp_path)  # for a reason of its own
    assert done.out.startswith("RankError: Rank 0 was killed by SIGABRT. The other ranks")


def test_torch_on_gpus_is_set_up_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "_has_computed", Event())  # or later runs of this process would spawn their ranks
    seen: list[dict[str, str | None]] = []

    def work(config: object) -> None:
        seen.append({name: os.environ.get(name) for name in names})

    for device, given in (("auto", None), ("cpu", None), ("auto", "max_split_size_mb:64")):
        if given is not None:
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
        launch(work, Launched("x", LaunchConfig(device=device)))
    assert seen[0]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert seen[0]["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert set(seen[1].values()) == {None}
    assert (seen[2]["PYTORCH_ALLOC_CONF"], seen[2]["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == (None, "1")
    assert not any(name in os.environ for name in names if name != "PYTORCH_CUDA_ALLOC_CONF")
