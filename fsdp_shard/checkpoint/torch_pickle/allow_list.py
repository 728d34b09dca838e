"""The allow-list of names in checkpoint pickles, with a stand-in for each name, and `load`, which applies it.

Nothing in a pickle runs: a name that is not on the list raises a CheckpointError that names it. Imports no torch.
"""

from collections.abc import Callable
from typing import Any

from fsdp_shard.checkpoint.torch_pickle import dtensor, tensor
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import DCP_CLASSES, Constant, OrderedDict, counts, record, text
from fsdp_shard.checkpoint.torch_pickle.metadata_pieces import SHORTCUTS
from fsdp_shard.checkpoint.torch_pickle.unpickler import Machine
from fsdp_shard.errors import CheckpointError


def load(data: bytes, where: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the object in a pickle that fills `data`, with stand-ins for objects of library classes.

    Args:
        data: The pickle.
        where: The file, for messages.
        persistent: Resolves the persistent ids of storages; None if the pickle must not have any.

    Raises:
        CheckpointError: The pickle is malformed, or uses a name that is not on the allow-list.
    """
    value, end = load_from(data, 0, where, persistent)
    if end != len(data):
        raise CheckpointError(f"{where} has {len(data) - end} bytes after the end of its pickle.")
    return value


def load_from(data: bytes, start: int, where: str, persistent: Callable[[Any], Any] | None = None) -> tuple[Any, int]:
    """Return the object in the pickle that begins at byte `start`, and the position after it; otherwise like `load`."""
    machine = Machine(data, start, _NAMES, persistent, SHORTCUTS)
    try:
        return machine.run(), machine.end
    except CheckpointError as error:
        raise type(error)(f"{where} {error}.") from None


# Constructors of plain values. Each accepts the arguments that Python's own pickles contain, and rejects all others.


def _ordered_dict(items: Any = (), /, **keywords: Any) -> OrderedDict:
    if not isinstance(items, (list, tuple, dict)) or (items and not isinstance(items, dict)):
        raise TypeError("items of an OrderedDict that are not set one by one")
    return OrderedDict(items)


def _list(items: Any = ()) -> list[Any]:
    if not isinstance(items, (list, tuple)):
        raise TypeError("a list of something else than a list")
    return list(items)


def _set(items: Any = ()) -> set[Any]:
    if not all(isinstance(item, (str, int, float, bool, type(None))) for item in _list(items)):
        raise TypeError("a set of something else than plain values")
    return set(items)


def _encode(value: Any, encoding: Any = "latin1") -> bytes:
    """`_codecs.encode`, with which protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("an encoding that pickle does not use")
    return text(value).encode("latin-1")


def _bytes(value: Any = b"", *encoding: Any) -> bytes:
    if encoding:
        return _encode(value, *encoding)
    if not isinstance(value, (bytes, bytearray)):
        raise TypeError("bytes of something else than bytes")
    return bytes(value)


def _path(*parts: Any) -> Constant:
    return Constant("/".join(map(text, parts)))


def _device(kind: Any, index: Any = None) -> Constant:
    return Constant(text(kind) if index is None else f"{text(kind)}:{int(index)}")


def _blank(cls: type[Any]) -> Callable[[], Any]:
    """Return a constructor of `cls` without arguments; only the state sets and checks its attributes."""
    return lambda: cls()


_TORCH = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz
    float4_e2m1fn_x2 complex32 complex64 complex128 int64 int32 int16 int8 int4 int2 int1
    uint64 uint32 uint16 uint8 uint4 uint2 uint1 bool
    qint8 quint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2
    strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged
    contiguous_format channels_last channels_last_3d preserve_format
    per_tensor_affine per_channel_affine per_tensor_symmetric per_channel_symmetric
    per_channel_affine_float_qparams
"""
_UNREADABLE = {
    "_rebuild_sparse_tensor": "is sparse; save it after to_dense()",
    "_rebuild_sparse_csr_tensor": "is sparse; save it after to_dense()",
    "_rebuild_qtensor": "is quantized; save it after dequantize()",
    "_rebuild_nested_tensor": "is nested (ragged), which safetensors cannot hold",
    "_rebuild_meta_tensor_no_storage": "is on the meta device: only its shape was saved, and no values",
    "_rebuild_device_tensor_from_numpy": "was saved from a device by way of numpy, and is not read",
}
# Classes of objects in optimizer, trainer and engine states, on which no weight depends.
_RECORDS = {
    "torch": "Tensor Generator",
    "torch.nn.parameter": "Parameter Buffer UninitializedParameter",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed._tensor.placement_types": "DTensorSpec TensorMeta Shard Replicate _Partial Partial",
    "torch.distributed.tensor.placement_types": "Shard Replicate Partial _Partial _StridedShard",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec DevicePlacementSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed.checkpoint.metadata": "StorageMeta _MEM_FORMAT_ENCODING",
    # Megatron-core keeps the plans of all ranks in its metadata.
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed.distributed_c10d": "ReduceOp",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "datetime": "datetime timedelta",
}


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): lambda factory=None, items=(): _ordered_dict(items),
    ("collections", "Counter"): _ordered_dict,
    ("collections", "deque"): lambda items=(), size=None: _list(items),
    ("builtins", "dict"): _ordered_dict,
    ("builtins", "list"): _list,
    ("builtins", "tuple"): lambda items=(): tuple(_list(items)),
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _set,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "complex"): lambda real=0.0, imaginary=0.0: (real, imaginary),
    ("builtins", "slice"): record("builtins.slice"),
    ("builtins", "getattr"): record("builtins.getattr"),  # resolved by the machine from this list
    ("_codecs", "encode"): _encode,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13
    ("torch", "Size"): lambda sizes=(): counts(sizes),
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): lambda name: Constant(text(name)),
    ("torch._utils", "_rebuild_tensor"): tensor.rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): tensor.rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): tensor.rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): dtensor.rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): dtensor.rebuild_parameter,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): dtensor.rebuild_parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): record("torch._utils._rebuild_wrapper_subclass"),
    ("torch._tensor", "_rebuild_from_type"): dtensor.rebuild_from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): dtensor.rebuild_from_type,
}
_NAMES |= {("torch._utils", name): tensor.rebuild_unreadable(problem) for name, problem in _UNREADABLE.items()}
_NAMES |= {("torch", name): Constant(f"torch.{name}") for name in (*_TORCH.split(), *tensor.STORAGE_NAMES)}
_NAMES |= {("torch.storage", name): Constant(f"torch.{name}") for name in ("UntypedStorage", *tensor.STORAGE_NAMES)}
_NAMES |= {(module, name): record(f"{module}.{name}") for module, some in _RECORDS.items() for name in some.split()}
_NAMES |= {key: _blank(cls) for key, cls in DCP_CLASSES.items()}
