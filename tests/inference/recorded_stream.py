"""Blocks that are streamed, and a record of what was done with each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_shard.inference.offload.block_hooks import BlockStream, Slot, StreamedBlock
from fsdp_shard.inference.offload.buffer_ring import Content, Ring


class Recorder:
    """Linear layers that are streamed, and what was done with each, in order."""

    def __init__(self, count: int, prefetch: int) -> None:
        self.events: list[tuple[str, int]] = []
        self.broken: set[int] = set()
        self.meet: dict[int, threading.Barrier] = {}  # a block waits there, once, when it is fetched
        self.modules = [nn.Linear(2, 2, bias=False, device="meta").requires_grad_(False) for _ in range(count)]
        self.ring = Ring(torch.device("cpu"), self._fill)
        self.stream = stream = BlockStream(self.ring, prefetch)
        for number, module in enumerate(self.modules):
            content = Content(((str(number), torch.float32, (2, 2)),))
            slots = [Slot(module, "weight", module.get_parameter("weight"), 0)]
            stream.add(StreamedBlock(module, slots, content, self._note("fetch", number), self._note("drop", number)))

    def run(self, *numbers: int) -> list[float]:
        """The weight that each pass saw."""
        seen = []
        for number in numbers:
            output = self.modules[number](torch.ones(1, 2))
            self.events.append(("pass", number))
            seen.append(float(output[0, 0] / 2))
            assert self.modules[number].weight.is_meta
        return seen

    def _fill(self, wanted: Any) -> None:
        for name, out in wanted:
            if int(name) in self.broken:
                raise OSError("the disk is gone")
            out.fill_(float(name))

    def _note(self, what: str, number: int) -> Callable[[], None]:
        def note() -> None:
            self.events.append((what, number))
            if what == "fetch" and number in self.meet:
                self.meet.pop(number).wait(30)

        return note
