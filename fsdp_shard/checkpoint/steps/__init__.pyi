from .file_plan import (
    DCP_METADATA as DCP_METADATA,
    INDEX_FILE as INDEX_FILE,
    SHARD_KEY as SHARD_KEY,
    SINGLE_FILE as SINGLE_FILE,
    Extent as Extent,
    FilePlan as FilePlan,
    ShardInfo as ShardInfo,
    TargetPlan as TargetPlan,
    WriteRequest as WriteRequest,
    chunk_rows as chunk_rows,
    parse_shard_info as parse_shard_info,
    parse_shard_name as parse_shard_name,
    plan_gathered as plan_gathered,
    plan_sharded as plan_sharded,
    shard_name as shard_name,
    stored_shape as stored_shape,
)
from .manifest import (
    KIND as KIND,
    MANIFEST as MANIFEST,
    FileRecord as FileRecord,
    Manifest as Manifest,
    TensorRecord as TensorRecord,
    is_ours as is_ours,
    parse_manifest as parse_manifest,
    read_manifest as read_manifest,
    read_manifest_of_folder as read_manifest_of_folder,
)
from .pruned_step import read_kept as read_kept
from .shard_headers import has_described_headers as has_described_headers
from .shard_index import (
    SHARD_INDEX as SHARD_INDEX,
    RankReport as RankReport,
    build_shard_index as build_shard_index,
    read_shard_index as read_shard_index,
)
from .step_integrity import (
    check_content as check_content,
    check_files as check_files,
    check_side_files as check_side_files,
    drop_cache as drop_cache,
)
from .step_reference import choose_step as choose_step, split_reference as split_reference
from .step_store import (
    AVERAGE as AVERAGE,
    BEST as BEST,
    CHECKPOINTS as CHECKPOINTS,
    CONFIG_FILE as CONFIG_FILE,
    OPTIMIZER as OPTIMIZER,
    RUN_CONFIG as RUN_CONFIG,
    TRAINER as TRAINER,
    Store as Store,
    has_optimizer as has_optimizer,
    parse_step as parse_step,
    step_name as step_name,
    steps_to_delete as steps_to_delete,
)
