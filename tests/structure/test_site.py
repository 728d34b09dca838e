"""The documentation as a site: it builds without a warning, has every page, and the reference has every public name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from fsdp_shard import errors
from tests.support.commands import ROOT

MKDOCS = os.environ.get("MKDOCS") or shutil.which("mkdocs")  # it may be in an environment of its own
DOCS = ROOT / "docs"


class _Anchors(HTMLParser):
    """The ids of a page, and what it loads by itself."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if name := given.get("id"):
            self.ids.add(name)
        if tag in ("script", "img", "iframe"):
            self.loaded.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "preload"):
            self.loaded.append(given.get("href") or "")


def navigation() -> list[str]:
    """The pages in mkdocs.yml."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return list(_pages(config["nav"]))


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _pages(part)


def public_names() -> list[str]:
    """The names in `fsdp_shard/__init__.pyi`."""
    door = (ROOT / "fsdp_shard" / "__init__.pyi").read_text(encoding="utf-8")
    return re.findall(r" as (\w+)", door)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built so that each warning is an error."""
    if MKDOCS is None:
        pytest.skip("mkdocs is not installed (the extra `docs`), and MKDOCS does not say where it is")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_in_the_navigation() -> None:
    pages = navigation()
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert len(set(pages)) == len(pages)


def test_each_link_leads_to_a_file() -> None:
    """Also on GitHub, where links out of docs/ work; the site shows their names (docs/site/outside_links.py)."""
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not re.match(r"https?://|#", target):
                assert (page.parent / target.partition("#")[0]).resolve().is_file(), f"{page}: {target}"


def test_each_path_that_contributing_names_exists() -> None:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:fsdp_shard|conf|docs|recipes|scripts|tests)/[^`\s]+)`", text)
    missing = [path for path in paths if not re.search("[A-Z]{4}", path) and not (DOCS.parent / path).exists()]
    assert len(paths) > 20
    assert not missing, missing


def test_every_error_is_explained() -> None:
    found = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    table = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    assert set(rows) == found
    for name, status in rows.items():
        expected = "128 + signal" if name == "Interrupted" else str(getattr(errors, name).exit_status)
        assert status == expected, name


def test_maps_on_command_lines_are_in_quotes() -> None:
    """A shell divides `name={key: value}` at its blanks."""
    pages = [ROOT / "README.md", *(page for page in DOCS.rglob("*.md") if page.name != "config.md")]
    bare = re.compile(r"(?<!['\w.])[a-z][\w.]*=\{\w+: [^}]*\}")
    found = {(page.name, one) for page in pages for one in bare.findall(page.read_text(encoding="utf-8"))}
    assert found == set()


@pytest.mark.long
def test_the_reference_has_every_public_name(site: Path) -> None:
    ids = _Anchors(site / "reference" / "python" / "index.html").ids
    missing = {f"fsdp_shard.{name}" for name in public_names()} - ids
    assert missing == {"fsdp_shard.errors"}, "which has a page of its own, errors.md"
    assert "fsdp_shard.Checkpointer.restore" in ids


@pytest.mark.long
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for name in navigation():
        page = Path(name)
        built = site / (page.parent if page.name == "index.md" else page.with_suffix("")) / "index.html"
        loaded = _Anchors(built).loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], name
    assert "Checkpointer" in (site / "search" / "search_index.json").read_text(encoding="utf-8")
