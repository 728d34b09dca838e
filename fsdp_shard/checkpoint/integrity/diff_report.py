"""The result of `diff`, and its text: grouped by layer, the largest differences first."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_shard.checkpoint.integrity.inspect_report import fold, shape_text
from fsdp_shard.checkpoint.io import TensorSpec, torch_name
from fsdp_shard.errors import one_line
from fsdp_shard.utils import format_count, format_size, format_table

_LAYERS_SHOWN, _TENSORS_SHOWN, _LINES_SHOWN = 10, 3, 20


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    path: str
    format: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor in both checkpoints whose dtype, shape, or bytes differ. Pairs are (in A, in B).

    The other fields are those of `numeric_errors.Errors`, or None if the shapes differ; `worst` is the index of the
    largest absolute error, if any.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    num_different: int | None = None
    num_special: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None
    cosine: float | None = None
    worst: tuple[int, ...] | None = None

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """A sort key: larger means worse."""
        is_other_shape = self.shapes[0] != self.shapes[1]
        return is_other_shape, bool(self.num_special), self.max_absolute or 0.0, self.max_relative or 0.0

    @property
    def layer(self) -> str:
        """The name up to its layer's number, or the tensor's module."""
        match = re.match(r"(.*?\.\d+)\.", self.name)
        return match[1] if match else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class DiffReport:
    """The result: `missing` tensors are only in A, `extra` only in B; `differences` are sorted, the largest first.
    `settings` are the settings in which two adapters differ; `notes` say what was not compared.
    """

    a: Side
    b: Side
    missing: tuple[TensorSpec, ...]
    extra: tuple[TensorSpec, ...]
    num_equal: int
    differences: tuple[TensorDifference, ...]
    seconds: float
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all tensors are equal, byte for byte, and so are the settings of two adapters."""
        return not (self.missing or self.extra or self.differences or self.settings)

    @property
    def num_differences(self) -> int:
        """The number of tensors that differ or are in only one checkpoint."""
        return len(self.missing) + len(self.extra) + len(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """The fields above and `is_equal`, for JSON."""
        return {"is_equal": self.is_equal, **asdict(self)}

    def to_text(self, everything: bool = False) -> str:
        """Format for a terminal; of many tensors, only the worst in the worst layers unless `everything` is set."""
        if self.is_equal:
            size = f"{format_count(self.num_equal, 'tensor')}, {format_size(self.a.num_bytes)}"
            said = f"{self.a.path} and {self.b.path} are equal, byte for byte ({size}; {self.seconds:.1f} s)."
            return "\n".join([said, *map(one_line, self.notes)])
        lines = [_head("A", self.a), _head("B", self.b), *self.settings, *map(one_line, self.notes)]
        lines += _one_sided("only in A", self.missing, everything)
        lines += _one_sided("only in B", self.extra, everything)
        shapes = [found for found in self.differences if found.max_absolute is None]
        if shapes:
            lines += ["", f"other shape: {format_count(len(shapes), 'tensor')}"]
            rows = [
                f"  {one_line(d.name)}  {shape_text(d.shapes[0])} in A, {shape_text(d.shapes[1])} in B" for d in shapes
            ]
            lines += _cut(rows, everything)
        lines += _dtypes(self.differences)
        lines += _values([found for found in self.differences if found.max_absolute is not None], everything)
        total = format_count(self.num_differences + self.num_equal, "tensor")
        lines += ["", f"{self.num_differences:,} of {total} differ ({self.seconds:.1f} s)."]
        return "\n".join(lines)


def _head(label: str, side: Side) -> str:
    size = f"{format_count(side.num_tensors, 'tensor')}, {format_size(side.num_bytes)}"
    return f"{label}  {side.path} ({side.format}, {size})"


def _one_sided(title: str, specs: Sequence[TensorSpec], everything: bool) -> Iterator[str]:
    if specs:
        yield ""
        yield f"{title}: {format_count(len(specs), 'tensor')}, {format_size(sum(spec.num_bytes for spec in specs))}"
        yield from _cut([f"  {line}" for line in fold(specs)], everything)


def _dtypes(differences: Sequence[TensorDifference]) -> Iterator[str]:
    counts = Counter(found.dtypes for found in differences if found.dtypes[0] != found.dtypes[1])
    if counts:
        yield ""
    for (first, second), count in counts.most_common():
        yield f"other dtype: {format_count(count, 'tensor')}, {torch_name(first)} in A and {torch_name(second)} in B"


def _values(differences: Sequence[TensorDifference], everything: bool) -> Iterator[str]:
    """A table of the tensors whose values differ, by layer."""
    other = [found for found in differences if found.num_different]
    if same := len(differences) - len(other):
        yield from ("", f"same values in other bits: {format_count(same, 'tensor')}")
    if not other:
        return
    layers: dict[str, list[TensorDifference]] = {}
    for found in other:  # sorted, so the layers are too
        layers.setdefault(found.layer, []).append(found)
    shown = list(layers.items()) if everything else list(layers.items())[:_LAYERS_SHOWN]
    rows: list[tuple[str, ...]] = [("", "max |a-b|", "relative", "cosine", "different")]
    for layer, tensors in shown:
        rows += _layer_rows(layer, tensors, everything)
    yield from ("", f"other values: {format_count(len(other), 'tensor')}, those that differ most first")
    yield from format_table(rows, right=range(1, 4))
    if left := list(layers.values())[len(shown) :]:
        yield f"{len(left):,} more layers and modules, {_at_most(left[0])}; --all shows them"
    yield "relative: to the larger of the two values. cosine: of the angle between A and B as vectors."


def _layer_rows(layer: str, tensors: Sequence[TensorDifference], everything: bool) -> Iterator[tuple[str, ...]]:
    yield (layer or "(top)",)
    shown = tensors if everything else tensors[:_TENSORS_SHOWN]
    for found in shown:
        name = found.name[len(layer) + 1 :] if layer else found.name
        total = math.prod(found.shapes[0])
        assert found.num_different is not None
        is_few = found.num_different < total / 100
        part = f"{found.num_different:,}" if is_few else f"{100 * found.num_different / total:.1f}%"
        special = f", {found.num_special:,} NaN or infinite in one only" if found.num_special else ""
        yield (
            f"  {name}",
            _number(found.max_absolute),
            _number(found.max_relative),
            _cosine(found.cosine),
            f"{part} of {total:,}{special}",
        )
    if left := tensors[len(shown) :]:
        yield (f"  {len(left)} more, {_at_most(left)}",)


def _at_most(tensors: Sequence[TensorDifference]) -> str:
    return f"at most {_number(max(found.max_absolute or 0.0 for found in tensors))}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _cosine(value: float | None) -> str:
    if value is None:
        return "-"
    return f"1 - {1 - value:.1e}" if 1e-12 < 1 - value < 1e-5 else f"{value:.6g}"


def _cut(lines: list[str], everything: bool) -> list[str]:
    if everything or len(lines) <= _LINES_SHOWN:
        return lines
    return [*lines[:_LINES_SHOWN], f"  ... and {len(lines) - _LINES_SHOWN:,} more lines; --all shows them"]
