"""Finds NaN and infinities in the bit patterns of tensors, at about the read speed.

Imports numpy only if there is data to search, and never torch.
"""

from dataclasses import dataclass
from typing import Any

# dtype -> (numpy's unsigned type of the bits, the bits without the sign, the smallest such value that is infinite or
# NaN, the pattern of infinity or None). Source: IEEE 754; for F8 the OCP 8-bit floating point and microscaling
# specifications. Of a C64 number both parts are looked at.
_PATTERNS: dict[str, tuple[str, int, int, int | None]] = {
    "F64": ("u8", (1 << 63) - 1, 0x7FF << 52, 0x7FF << 52),
    "F32": ("u4", 0x7FFFFFFF, 0x7F800000, 0x7F800000),
    "C64": ("u4", 0x7FFFFFFF, 0x7F800000, 0x7F800000),
    "F16": ("u2", 0x7FFF, 0x7C00, 0x7C00),
    "BF16": ("u2", 0x7FFF, 0x7F80, 0x7F80),
    "F8_E5M2": ("u1", 0x7F, 0x7C, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7F, None),
    "F8_E8M0": ("u1", 0xFF, 0xFF, None),
}
_MINUS_ZERO_IS_NAN = frozenset({"F8_E4M3FNUZ", "F8_E5M2FNUZ"})

DTYPES = frozenset(_PATTERNS) | _MINUS_ZERO_IS_NAN
"""The dtypes that have NaN or infinities."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The numbers of NaN and infinite elements, and the position of the first one.

    A complex number with one NaN and one infinite part counts as NaN.
    """

    num_nan: int
    num_inf: int
    first: int


def find_non_finite(dtype: str, data: memoryview) -> NonFinite | None:
    """Search `data`, elements of one of `DTYPES`, for NaN and infinities; None if all elements are finite."""
    import numpy as np

    if dtype in _MINUS_ZERO_IS_NAN:
        is_nan = np.frombuffer(data, np.uint8) == 0x80
        return _found(is_nan, np.zeros_like(is_nan))
    kind, magnitude, limit, infinity = _PATTERNS[dtype]
    bits: Any = np.frombuffer(data, f"<{kind}") & np.array(magnitude, f"<{kind}")
    if not bits.size or bits.max() < limit:  # the usual case needs one pass and no boolean array
        return None
    is_bad = bits >= limit
    is_inf = np.zeros_like(is_bad) if infinity is None else bits == infinity
    is_nan = is_bad & ~is_inf
    if dtype == "C64":
        is_nan, is_inf = is_nan.reshape(-1, 2).any(axis=1), is_inf.reshape(-1, 2).any(axis=1)
        is_inf &= ~is_nan
    return _found(is_nan, is_inf)


def _found(is_nan: Any, is_inf: Any) -> NonFinite | None:
    is_bad = is_nan | is_inf
    return NonFinite(int(is_nan.sum()), int(is_inf.sum()), int(is_bad.argmax())) if is_bad.any() else None
