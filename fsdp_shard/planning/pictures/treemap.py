"""The treemap of units by bytes: a rectangle per unit, divided by what a rank holds of it.

Rows are "squarified" (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000). There are no gaps between rectangles, so
areas are exactly proportional to bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_shard.planning.pictures.timeline import color_of
from fsdp_shard.planning.step.unit_holdings import UnitHolding
from fsdp_shard.utils import format_size

WIDTH, HEIGHT = 1000.0, 520.0
_CHARACTER, _LINE = 7.2, 17.0  # size of the text


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle, in the units of the picture."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class TreemapCell:
    """One term of a unit on a rank: its rectangle, bytes, color, and a description."""

    box: Rectangle
    num_bytes: int
    color: str
    description: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A unit: its rectangle, its cells, and a label, which is empty if there is no room."""

    name: str
    box: Rectangle
    num_bytes: int
    cells: Sequence[TreemapCell]
    label: str


def treemap(units: Sequence[UnitHolding]) -> list[Tile]:
    """Lay out the units, largest first; empty units are skipped."""
    held = sorted((unit for unit in units if unit.total_bytes), key=lambda unit: -unit.total_bytes)
    boxes = squarify([unit.total_bytes for unit in held], Rectangle(0.0, 0.0, WIDTH, HEIGHT))
    return [_tile(unit, box) for unit, box in zip(held, boxes, strict=True)]


def _tile(unit: UnitHolding, box: Rectangle) -> Tile:
    name, terms = unit.fqn or "(root)", [term for term, num in unit.terms.items() if num]
    sizes, colors = [unit.terms[term] for term in terms], color_of(terms)
    cells = [
        TreemapCell(part, size, colors[term], f"{name}: {term} {format_size(size)} of {format_size(unit.total_bytes)}")
        for term, size, part in zip(terms, sizes, _slices(sizes, box), strict=True)
    ]
    room = int((box.width - 10) / _CHARACTER)
    label = name if len(name) <= room else f"…{name[len(name) - room + 1 :]}" if room > 4 else ""
    return Tile(name, box, unit.total_bytes, cells, label if box.height > _LINE + 6 else "")


def _slices(sizes: Sequence[float], box: Rectangle) -> Iterator[Rectangle]:
    """Divide a rectangle along its longer side."""
    total, before = sum(sizes), 0.0
    for size in sizes:
        start, share = before / total, size / total
        if box.width >= box.height:
            yield Rectangle(box.x + box.width * start, box.y, box.width * share, box.height)
        else:
            yield Rectangle(box.x, box.y + box.height * start, box.width, box.height * share)
        before += size


def squarify(sizes: Sequence[int], box: Rectangle) -> list[Rectangle]:
    """Divide a rectangle into parts with areas proportional to `sizes`, as square as possible.

    Args:
        sizes: Positive numbers, descending.
        box: The rectangle.
    """
    if not sizes:
        return []
    scale = box.width * box.height / sum(sizes)
    areas, found = [size * scale for size in sizes], list[Rectangle]()
    while areas:
        side = min(box.width, box.height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
            count += 1
        row, areas = areas[:count], areas[count:]
        strip, box = _cut(box, sum(row), is_last=not areas)
        found += _slices(row, strip)
    return found


def _worst(row: Sequence[float], side: float) -> float:
    """The worst aspect ratio in a row of areas along a side."""
    total = sum(row)
    return max(side * side * max(row) / (total * total), total * total / (side * side * min(row)))


def _cut(box: Rectangle, area: float, *, is_last: bool) -> tuple[Rectangle, Rectangle]:
    """Cut off a strip of this area along the shorter side; return the strip and the rest."""
    if is_last:
        return box, Rectangle(box.x + box.width, box.y + box.height, 0.0, 0.0)
    if box.width >= box.height:
        width = area / box.height
        return (
            Rectangle(box.x, box.y, width, box.height),
            Rectangle(box.x + width, box.y, box.width - width, box.height),
        )
    height = area / box.width
    return (
        Rectangle(box.x, box.y, box.width, height),
        Rectangle(box.x, box.y + height, box.width, box.height - height),
    )
