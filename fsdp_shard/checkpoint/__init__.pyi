from .adapters.adapter_checks import (
    check_loadable as check_loadable,
    check_on_base as check_on_base,
    check_unmerged as check_unmerged,
    refuse_adapter_within as refuse_adapter_within,
)
from .base_model import (
    ADAPTER_BASE as ADAPTER_BASE,
    BASE_MODEL as BASE_MODEL,
    TEACHER as TEACHER,
    BaseModel as BaseModel,
    HeadChanges as HeadChanges,
    class_names as class_names,
    computation as computation,
    config_changes as config_changes,
    fingerprint as fingerprint,
    is_base_model as is_base_model,
    read_base_model as read_base_model,
    vocabulary as vocabulary,
)
from .config import (
    DEFAULT_SHARD_SIZE as DEFAULT_SHARD_SIZE,
    CheckpointConfig as CheckpointConfig,
    ConvertSettings as ConvertSettings,
    SourceSettings as SourceSettings,
)
from .conversion import (
    ConvertReport as ConvertReport,
    check_conversion as check_conversion,
    convert as convert,
    convert_location as convert_location,
    run_conversion as run_conversion,
)
from .formats.peft import (
    ADAPTER_CONFIG as ADAPTER_CONFIG,
    ADAPTER_WEIGHTS as ADAPTER_WEIGHTS,
    is_adapter as is_adapter,
    read_adapter_config as read_adapter_config,
)
from .formats.registry import recognize as recognize, writer as writer
from .formats.trainer_layouts import latest_step_directory as latest_step_directory
from .index import TensorIndex as TensorIndex
from .integrity.compared_locations import refuse_unused_base as refuse_unused_base
from .integrity.content_digest import (
    config_digest as config_digest,
    describe_model as describe_model,
    describe_weights as describe_weights,
    model_digests as model_digests,
    weights_digest as weights_digest,
)
from .integrity.diff import diff as diff
from .integrity.inspect_report import summarize_checkpoint as summarize_checkpoint
from .integrity.step_integrity import (
    check_content as check_content,
    check_files as check_files,
    drop_cache as drop_cache,
)
from .integrity.verify import verify as verify
from .integrity.verify_report import VerifyReport as VerifyReport
from .io.fault_points import (
    FAULTS as FAULTS,
    POINTS as POINTS,
    REMOTE_POINTS as REMOTE_POINTS,
    fault_point as fault_point,
)
from .io.files import pread_into as pread_into
from .io.members import has_file as has_file, member as member
from .io.safetensors_format import (
    TensorSpec as TensorSpec,
    find_torch_name as find_torch_name,
    itemsize as itemsize,
    main_dtype as main_dtype,
    to_torch as to_torch,
)
from .keys.converted_tensors import computed_entry as computed_entry
from .keys.lora_settings import parse_lora as parse_lora
from .keys.matching import MatchedNames as MatchedNames, match_names as match_names, untie as untie
from .keys.tied_weights import has_same_bytes as has_same_bytes
from .keys.wrapper_prefixes import PEFT_PREFIX as PEFT_PREFIX
from .location import (
    Location as Location,
    is_checkpoint as is_checkpoint,
    local_path as local_path,
    locate as locate,
    open_checkpoint as open_checkpoint,
)
from .model_files import (
    CONFIG as CONFIG,
    copy_model_files as copy_model_files,
    read_config as read_config,
    set_chat_template as set_chat_template,
    set_classes as set_classes,
    with_dtype as with_dtype,
)
from .open import is_module_path as is_module_path
from .piece_reader import ROW_GROUP_BYTES as ROW_GROUP_BYTES, tensor_bytes as tensor_bytes
from .remote.download import fetch_latest as fetch_latest, fetch_step as fetch_step, local_copy as local_copy
from .remote.hub_files import (
    adapter_to_push as adapter_to_push,
    is_loadable as is_loadable,
    model_to_push as model_to_push,
)
from .remote.hub_push import (
    CARD as CARD,
    CARD_MARK as CARD_MARK,
    HubRepository as HubRepository,
    HubTarget as HubTarget,
    PushReport as PushReport,
    is_hub_id as is_hub_id,
    open_repository as open_repository,
)
from .remote.hub_requests import require_hub as require_hub
from .remote.same_run import (
    RUN_ID as RUN_ID,
    new_run_id as new_run_id,
    remote_run_id as remote_run_id,
    run_id_of as run_id_of,
)
from .remote.store import RemoteStore as RemoteStore
from .remote.upload import catch_up as catch_up, prune_remote as prune_remote, upload_step as upload_step
from .sharded_state.load_shards import (
    ENCODED_AT_ONCE as ENCODED_AT_ONCE,
    READ_STAGE_BYTES as READ_STAGE_BYTES,
    copy_stored as copy_stored,
    encode_shards as encode_shards,
    load_shards as load_shards,
    may_cast as may_cast,
)
from .sharded_state.optimizer_state import (
    check_slots as check_slots,
    create_state as create_state,
    optimizer_shards as optimizer_shards,
    optimizer_values as optimizer_values,
    plain_tensors as plain_tensors,
    used_parameters as used_parameters,
    write_back as write_back,
)
from .sharded_state.save_step import StepContent as StepContent, save_step as save_step
from .sharded_state.staging import StagedCopy as StagedCopy, Staging as Staging
from .steps.file_plan import WriteRequest as WriteRequest, parse_shard_name as parse_shard_name
from .steps.manifest import (
    MANIFEST as MANIFEST,
    FileRecord as FileRecord,
    Manifest as Manifest,
    TensorRecord as TensorRecord,
    has_listed_files as has_listed_files,
    read_manifest as read_manifest,
)
from .steps.shard_index import SHARD_INDEX as SHARD_INDEX
from .steps.step_store import (
    AVERAGE as AVERAGE,
    CHECKPOINTS as CHECKPOINTS,
    CONFIG_FILE as CONFIG_FILE,
    CONFIG_START as CONFIG_START,
    OPTIMIZER as OPTIMIZER,
    RUN_CONFIG as RUN_CONFIG,
    TRAINER as TRAINER,
    StepStore as StepStore,
    has_optimizer as has_optimizer,
    parse_step as parse_step,
    recorded_command as recorded_command,
)
from .tensor_entry import Span as Span
