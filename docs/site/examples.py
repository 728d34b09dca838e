"""For the reference: a section `Example:` of a docstring is code with its output, as `Examples:` is to griffe."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the sections before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
