"""Finds tensors that a model keeps in float32 while its weights are in 16 bits, such as DeepSeek's routers."""

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import from_torch_name, has_file, to_torch
from fsdp_shard.checkpoint.model_files import CONFIG, read_config
from fsdp_shard.errors import ModelError
from fsdp_shard.utils import first_line, format_count

FLOAT32 = "float32"
_IN_16_BITS = ("bfloat16", "float16")
_WIDER = ("F32", "F64")
# Common model types without exceptions: a cast need not import transformers and build the model, which takes seconds. A
# test compares them with their classes.
WITHOUT_EXCEPTIONS = frozenset({
    "bert", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "smollm3",
})  # fmt: skip


def kept_in_float32(index: TensorIndex, dtype: str) -> tuple[frozenset[str], str | None]:
    """Find the stored tensors that `from_pretrained` loads in float32 while it loads the model in `dtype`.

    The model is built on the meta device, which imports transformers, unless its type is known to have none.

    Args:
        index: The checkpoint.
        dtype: torch's name of a dtype.

    Returns:
        The names of those stored in more than 16 bits, none without a config; and a line that lists them, or explains
        why they are unknown.
    """
    wide = [name for name, entry in index.tensors.items() if entry.dtype in _WIDER]
    if dtype not in _IN_16_BITS or not wide or not has_file(index.model_directory, CONFIG):
        return frozenset(), None
    if read_config(index.model_directory).get("model_type") in WITHOUT_EXCEPTIONS:
        return frozenset(), None
    from fsdp_shard.models import build_on_meta, kept_dtype, load_config

    try:
        model = build_on_meta(load_config(index.model_directory), dtype)
    except ModelError as error:
        return (
            frozenset(),
            f"all tensors are cast, as which the model keeps in float32 is not known: {first_line(error)}",
        )
    own = kept_dtype(model, to_torch(from_torch_name(dtype)))
    kept = [name for name in wide if own(name) is not None]
    if not kept:
        return frozenset(), None
    return frozenset(kept), (
        f"kept in float32, as the model loads them: {format_count(len(kept), 'tensor')} ({kept[0]} first)"
    )
