"""The quantizations of `dispatch.quantize`: a new one needs a file with its class, and a line here."""

from fsdp_shard.inference.int4 import Int4
from fsdp_shard.inference.int8 import Int8
from fsdp_shard.inference.quantization import Quantization

QUANTIZATIONS: dict[str, Quantization] = {"int8": Int8(), "int4": Int4()}
