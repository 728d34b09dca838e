"""What people keep the checkpoints of a loop of their own with: what `checkpointer.py` compares.

A new one is a file here with one class, and a line in `SIDES`. Each is used as its own documentation says, on the same
model in the same loop; what it cannot do on CPUs, or leaves to the loop, stands in its `note`.
"""

from checkpointers.accelerate_saves import Accelerate, AccelerateFsdp2
from checkpointers.fs_checkpointer import Ours, OursSynchronous
from checkpointers.meta_package import TorchCheckpointing
from checkpointers.side import Log, Side, build
from checkpointers.torch_dcp import Dcp, DcpAsync
from checkpointers.trainer_saves import TrainerSaves, TrainerSharded

__all__ = ["SIDES", "Log", "Side", "build"]

SIDES: dict[str, type[Side]] = {
    "ours": Ours,
    "ours-sync": OursSynchronous,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "accelerate": Accelerate,
    "accelerate-fsdp2": AccelerateFsdp2,
    "trainer": TrainerSaves,
    "trainer-sharded": TrainerSharded,
    "torch-checkpointing": TorchCheckpointing,
}
