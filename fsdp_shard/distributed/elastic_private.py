"""torch's elastic agent and rendezvous, with public names for the private methods that ours override or call."""

import signal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


class CountingRendezvous(DynamicRendezvousHandler):
    """`DynamicRendezvousHandler`; without this count, only a timeout would reveal that a machine is cut off."""

    def num_participants(self) -> int:
        """Number of machines in the last known round with a recent sign of life."""
        return len(self._state_holder.state.participants)


class OverridableAgent(LocalElasticAgent):
    """`LocalElasticAgent`; without these names, dead and frozen ranks would be noticed after torch's 30 s or never.

    Args:
        spec: The program to run.
        logs: Where torch writes logs.
        start_method: fork or spawn.
        grace_seconds: Time between a signal that ends ranks and SIGKILL; torch supports it from 2.13.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, start_method: str, grace_seconds: int) -> None:
        super().__init__(spec, logs, start_method=start_method)
        self._shutdown_timeout = grace_seconds

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start all ranks of this machine; return local rank -> process id."""
        pids: dict[int, int] = super()._start_workers(worker_group)
        return pids

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks."""
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all ranks of this machine."""
        super()._stop_workers(worker_group)

    def shut_down(self, timeout_seconds: int) -> None:
        """Send SIGTERM to all ranks, and SIGKILL to those still running after the timeout."""
        self._shutdown(timeout=timeout_seconds)

    def end_ranks(self, number: signal.Signals, timeout_seconds: int) -> None:
        """Send a signal to all ranks, and wait until they have ended or the timeout expires."""
        raise NotImplementedError

    def forbid_restarts(self) -> None:
        """Let the run fail when a rank fails."""
        self._remaining_restarts = 0

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        if self._pcontext is not None:
            self.end_ranks(death_sig, self._shutdown_timeout if timeout is None else timeout)
            self._pcontext.close(death_sig, 0)
        super()._shutdown(death_sig)  # the ranks have ended

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        return self.start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)
