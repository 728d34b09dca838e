"""The settings `launch.*`: how many processes a run has, and on which machines."""

import re
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import setting

# Also for ranks that wait while one of them tokenizes, or reads all weights: the launcher notices a rank that dies or
# hangs. torch accepts no infinite timeout.
LONGEST_TIMEOUT_SECONDS = 30 * 24 * 3600.0


@dataclass
class LaunchConfig:
    """Number of processes of a run, and their machines. Inside torchrun or srun, their numbers apply instead.

    There, `check_machine` rejects settings that contradict them or are for ranks started here.
    """

    ranks: int = setting(
        1, "Number of processes on this machine; each uses one GPU, or its part of the cores.", minimum=1
    )
    nodes: str = setting(
        "1",
        "Number of machines; start the same command on each, with the same launch.rendezvous. A range such as 2:4 is "
        "elastic: machines may join and leave.",
    )
    rendezvous: str | None = setting(None, "host:port of the rendezvous, on one of the machines; for launch.nodes > 1.")
    device: str = setting(
        "auto", "Device of the ranks; auto uses GPUs if there are any.", choices=("auto", "cpu", "cuda")
    )
    numa_binding: str = setting(
        "auto",
        "Processors of a rank: node are those nearest to its GPU; auto is node where several GPUs can be distinguished "
        "and the program numactl is installed.",
        choices=("auto", "node", "none"),
    )
    timeout_seconds: float = setting(
        600.0, "Timeout for collectives, in seconds.", above=0.0, maximum=LONGEST_TIMEOUT_SECONDS
    )
    max_restarts: int = setting(0, "Maximum number of restarts of all ranks after one has failed.", minimum=0)
    grace_seconds: int = setting(
        120, "Seconds that ranks have to save after Ctrl-C or SIGTERM before they are killed.", minimum=0
    )

    def check(self, prefix: str) -> None:
        """Check that machines can find each other."""
        if not re.fullmatch(r"[1-9]\d{0,4}(:[1-9]\d{0,4})?", str(self.nodes)) or self.min_nodes > self.max_nodes:
            raise ConfigError(f"{prefix}nodes={self.nodes} is neither a number of machines nor a range such as 2:4.")
        if self.max_nodes > 1 and self.rendezvous is None:
            raise ConfigError(
                f"{prefix}nodes={self.nodes} needs {prefix}rendezvous=host:port; give the name of one of the machines "
                f"and a free port, such as node1:29400."
            )
        if self.rendezvous is not None and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", self.rendezvous):
            raise ConfigError(f"{prefix}rendezvous={self.rendezvous} is not host:port, such as node1:29400.")
        if self.max_nodes == 1 and self.rendezvous is not None:
            raise ConfigError(
                f"{prefix}rendezvous={self.rendezvous} has no effect with {prefix}nodes=1; set {prefix}nodes to the "
                f"number of machines."
            )

    @property
    def min_nodes(self) -> int:
        """Smallest number of machines."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """Largest number of machines."""
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def is_elastic(self) -> bool:
        """Whether machines may join and leave during the run."""
        return self.min_nodes < self.max_nodes

    @property
    def num_ranks(self) -> int:
        """Smallest number of ranks that the run may have, with the most work for each."""
        return self.ranks * self.min_nodes


class Launchable(Protocol):
    """The config of a run that may have several ranks.

    Machines may differ in the settings here, and in those that `per_machine` lists.
    """

    run_dir: str
    launch: LaunchConfig
    debug: bool
    per_machine: ClassVar[tuple[str, ...]]
