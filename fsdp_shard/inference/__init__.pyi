from .available_memory import free_cpu_bytes as free_cpu_bytes
from .batch_schedule import Schedule as Schedule, plan_schedule as plan_schedule, stream_of as stream_of
from .compare_logits import diff_logits as diff_logits
from .config import (
    BATCH_MAJOR as BATCH_MAJOR,
    SCHEDULES as SCHEDULES,
    CheckpointSettings as CheckpointSettings,
    DispatchConfig as DispatchConfig,
    GenerateSettings as GenerateSettings,
    GenerationSettings as GenerationSettings,
    locate_adapters as locate_adapters,
    parse_adapters as parse_adapters,
    parse_budgets as parse_budgets,
)
from .device_map.device_plan import DevicePlan as DevicePlan, device_name as device_name
from .dispatch import (
    OnPlan as OnPlan,
    check_gpu_budgets as check_gpu_budgets,
    dispatch_model as dispatch_model,
    load_dispatched as load_dispatched,
    model_from_config as model_from_config,
    plan_dispatch as plan_dispatch,
    reserve_adapter_memory as reserve_adapter_memory,
)
from .generation.batching import complete as complete
from .generation.decoder import Decoder as Decoder
from .generation.kv_cache_size import (
    KVCacheBudget as KVCacheBudget,
    cached_blocks as cached_blocks,
)
from .generation.prompts import Completion as Completion, Prompt as Prompt
from .generation.text_generation import complete_prompts as complete_prompts
from .generation.tokenize_prompts import check_generates as check_generates
from .generation_checks import check_checkpoint as check_checkpoint, check_generation as check_generation
from .named_adapters import inject_adapters as inject_adapters
from .offload.mmap_tensors import MappedFiles as MappedFiles
from .offload.tensor_reader import READ_BYTES as READ_BYTES
from .registry import QUANTIZATIONS as QUANTIZATIONS
