from .available_memory import free_cpu_bytes as free_cpu_bytes
from .compare_logits import diff_logits as diff_logits
from .config import (
    DispatchConfig as DispatchConfig,
    GenerateSettings as GenerateSettings,
    GenerationSettings as GenerationSettings,
)
from .dispatch import (
    dispatch_model as dispatch_model,
    load_dispatched as load_dispatched,
    plan_from_config as plan_from_config,
)
from .generation.kv_cache_size import KVCacheBudget as KVCacheBudget
from .generation.text_generation import complete_prompts as complete_prompts, join_ranks as join_ranks
from .offload.mmap_tensors import MappedFiles as MappedFiles
from .preflight import check_checkpoint as check_checkpoint, check_generation as check_generation
