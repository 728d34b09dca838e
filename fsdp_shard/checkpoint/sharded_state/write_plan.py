"""Plans, for each layout, which bytes this rank writes to which file, before the first byte is written.

Every rank computes the same headers and offsets from the same list of tensors, so a gathered file needs no gather: each
rank writes its own elements at their final offset. A layout is one function here and one line in `LAYOUTS`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import TensorSpec, find_torch_name
from fsdp_shard.checkpoint.steps.file_plan import INDEX_FILE, SINGLE_FILE, FilePlan, plan_gathered, plan_sharded
from fsdp_shard.checkpoint.steps.shard_index import RankFileSummary
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import SaveError


@dataclass(frozen=True, slots=True)
class Target:
    """The values on which all ranks of a save agree."""

    rank: int
    world_size: int
    step: int
    save_id: str
    max_shard_bytes: int | None
    aliases: Mapping[str, str]
    single_file: str = SINGLE_FILE


@dataclass(frozen=True)
class WritePlan:
    """One rank's writes: files that it creates at full size with their headers, small files, and its own elements.

    `offsets` maps each tensor of which this rank writes a part to (file, absolute byte offset of its first element).
    With `scatters`, the rows of a box are written at their offsets in the full tensor. `report` is the report for the
    index of rank files, if this rank writes one.
    """

    creates: list[FilePlan]
    offsets: dict[str, tuple[str, int]]
    small_files: dict[str, bytes] = field(default_factory=dict)
    scatters: bool = False
    report: RankFileSummary | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the files that this rank creates; their sum over the ranks is the checkpoint's size."""
        return sum(file.num_bytes for file in self.creates) + sum(map(len, self.small_files.values()))

    def with_files(self, files: Mapping[str, bytes]) -> "WritePlan":
        """Return the plan with further small files."""
        return replace(self, small_files={**self.small_files, **files})

    def runs(self, name: str, shard: LocalShard) -> Iterator[tuple[int, slice]]:
        """Yield (absolute byte offset, bytes of `shard.data` for it), in order."""
        offset = self.offsets[name][1]
        if shard.box is None or not self.scatters:
            yield offset, slice(0, shard.data.nbytes)
            return
        size = shard.data.element_size()
        for at, inside, count in tensor_slices.runs(shard.shape, *shard.box, 0, math.prod(shard.shape)):
            yield offset + (at - shard.start) * size, slice(inside * size, (inside + count) * size)


def spec_of(name: str, shard: LocalShard) -> TensorSpec:
    """Return name, dtype and full shape of the tensor of `shard`; SaveError if safetensors has no such dtype."""
    if (dtype := find_torch_name(str(shard.data.dtype))) is None:
        raise SaveError(f"{name} is a tensor of {shard.data.dtype}, which safetensors files cannot hold; cast it.")
    return TensorSpec(name, dtype, shard.shape)


def plan_gathered_writes(shards: Mapping[str, LocalShard], target: Target) -> WritePlan:
    """Plan one Hugging Face directory, created by rank 0, written by all."""
    specs = [spec_of(name, shard) for name, shard in shards.items()]
    files, index = plan_gathered(specs, target.max_shard_bytes, target.aliases, target.single_file)
    starts = {name: (file.name, offset) for file in files for name, offset in file.tensors.items()}
    offsets = {}
    for name, shard in shards.items():
        if shard.writes and shard.data.numel():
            file, offset = starts[name]
            offsets[name] = file, offset + shard.start * shard.data.element_size()
    if target.rank != 0:
        return WritePlan([], offsets, scatters=True)
    return WritePlan(files, offsets, {INDEX_FILE: index} if index is not None else {}, scatters=True)


def plan_sharded_writes(shards: Mapping[str, LocalShard], target: Target) -> WritePlan:
    """Plan one file per rank, which the rank creates and writes; only a header if it holds nothing."""
    pieces = [
        (spec_of(name, shard), shard.start, shard.data.numel() if shard.writes else 0) for name, shard in shards.items()
    ]
    boxes = {name: shard.box for name, shard in shards.items() if shard.box is not None}
    file = plan_sharded(
        pieces,
        target.rank,
        target.world_size,
        step=target.step,
        save_id=target.save_id,
        aliases=target.aliases,
        boxes=boxes,
    )
    offsets = {name: (file.name, offset) for name, offset in file.tensors.items()}
    return WritePlan([file], offsets, report=RankFileSummary.of(file, pieces, boxes))


def plan_folder_writes(folder: str, shards: Mapping[str, LocalShard], target: Target) -> WritePlan:
    """Plan one file per rank in a folder of the step, for any layout of the weights."""
    plan = plan_sharded_writes(shards, target)
    files = [replace(file, name=f"{folder}/{file.name}") for file in plan.creates]
    offsets = {name: (f"{folder}/{file}", offset) for name, (file, offset) in plan.offsets.items()}
    return WritePlan(files, offsets, report=plan.report)


LAYOUTS: dict[str, Callable[[Mapping[str, LocalShard], Target], WritePlan]] = {
    "gathered": plan_gathered_writes,
    "sharded": plan_sharded_writes,
}
