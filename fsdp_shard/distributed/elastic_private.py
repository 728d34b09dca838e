"""torch's elastic agent and its rendezvous with public names for what ours override or ask, which is private there."""

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


class CountingRendezvous(DynamicRendezvousHandler):
    """`DynamicRendezvousHandler`; without this count, a machine that is cut off would be missed by a timeout only."""

    def num_participants(self) -> int:
        """Number of machines that are in the last known round, and have been heard of lately."""
        return len(self._state_holder.state.participants)


class OverridableAgent(LocalElasticAgent):
    """`LocalElasticAgent`; without these names, dead and frozen ranks would be noticed after torch's 30 s or never."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start all ranks of this machine; returns local rank -> process id."""
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
        """Send SIGTERM to all ranks, and SIGKILL to those that run after the timeout."""
        self._shutdown(timeout=timeout_seconds)

    def forbid_restarts(self) -> None:
        """Let the run fail when a rank fails."""
        self._remaining_restarts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        return self.start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)
