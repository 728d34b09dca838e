"""For the site: a link to a file of the repository that is no page, such as a script in examples/, becomes its name."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page. A link to a file that does not exist stays, for the build to fail on it."""
    docs = Path(config.docs_dir)

    def named(link: re.Match[str]) -> str:
        text, address = link.groups()
        target = (Path(page.file.abs_src_path).parent / address).resolve()
        if target.is_relative_to(docs) or not target.is_file():
            return link[0]
        name = f"`{target.relative_to(docs.parent)}`"
        return name if target.name in text else f"{text} ({name})"

    return _LINK.sub(named, markdown)
