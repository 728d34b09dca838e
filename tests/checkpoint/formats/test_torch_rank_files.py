"""What real ranks saved with torch.save, each its own part, is put together bit for bit, on meshes of any kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_refused, assert_same
from tests.support.ranks import on_ranks

State = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about FSDP1


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    first = torch.nn.Linear(5, 7)
    first.register_buffer("scale", torch.arange(3.0))
    return torch.nn.Sequential(first, torch.nn.Linear(7, 6), torch.nn.Linear(6, 1, bias=False))


def fsdp2(context: DistributedContext) -> State:
    model = module()
    fully_shard(model, mesh=init_device_mesh("cpu", (context.world_size,)))
    return model.state_dict()


def hsdp(context: DistributedContext) -> State:
    model = module()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model.state_dict()


def fsdp2_over_tensor_parallel(context: DistributedContext) -> State:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = module()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model.state_dict()


def fsdp1(context: DistributedContext, kind: StateDictType = StateDictType.SHARDED_STATE_DICT) -> State:
    model = FSDP(module(), device_id=torch.device("cpu"), use_orig_params=True)
    with FSDP.state_dict_type(model, kind, ShardedStateDictConfig() if "SHARDED" in kind.name else None):
        state: State = model.state_dict()
    return state


def fsdp1_local(context: DistributedContext) -> State:
    return fsdp1(context, StateDictType.LOCAL_STATE_DICT)


def fsdp1_on_a_mesh(context: DistributedContext) -> State:
    mesh = init_device_mesh("cpu", (context.world_size,))
    model = FSDP(module(), device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: State = model.state_dict()
    return state


def by_hand(context: DistributedContext) -> State:
    mesh = init_device_mesh("cpu", (context.world_size,))
    wide = torch.arange(60.0).reshape(3, 20)
    return {
        "columns": distribute_tensor(wide, mesh, [Shard(1)]),
        "few rows": distribute_tensor(torch.arange(2.0), mesh, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(3), mesh, [Replicate()]),
        "empty": distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)]),
        "bf16": distribute_tensor(wide.bfloat16(), mesh, [Shard(0)]),
        "transposed": DTensor.from_local(wide[:, :3].t(), mesh, [Shard(0)]),
        "plain": torch.arange(4),
    }


def partial(context: DistributedContext) -> State:
    mesh = DeviceMesh("cpu", list(range(context.world_size)))
    return {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()]), "x": distribute_tensor(torch.ones(4), mesh)}


def save(context: DistributedContext, make: Callable[[DistributedContext], State], root: Path) -> State:
    """Each rank's file; whole tensors come back."""
    state = make(context)
    torch.save(state, root / f"model_world_size_{context.world_size}_rank_{context.rank}.pt")
    torch.save(
        {"state": {0: {"exp_avg": state}}}, root / f"optim_world_size_{context.world_size}_rank_{context.rank}.pt"
    )
    torch.save(
        {"rng": torch.get_rng_state()}, root / f"extra_state_world_size_{context.world_size}_rank_{context.rank}.pt"
    )
    if any(isinstance(tensor, DTensor) for tensor in state.values()):
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    else:
        whole = module().state_dict()
    return {name: tensor.detach().numpy() for name, tensor in whole.items() if tensor.dtype != torch.bfloat16}


def saved(make: Callable[[DistributedContext], State], world_size: int, root: Path) -> dict[str, torch.Tensor]:
    root.mkdir(exist_ok=True)
    whole = on_ranks(world_size, save, make, root)[0]
    return {name: torch.as_tensor(array) for name, array in whole.items()}


MAKERS = {
    "fsdp2": (fsdp2, 3),
    "hsdp": (hsdp, 4),
    "fsdp2 over tensor parallel": (fsdp2_over_tensor_parallel, 4),
    "fsdp1": (fsdp1, 3),
    "fsdp1 on a mesh": (fsdp1_on_a_mesh, 2),
    "by hand": (by_hand, 3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_ranks_are_put_together(tmp_path: Path, name: str) -> None:
    make, world_size = MAKERS[name]
    expected = saved(make, world_size, tmp_path / "ranks")
    if name == "by hand":
        expected["bf16"] = torch.arange(60.0).reshape(3, 20).bfloat16()
    with open_checkpoint(tmp_path / "ranks") as index:
        assert (index.format, index.world_size) == ("torch_ranks", world_size)
        assert_same(index, expected)
        assert index.extras["optimizer"].num_tensors == world_size * len(expected)
        assert index.extras["other"].num_tensors == world_size
    convert(tmp_path / "ranks", tmp_path / "one")
    with open_checkpoint(tmp_path / "one") as index:
        assert_same(index, expected)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of 3 ranks, and of another save by 2."""
    root = tmp_path_factory.mktemp("saves")
    saved(fsdp2, 3, root / "three")
    saved(fsdp2, 2, root / "two")
    saved(fsdp1, 3, root / "fsdp1")
    return root


def name_of(rank: int, world_size: int = 3) -> str:
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def other_shape(root: Path) -> None:
    """A rank of a save of the same world size, but of a wider model."""
    state = torch.load(root / name_of(0), weights_only=False)
    state["0.scale"] = torch.arange(5.0)
    torch.save(state, root / name_of(0))


def swap(root: Path) -> None:
    (root / name_of(0)).rename(root / "x")
    (root / name_of(1)).rename(root / name_of(0))
    (root / "x").rename(root / name_of(1))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "the first rank": ("three", lambda p: (p / name_of(0)).unlink(), "file of rank 0 is missing"),
    "a middle rank": ("three", lambda p: (p / name_of(1)).unlink(), "file of rank 1 is missing"),
    "the last rank": (
        "three",
        lambda p: (p / name_of(2)).unlink(),
        "file of rank 2 is missing; the checkpoint was written by 3 ranks",
    ),
    "mixed world sizes": (
        "three",
        lambda p: shutil.copy(p.parent.parent / "two" / name_of(0, 2), p / name_of(0, 2)),
        "mixes rank files of saves by 2 and 3 ranks",
    ),
    "a rank of another world": (
        "three",
        lambda p: shutil.copy(p.parent.parent / "two" / name_of(0, 2), p / name_of(0)),
        "these are files of different saves",
    ),
    "another kind of save": (
        "three",
        lambda p: shutil.copy(p.parent.parent / "fsdp1" / name_of(1), p / name_of(1)),
        ", but .* in .*: these are files of different saves",
    ),
    "ranks swapped": ("three", swap, "renamed or mixed up"),
    "a shape that differs": ("three", other_shape, "F32 .3., but F32 .5. in"),
    "two files of a rank": (
        "three",
        lambda p: shutil.copy(p / name_of(1), p / "model_world_size_3_rank_01.pt"),
        "two files of rank 1",
    ),
    "a rank too many": (
        "three",
        lambda p: shutil.copy(p / name_of(1), p / name_of(3)),
        "is of a rank that a save by 3",
    ),
    "two models": (
        "three",
        lambda p: shutil.copy(p / name_of(0), p / "critic_rank_0.pt"),
        "rank files of several models",
    ),
    "a shard of FSDP1": (
        "fsdp1",
        lambda p: [
            (p / name_of(rank)).rename(p / f"model_rank_{rank}.pt") if rank < 2 else (p / name_of(rank)).unlink()
            for rank in range(3)
        ],
        "is in none of the 2 files",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_belong_together_is_refused(ranks: Path, name: str) -> None:
    source, damage, message = DAMAGES[name]
    root = ranks / "work" / name.replace(" ", "_")
    shutil.copytree(ranks / source, root)
    (root / "README").touch()
    damage(root)
    assert_refused(root, message)


REPLICAS = {
    "a buffer": ("three", "0.scale"),  # plain, in each file
    "a shard": ("hsdp", "1.weight"),
    "a tensor on all ranks": ("replicated", "scalar"),
}


def change(root: Path, name: str, *, is_legacy: bool = False) -> None:
    """Add 1 to what the last rank's file has of a tensor."""
    file = max(root.glob("model_world_size_*"))
    state = torch.load(file, weights_only=False)
    tensor = state[name]
    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
    torch.save(state, file, _use_new_zipfile_serialization=not is_legacy)


@pytest.fixture(scope="module")
def replicated(ranks: Path) -> Path:
    """As `ranks`, with shards on two ranks each, and a tensor that all ranks hold whole."""
    saved(hsdp, 4, ranks / "hsdp")
    saved(by_hand, 3, ranks / "replicated")
    return ranks


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_that_differ_are_refused(replicated: Path, tmp_path: Path, name: str, is_legacy: bool) -> None:
    """By the CRCs in the files, or by their values where a file has none. torch gives each rank what its file has."""
    source, tensor = REPLICAS[name]
    root = tmp_path / "ranks"
    shutil.copytree(replicated / source, root)
    with open_checkpoint(root) as index:
        assert len(index.replicas) >= 2
    change(root, tensor, is_legacy=is_legacy)
    assert_refused(root, f"hold different values of tensor {tensor}, of which both have the same part")


def test_of_replicas_with_equal_checksums_one_is_read(replicated: Path, tmp_path: Path) -> None:
    """Another one may be damaged on the disk: what is read is right, and `verify` reads them all."""
    root = tmp_path / "ranks"
    shutil.copytree(replicated / "three", root)
    with open_checkpoint(root) as index:
        piece = next(piece for piece in index.replicas if piece.file == name_of(2))
    data = bytearray((root / name_of(2)).read_bytes())
    data[piece.start] ^= 1
    (root / name_of(2)).write_bytes(data)
    convert(root, tmp_path / "one")
    (problem,) = verify(root).problems
    assert problem.file == name_of(2)
    assert "do not have the CRC32" in problem.message


def test_equal_values_in_other_storages_are_no_difference(replicated: Path, tmp_path: Path) -> None:
    root = tmp_path / "ranks"
    shutil.copytree(replicated / "three", root)
    state = torch.load(root / name_of(1), weights_only=False)
    state["0.scale"] = torch.arange(50.0)[: len(state["0.scale"])]  # saved with all of its storage
    torch.save(state, root / name_of(1))
    with open_checkpoint(root) as index:
        assert_same(index, dict(module().state_dict()))


def test_one_file_alone_says_what_to_give(ranks: Path) -> None:
    with pytest.raises(CheckpointError, match=r"only one rank's part .* give the directory"):
        open_checkpoint(ranks / "three" / name_of(0))


def test_partial_sums_and_flat_parameters_are_refused(tmp_path: Path) -> None:
    saved_partial = tmp_path / "partial"
    saved_partial.mkdir()
    on_ranks(2, save_only, partial, saved_partial)
    with pytest.raises(CheckpointError, match="tensor sum cannot be put together: it holds partial sums"):
        open_checkpoint(saved_partial)
    local = tmp_path / "local"
    local.mkdir()
    on_ranks(2, save_only, fsdp1_local, local)
    with pytest.raises(CheckpointError, match="LOCAL_STATE_DICT"):
        open_checkpoint(local)


def two_dtypes(context: DistributedContext) -> State:
    """Two shards on one rank, of which one was cast."""
    shards = [ShardOfTensor.from_tensor_and_offsets(torch.ones(2, 3), [row, 0], rank=context.rank) for row in (0, 2)]
    sharded = init_from_local_shards(shards, 4, 3)
    sharded.local_shards()[0].tensor = torch.ones(2, 3, dtype=torch.float64)
    return {"w": sharded}


def test_shards_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    on_ranks(1, save_only, two_dtypes, tmp_path)
    assert_refused(tmp_path, "whose shards are of several dtypes")


def save_only(context: DistributedContext, make: Callable[[DistributedContext], State], root: Path) -> None:
    torch.save(make(context), root / f"rank{context.rank}.pt")
