from .allow_list import load as load
from .dtensor import AnyTensor as AnyTensor, StoredDTensor as StoredDTensor, StoredShards as StoredShards
from .metadata_classes import (
    BytesStorageMetadata as BytesStorageMetadata,
    Metadata as Metadata,
    MetadataIndex as MetadataIndex,
    Record as Record,
    StorageInfo as StorageInfo,
    TensorStorageMetadata as TensorStorageMetadata,
    counts as counts,
    text as text,
)
from .pickler import Call as Call, Global as Global, Instance as Instance, Items as Items, dumps as dumps
from .placements import Placement as Placement, local_boxes as local_boxes, local_spans as local_spans
from .state_dict import (
    extra_of as extra_of,
    plain_entry as plain_entry,
    readable as readable,
    select_weights as select_weights,
    walk as walk,
    weights_of as weights_of,
    without_copies as without_copies,
)
from .strided import box_of as box_of, piece_of as piece_of
from .tensor import StoredTensor as StoredTensor, Unreadable as Unreadable
from .torch_zip import (
    is_torch_file as is_torch_file,
    read_torch_bytes as read_torch_bytes,
    read_torch_file as read_torch_file,
)
from .torch_zip_writer import frame as frame
from .zip_reader import CRC_IN_ENTRY as CRC_IN_ENTRY, ENTRY_BYTES as ENTRY_BYTES
