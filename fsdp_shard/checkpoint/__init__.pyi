from .config import (
    DEFAULT_SHARD_SIZE as DEFAULT_SHARD_SIZE,
    CheckpointConfig as CheckpointConfig,
    ConvertConfig as ConvertConfig,
)
from .conversion import convert as convert
from .digests import digest_tensor as digest_tensor
from .formats.peft import CONFIG as CONFIG, WEIGHTS as WEIGHTS, read_config as read_config, recognize as recognize
from .formats.trainer_layouts import resolve as resolve
from .index import Span as Span, TensorIndex as TensorIndex, tensor_bytes as tensor_bytes
from .integrity.diff import diff as diff
from .integrity.summary import describe as describe
from .integrity.verify import verify as verify
from .io.atomicity import fsync_directory as fsync_directory
from .io.dtypes import CASTABLE as CASTABLE, itemsize as itemsize, to_torch as to_torch
from .io.fault_points import (
    FAULTS as FAULTS,
    MAIN_POINTS as MAIN_POINTS,
    POINTS as POINTS,
    REMOTE_POINTS as REMOTE_POINTS,
    fault_point as fault_point,
)
from .io.files import (
    has_file as has_file,
    member as member,
    open_regular as open_regular,
    pread_into as pread_into,
    read_json as read_json,
)
from .keys.matching import match_names as match_names, untie as untie
from .location import locate as locate, state_of as state_of
from .lora_merge import open_weights as open_weights, refuse_adapter_beside as refuse_adapter_beside
from .model_files import carry as carry
from .open import open_checkpoint as open_checkpoint
from .remote.download import fetch_latest as fetch_latest, fetch_step as fetch_step, local_copy as local_copy
from .remote.store import RemoteStore as RemoteStore
from .remote.upload import catch_up as catch_up, prune_remote as prune_remote, upload_step as upload_step
from .remote.url import is_remote as is_remote, refuse_remote as refuse_remote
from .sharded_state.load_shards import encode_shards as encode_shards, load_shards as load_shards
from .sharded_state.optimizer_state import (
    check_slots as check_slots,
    create_state as create_state,
    optimizer_shards as optimizer_shards,
    used_parameters as used_parameters,
)
from .sharded_state.save_step import (
    TRAINER as TRAINER,
    RunState as RunState,
    save_step as save_step,
    step_trainer as step_trainer,
)
from .sharded_state.staging import Copy as Copy, Staging as Staging
from .steps.manifest import MANIFEST as MANIFEST, read_manifest as read_manifest
from .steps.step_integrity import check_content as check_content, check_files as check_files, drop_cache as drop_cache
from .steps.step_store import (
    CHECKPOINTS as CHECKPOINTS,
    OPTIMIZER as OPTIMIZER,
    Store as Store,
    has_optimizer as has_optimizer,
    parse_step as parse_step,
)
