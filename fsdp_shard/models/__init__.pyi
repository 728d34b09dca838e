from .blocks import Block as Block, no_split_blocks as no_split_blocks, tied_names as tied_names
from .context_length import check_packing as check_packing, num_positions as num_positions
from .gguf_config import NAME as NAME, side_directory as side_directory
from .loading import (
    REMOTE_CODE as REMOTE_CODE,
    ModelConfig as ModelConfig,
    ModelSource as ModelSource,
    build_on_meta as build_on_meta,
    check_causal as check_causal,
    check_task as check_task,
    load_config as load_config,
    load_tokenizer as load_tokenizer,
    rebuild_buffers as rebuild_buffers,
    resolve as resolve,
)
from .quantized_linear import (
    BLOCK as BLOCK,
    CODES as CODES,
    Code as Code,
    QuantizedLinear as QuantizedLinear,
    QuantizedWeight as QuantizedWeight,
    num_weights as num_weights,
    quantized_weights as quantized_weights,
    scratch_bytes as scratch_bytes,
)
