"""Detects quantized weights by the scales and codes stored with them. Imports no torch."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.model_files import read_config
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import parse_json

# Tensors that only quantized models have, under the names of transformers' quantizers and their libraries.
_MARKS = {
    "fp8": r"_scale_inv$",
    "mxfp4": r"_blocks$",
    "gptq": r"\.g_idx$",
    "awq": r"\.qweight$",
    "bitsandbytes": r"\.weight\.(absmax|quant_map)$|\.SCB$",
    "hqq": r"\.W_q$",
    "quanto": r"\.weight\._data(\._data)?$",
    "compressed-tensors": r"\.weight_(packed|scale)$",
}
DEQUANTIZED = frozenset({"fp8", "mxfp4"})
"""The methods that `convert dequantize=true` supports."""
IS_DEQUANTIZED = "is_dequantized"
"""Set to True in the metadata of an index of dequantized weights: config.json still describes the stored ones."""

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_PACKED = FLOAT8 | {"U8", "I8", "I32"}
# Codes of AQLM, HIGGS, SpQR and MLX; not a sign by themselves, since models have integer buffers.
_WIDE_CODES = frozenset({"I16", "U16", "U32", "I64", "U64"})
_POSITIONS = re.compile(r"position_ids$|position_index$")
_UNKNOWN_FLOAT8 = "float8 of an unknown method"
# The ends of the names of scales and codes. What precedes them is equal for both, as in x.weight_packed and x.scales.
_OF_SCALES = re.compile(r"(?:[._]+weight)?[._]+(?:q?scales?(?:_inv|_weight)?|scaler|absmax|SCB)$")
_OF_CODES = re.compile(r"(?:[._]+(?:q?weight|packed|codes|W_q|data|blocks))+$")
# Methods that quantize in each forward pass if the config has one of these entries; the stored weights are plain.
_IN_FORWARD: dict[str, dict[str, Any]] = {
    "bitnet": {"linear_class": "autobitlinear", "quantization_mode": "online"},
    "fp_quant": {"store_master_weights": True},
    "fouroversix": {"keep_master_weights": True},
}
_TORCHAO_NAMES = "tensor_names"
_TEXT_CONFIGS = ("text_config", "decoder", "generator")  # where transformers looks next


def quantization(index: TensorIndex) -> str | None:
    """Return the method that quantized a checkpoint's weights, such as fp8; None if they are plain numbers.

    Weights of a GGUF file are plain, as reading dequantizes them. A config that names a method for plain weights is
    outdated, unless that method quantizes in each forward pass: then the weights are of another model.
    """
    if index.metadata.get(IS_DEQUANTIZED) is True:
        return None
    try:
        settings = quantization_settings(index.model_directory)
    except CheckpointError:  # code that needs the config reports its errors; the weights can be read without it
        settings = {}
    configured = _method(settings)
    names = "\n".join(index.names)
    marks = [method for method, mark in _MARKS.items() if re.search(mark, names, re.MULTILINE)]
    if "mxfp4" in marks and not re.search("_scales$", names, re.MULTILINE):
        marks.remove("mxfp4")
    matrices = [entry for entry in index.tensors.values() if len(entry.shape) > 1]
    if any(entry.dtype == "U32" and _mlx_scales(entry.name) in index.tensors for entry in matrices):
        marks.append("mlx")
    if not marks and any(entry.dtype in FLOAT8 for entry in matrices) and scales_of(index, FLOAT8):
        marks.append(_UNKNOWN_FLOAT8)
    codes = _PACKED | (_WIDE_CODES if configured and configured not in DEQUANTIZED else frozenset())
    is_packed = any(entry.dtype in codes and not _POSITIONS.search(entry.name) for entry in matrices)
    entries = _IN_FORWARD.get(configured or "", {})
    is_in_forward = any(settings.get(key) == value for key, value in entries.items())
    if not marks and not is_packed and not is_in_forward:
        return None
    return configured or next(iter(marks), None)


def scales_of(index: TensorIndex, dtypes: Collection[str]) -> dict[str, str]:
    """Return the scales of the matrices of some dtypes, by any method's names: {matrix: scales}."""
    matrices = [name for name, entry in index.tensors.items() if entry.dtype in dtypes and len(entry.shape) > 1]
    scales = {_OF_SCALES.sub("", name): name for name in index.names if _OF_SCALES.search(name)} if matrices else {}
    stems = {name: _OF_CODES.sub("", name) for name in matrices}
    return {name: scales[stem] for name, stem in stems.items() if stem in scales}


def configured_quantization(directory: Path) -> str | None:
    """Return the method named in a directory's config.json, if any."""
    return _method(quantization_settings(directory))


def quantization_settings(directory: Path) -> Mapping[str, Any]:
    """Return `quantization_config` of a directory's config.json, or of its text model; empty if neither has it."""
    config = read_config(directory)
    for part in (config, *(config.get(name) for name in _TEXT_CONFIGS)):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if found and isinstance(found, Mapping):
            return found
    return {}


def torchao_metadata(index: TensorIndex) -> dict[str, str]:
    """Return the header entries without which torchao's tensors cannot be loaded; empty if there are none.

    Each tensor of torchao is stored in parts, and transformers describes it in the headers of all files. Source:
    `torchao/prototype/safetensors/safetensors_utils.py`.
    """
    try:
        names = parse_json(index.metadata.get(_TORCHAO_NAMES, "null").encode(), "the header")
    except CheckpointError:  # an entry of something else
        return {}
    if not isinstance(names, list):
        return {}
    kept = [_TORCHAO_NAMES, *(name for name in names if isinstance(name, str))]
    return {name: index.metadata[name] for name in kept if name in index.metadata}


def _method(settings: Mapping[str, Any]) -> str | None:
    method = settings.get("quant_method")
    return method if isinstance(method, str) else None


def _mlx_scales(name: str) -> str:
    """Return MLX's name of the scales of a weight."""
    return f"{name.removesuffix('weight')}scales"


def refuse_quantized(path: Path, method: str | None) -> None:
    """Raise CheckpointError if the weights at `path` are quantized by a `method`."""
    if method in _IN_FORWARD:
        raise CheckpointError(
            f"{path} is quantized ({method}), where it is stored or in each forward pass, and such a model can neither "
            f"be run nor trained here; use transformers."
        )
    if method is not None:
        advice = (
            "convert it with dequantize=true first"
            if method in DEQUANTIZED
            else "give the model that it was made from, or one that transformers has dequantized and saved"
        )
        raise CheckpointError(
            f"{path} is quantized ({method}), and only weights in floating point can be run or trained here; {advice}."
        )
