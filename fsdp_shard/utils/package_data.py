"""The recipes and configs shipped with the package, and HTML pages rendered from its templates.

In a checkout, recipes and configs are next to the package; in an installed wheel, inside it.
"""

import ast
import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.utils.text import printable

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_directory(folder: str) -> Path:
    """Return the directory of the shipped `conf` or `recipes`."""
    inside = _PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def is_shipped(file: Path) -> bool:
    """Whether a file is a recipe that ships, or a module of this package."""
    file = file.resolve()
    return file.is_relative_to(_PACKAGE) or file.parent == shipped_directory("recipes").resolve()


@dataclass(frozen=True)
class Item:
    """A file that users may copy, with the name that `ls` shows and `cp` accepts."""

    name: str
    path: Path
    description: str


def recipes() -> list[Item]:
    """Return the shipped recipes, described by the first lines of their docstrings."""
    return [Item(file.stem, file, _docstring(file)) for file in sorted(shipped_directory("recipes").glob("*.py"))]


def configs() -> list[Item]:
    """Return the shipped configs, named by their path below conf/, described by their first comments."""
    root = shipped_directory("conf")
    found = (file for file in root.rglob("*.yaml") if file.parent.name != "lm_eval")  # lm_eval tasks are not configs
    files = sorted(found, key=lambda file: (file.parent != root, file))
    return [Item(file.relative_to(root).as_posix(), file, _first_comment(file)) for file in files]


def render_page(template: Path, style: Path, script: Path | None = None, **values: Any) -> str:
    """Render a self-contained HTML page: style and script are inline, and nothing else may run.

    Args:
        template: The page as a jinja2 template, which escapes all values; it has the filter `printable`, and receives
            `style`, `script`, and the Content-Security-Policy as `policy`.
        style: A CSS file without an end tag.
        script: A JavaScript file without an end tag.
        values: Other values that the template shows.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    policy, allowed = "default-src 'none'; ", {"style": style} if script is None else {"style": style, "script": script}
    for kind, file in allowed.items():
        content = file.read_text(encoding="utf-8")
        policy += f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'; "
        values[kind] = Markup(content)
    policy += "img-src data:; base-uri 'none'; form-action 'none'"
    return environment.get_template(template.name).render(policy=policy, **values)


def _docstring(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _first_comment(file: Path) -> str:
    """The first comment line that is not a `# @package` directive of Hydra."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ")
    return ""
