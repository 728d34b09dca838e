"""Detects quantized weights by the scales and codes that are stored with them. Imports no torch."""

import re
from pathlib import Path

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.keys.tied_weights import read_config
from fsdp_shard.errors import CheckpointError

# What only a quantized model has, by the names that transformers' quantizers and their libraries give it.
_MARKS = {
    "fp8": r"_scale_inv$",
    "mxfp4": r"_blocks$",
    "gptq": r"\.g_idx$",
    "awq": r"\.qweight$",
    "bitsandbytes": r"\.weight\.(absmax|quant_map)$|\.SCB$",
    "hqq": r"\.W_q$",
    "quanto": r"\.weight\._data$",
    "compressed-tensors": r"\.weight_(packed|scale)$",
}
DEQUANTIZED = frozenset({"fp8", "mxfp4"})
"""The methods that `convert dequantize=true` knows."""

_PACKED = frozenset({"U8", "I8", "I32", "F8_E4M3", "F8_E5M2"})
# Codes of AQLM, HIGGS, SpQR and MLX; alone they are no sign, since models have buffers of integers.
_WIDE_CODES = frozenset({"I16", "U16", "U32", "I64", "U64"})
_POSITIONS = re.compile(r"position_ids$|position_index$")


def quantization(index: TensorIndex) -> str | None:
    """The method that the weights of a checkpoint are quantized by, such as fp8; None if they are plain numbers.

    Weights of a GGUF file are plain, as they are dequantized when they are read. A config that names a method for plain
    weights is an old one.
    """
    try:
        configured = configured_quantization(index.model_directory)
    except CheckpointError:  # whoever needs the config reports what is wrong with it; the weights can be read without
        configured = None
    names = "\n".join(index.names)
    marks = [method for method, mark in _MARKS.items() if re.search(mark, names, re.MULTILINE)]
    if "mxfp4" in marks and not re.search("_scales$", names, re.MULTILINE):
        marks.remove("mxfp4")
    matrices = [entry for entry in index.tensors.values() if len(entry.shape) > 1]
    codes = _PACKED | (_WIDE_CODES if configured else frozenset())
    is_packed = any(entry.dtype in codes and not _POSITIONS.search(entry.name) for entry in matrices)
    if not marks and not is_packed:
        return None
    return configured or next(iter(marks), None)


def configured_quantization(directory: Path) -> str | None:
    """The method that the config.json in a directory names, if it names one."""
    config = read_config(directory).get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    return method if isinstance(method, str) else None


def refuse_quantized(path: Path, method: str | None) -> None:
    """Raise CheckpointError if the weights at `path` are quantized by a `method`."""
    if method is not None:
        advice = (
            "convert it with dequantize=true first"
            if method in DEQUANTIZED
            else "give the model that it was made from, or one that transformers has dequantized and saved"
        )
        raise CheckpointError(
            f"{path} is quantized ({method}), and only weights in floating point can be run or trained here; {advice}."
        )
