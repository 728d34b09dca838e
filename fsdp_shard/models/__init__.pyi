from .blocks import Block as Block, no_split_blocks as no_split_blocks, tied_names as tied_names
from .config import (
    CAUSAL as CAUSAL,
    MASKED_LM as MASKED_LM,
    REMOTE_CODE as REMOTE_CODE,
    SEQ2SEQ as SEQ2SEQ,
    SEQUENCE_CLASSIFICATION as SEQUENCE_CLASSIFICATION,
    ModelConfig as ModelConfig,
)
from .context_length import (
    ContextLength as ContextLength,
    LengthSettings as LengthSettings,
    context_length_of as context_length_of,
    frequency_limit as frequency_limit,
    load_context_length as load_context_length,
    settle_length as settle_length,
)
from .file_errors import (
    config_file as config_file,
    model_errors as model_errors,
    model_run_errors as model_run_errors,
    origin as origin,
    tokenizer_files as tokenizer_files,
)
from .gguf_config import GGUF_FORMAT as GGUF_FORMAT, gguf_model_files as gguf_model_files
from .loading import (
    attention_implementations as attention_implementations,
    build_class_on_meta as build_class_on_meta,
    build_on_meta as build_on_meta,
    check_causal as check_causal,
    check_model_task as check_model_task,
    check_vocabulary as check_vocabulary,
    classifier_name as classifier_name,
    computed_tensor as computed_tensor,
    continued_text as continued_text,
    end_tokens as end_tokens,
    keep_dtypes as keep_dtypes,
    kept_dtype as kept_dtype,
    load_config as load_config,
    load_tokenizer as load_tokenizer,
    rebuild_buffers as rebuild_buffers,
    until_end as until_end,
)
from .model_directory import check_model_config as check_model_config, download_model as download_model
from .packing_check import (
    NUM_EXPERTS as NUM_EXPERTS,
    check_left_to_right as check_left_to_right,
    check_packing as check_packing,
    try_tiny_model as try_tiny_model,
)
from .quantized_linear import (
    QUANTIZATION_BLOCK as QUANTIZATION_BLOCK,
    QUANTIZATION_CODES as QUANTIZATION_CODES,
    QuantizationCode as QuantizationCode,
    QuantizedLinear as QuantizedLinear,
    QuantizedWeight as QuantizedWeight,
    quantized_weights as quantized_weights,
    weights_per_parameter as weights_per_parameter,
)
from .shared_prompts import (
    check_shared_prompts as check_shared_prompts,
    head_returns_answer_scores as head_returns_answer_scores,
    shared_prompt_masks as shared_prompt_masks,
)
from .transformers_private import (
    apply_tensor_plan as apply_tensor_plan,
    follows_plans_by_fqn as follows_plans_by_fqn,
    ignored_missing_keys as ignored_missing_keys,
    ignored_unexpected_keys as ignored_unexpected_keys,
    is_plain_fast_tokenizer as is_plain_fast_tokenizer,
    is_stateful as is_stateful,
    keep_experts as keep_experts,
    kv_cache_of as kv_cache_of,
    parallel_plan as parallel_plan,
)
