from .activation_checkpointing import (
    recompute_blocks as recompute_blocks,
    recomputed_fqns as recomputed_fqns,
)
from .config import (
    Shape as Shape,
    ShardConfig as ShardConfig,
    ShardedModel as ShardedModel,
    Unit as Unit,
    itemsize as itemsize,
)
from .context_parallel.attention import (
    attention_over as attention_over,
    context_method_of as context_method_of,
    resolve_context_method as resolve_context_method,
    use_context_parallel as use_context_parallel,
    without_context_parallel as without_context_parallel,
)
from .context_parallel.checks import check_context_parallel as check_context_parallel
from .context_parallel.sequence_parts import (
    ContextRanks as ContextRanks,
    SequencePart as SequencePart,
    WholeSequence as WholeSequence,
    chunks_of_ranks as chunks_of_ranks,
)
from .context_parallel.ulysses import num_sent_heads as num_sent_heads
from .expert_parallel import DIVIDED_BY_EXPERTS as DIVIDED_BY_EXPERTS, SENDS_TO_EXPERTS as SENDS_TO_EXPERTS
from .forward_trace import unused_by_text as unused_by_text
from .fsdp1 import flat_spans as flat_spans
from .fsdp2 import padded_shape as padded_shape
from .gradients import (
    clip_grad_norm_ as clip_grad_norm_,
    no_sync as no_sync,
    split_groups_by_mesh as split_groups_by_mesh,
)
from .module_shards import (
    ModuleShards as ModuleShards,
    bare_module as bare_module,
    clean_fqns as clean_fqns,
    fill_copied_buffers as fill_copied_buffers,
    free_gathered as free_gathered,
    modules_with_extra_state as modules_with_extra_state,
    shards_of as shards_of,
    transformers_model as transformers_model,
)
from .prepare_model import check_dtypes as check_dtypes, check_shardable as check_shardable
from .rank_counts import (
    check_accumulation as check_accumulation,
    check_mesh as check_mesh,
    check_ranks as check_ranks,
    num_data_ranks as num_data_ranks,
    num_shards as num_shards,
)
from .registry import (
    WRAPPERS as WRAPPERS,
    DdpConfig as DdpConfig,
    Fsdp1Config as Fsdp1Config,
    Fsdp2Config as Fsdp2Config,
    shard as shard,
)
from .tensor_parallel import (
    COLUMN_STYLES as COLUMN_STYLES,
    EMBEDDING_STYLE as EMBEDDING_STYLE,
    GATHERED_STYLES as GATHERED_STYLES,
    INFERENCE_STYLES as INFERENCE_STYLES,
    ROW_STYLES as ROW_STYLES,
    apply_tensor_parallel as apply_tensor_parallel,
    check_tensor_parallel as check_tensor_parallel,
)
from .wrap_policy import plan_units as plan_units, unit_tree as unit_tree
