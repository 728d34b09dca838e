"""The pictures of a plan: exactly what is planned, in files that need nothing else and run nothing."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fsdp_shard.planning import MemoryPlan
from fsdp_shard.planning.pictures.plan_page import PAGE, PICTURE, plan_page, write_pictures
from fsdp_shard.planning.pictures.timeline import BOTTOM, TOP, byte_ticks, lay_out
from fsdp_shard.planning.pictures.treemap import HEIGHT, WIDTH, treemap
from fsdp_shard.planning.step.unit_holdings import UnitHolding
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config, ShardConfig
from fsdp_shard.training import OPTIMIZERS
from tests.support.plans import plan
from tests.support.runs import run_recipe
from tests.support.tiny import llama, llama_config

_HOSTILE = '<script>alert("&")</script>'


class _Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if attributes.get("class") == name]


def _page(found: MemoryPlan, memory_bytes: int | None = None, name: str = "a model") -> _Page:
    page = _Page(plan_page(found, lay_out(found.fullest.snapshots, memory_bytes), memory_bytes, name))
    assert not page.open  # every element ends
    return page


@pytest.mark.parametrize("shard", [Fsdp2Config(), Fsdp1Config(), DdpConfig()])
@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_units_hold_what_the_rank_holds(shard: ShardConfig, optim: str) -> None:
    found = plan(num_ranks=3, shard=shard, optim=OPTIMIZERS[optim]())
    for rank in found.per_rank:
        held = found.units_of(rank.rank)
        for term in ("parameters", "gradients", "optimizer"):
            assert sum(unit.terms.get(term, 0) for unit in held) == getattr(rank, f"{term}_bytes"), term


def test_areas_are_in_proportion_to_bytes() -> None:
    found = plan(llama_config(layers=5), num_ranks=2)
    page, total = _page(found), sum(unit.total_bytes for unit in found.units_of(found.fullest.rank))
    cells = page.of_class("cell")
    assert len(cells) >= 6 * 3
    for cell in cells:
        area = float(cell["width"] or 0) * float(cell["height"] or 0)
        assert area / (WIDTH * HEIGHT) == pytest.approx(int(cell["data-bytes"] or 0) / total, rel=0.01)
    assert sum(int(cell["data-bytes"] or 0) for cell in cells) == total == found.fullest.state_bytes


@pytest.mark.parametrize("sizes", [[1], [1000, 1], [7, 7, 7, 7], [10**9, 10**8, 10**8, 12345, 1000, 1000, 3]])
def test_tiles_do_not_overlap(sizes: list[int]) -> None:
    boxes = [tile.box for tile in treemap([UnitHolding(str(n), {"parameters": s}) for n, s in enumerate(sizes)])]
    assert len(boxes) == len(sizes)
    for number, one in enumerate(boxes):
        assert one.x + one.width <= WIDTH * (1 + 1e-9)
        assert one.y + one.height <= HEIGHT * (1 + 1e-9)
        for other in boxes[number + 1 :]:
            width = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            height = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert width < 1e-6 or height < 1e-6


def test_the_highest_point_is_the_peak() -> None:
    found = plan(num_ranks=2)
    timeline = lay_out(found.fullest.snapshots, None)
    page = _page(found)
    heights = [
        float(y) for layer in page.of_class("layer") for y in re.findall(r"[ML][\d.e+-]+ ([\d.e+-]+)", str(layer["d"]))
    ]
    highest = (BOTTOM - min(heights)) / (BOTTOM - TOP) * timeline.top_bytes
    assert highest == pytest.approx(found.peak_bytes, rel=1e-3)
    assert max(snapshot.total_bytes for snapshot in timeline.snapshots) == found.peak_bytes
    assert timeline.edges == sorted(timeline.edges)
    assert len(timeline.edges) == len(timeline.snapshots) + 1


def test_phases_have_their_names_in_order() -> None:
    found = plan(num_ranks=2)
    phases = [band.phase for band in lay_out(found.fullest.snapshots, None).bands]
    assert phases[:4] == ["load", "forward", "loss", "backward"]
    assert phases[-3:] == ["optimizer", "evaluation", "save"]
    assert len(phases) == 4 + phases.count("forward") * 3


def test_the_memory_of_a_device_is_a_line_unless_it_is_far_above() -> None:
    found = plan()
    near, far = 2 * (found.peak_bytes or 0), 80 * 10**9
    assert len(_page(found, near).of_class("limit")) == 1
    page = _page(found, far)
    assert not page.of_class("limit")
    assert "device.memory, 74.5 GiB, is above the picture." in page.words


def test_ticks_are_round_and_few() -> None:
    for most in (1, 700, 5_000, 3 << 20, 80 * 10**9, 3 << 45):
        ticks = byte_ticks(most)
        assert ticks[0] == 0
        assert ticks[-2] < most <= ticks[-1]
        assert len(ticks) <= 7


def test_names_are_text() -> None:
    found = plan(num_ranks=2)
    assert found.shards is not None
    units = tuple(replace(unit, fqn=_HOSTILE) if unit.fqn else unit for unit in found.shards.units)
    hostile = replace(found, shards=replace(found.shards, units=units))
    page = _page(hostile, name=_HOSTILE)
    assert "script" not in {tag for tag, _ in page.elements}
    assert any(attributes.get("data-unit") == _HOSTILE for _, attributes in page.elements)
    assert any(_HOSTILE in words for words in page.words)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "script" not in str(policy)
    assert "default-src 'none'" in str(policy)


def _check_png(content: bytes) -> None:
    """Each chunk has its checksum, and the pixels have the size of the header."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, dict[bytes, bytes]()
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = chunks.get(kind, b"") + data
        at += 12 + length
    width, height, depth = struct.unpack(">IIB", chunks[b"IHDR"][:9])
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert min(width, height) > 300
    assert depth == 8
    assert len(pixels) % height == 0
    assert len(set(pixels)) > 10


def test_plan_leaves_its_pictures_in_run_dir(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tmp_path / "a $model$ <b>"
    llama().save_pretrained(model)
    ended = run_recipe("plan", tmp_path / "plan", f"model.path={model}", "launch.ranks=2", "data.sequence_length=16")
    assert ended.status == 0, ended.err
    assert f"Pictures: {tmp_path / 'plan' / PAGE}." in ended.out
    text = (tmp_path / "plan" / PAGE).read_text()
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r"(src|href)=\"(?!data:,)", text)  # nothing from elsewhere
    page = _Page(text)
    assert not page.open
    _check_png((tmp_path / "plan" / PICTURE).read_bytes())


def test_a_plan_without_a_peak_has_a_page_alone(tmp_path: Path) -> None:
    found = plan()
    ranks = tuple(replace(rank, activations_bytes=None) for rank in found.per_rank)
    said = write_pictures(replace(found, per_rank=ranks, problem="no loss"), None, tmp_path, "m")
    assert said == f"There is no {PICTURE}: no loss."
    assert [file.name for file in tmp_path.iterdir()] == [PAGE]
    assert "timeline" not in (tmp_path / PAGE).read_text().split("</style>")[1]


def test_uneven_units_are_named() -> None:
    found = plan(num_ranks=4)
    assert found.shards is not None
    uneven = found.shards.uneven()
    sizes = [{unit.fqn: unit.terms.get("parameters", 0) for unit in found.units_of(rank)} for rank in range(4)]
    for unit in uneven:
        held = [of_rank.get(unit.fqn, 0) for of_rank in sizes]
        assert unit.most_bytes == max(held) > min(held)
        assert unit.mean_bytes == pytest.approx(sum(held) / 4)
    assert {unit.fqn for unit in uneven} == {fqn for fqn in sizes[0] if len({s.get(fqn, 0) for s in sizes}) > 1}
    assert plan(num_ranks=1).shards.uneven() == ()  # type: ignore[union-attr]  # it has shards
