from .available_memory import free_cpu_bytes as free_cpu_bytes, peak_gpu_bytes as peak_gpu_bytes
from .compare_logits import diff_logits as diff_logits
from .config import (
    DispatchConfig as DispatchConfig,
    GenerateSettings as GenerateSettings,
    GenerationSettings as GenerationSettings,
)
from .dispatch import (
    check_checkpoint as check_checkpoint,
    dispatch_model as dispatch_model,
    load_dispatched as load_dispatched,
    plan_from_config as plan_from_config,
)
from .generation.chat_session import converse as converse
from .generation.completions_file import open_output as open_output
from .generation.data_parallel import Share as Share, shared_work as shared_work
from .generation.decoder import Decoder as Decoder, complete as complete
from .generation.kv_cache_size import Room as Room, room_for as room_for
from .generation.prompts import (
    check_standard_input as check_standard_input,
    describe as describe,
    read_prompts as read_prompts,
)
from .generation.tokenize_prompts import check_chat as check_chat, check_generates as check_generates, encode as encode
from .offload.mmap_tensors import MappedFiles as MappedFiles
