"""Simulates the memory of DistributedDataParallel, as in `reducer.cpp` of torch 2.13."""

from fsdp_shard.planning.step.recording.events import Event
from fsdp_shard.planning.step.simulators.step_simulator import StepSimulator
from fsdp_shard.planning.step.snapshot import UNREDUCED


class DdpSimulator(StepSimulator):
    """DistributedDataParallel: gradients are views of permanent buckets; nothing is gathered.

    Gradients of micro-batches that are not reduced exist in addition to the buckets until the last micro-batch.
    """

    def apply_bytes(self, event: Event) -> None:
        is_first = self.micro_batch == 0
        rise = event.rise if is_first and not self.is_synced else event.rise_alone
        self.note_rise(event, rise)
        if is_first and not self.is_synced:
            self.add(UNREDUCED, event.gradients)
        elif not is_first and self.is_synced and not self.rules.sync_every_micro_batch:
            self.add(UNREDUCED, -event.gradients)
