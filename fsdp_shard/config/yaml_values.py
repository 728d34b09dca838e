"""Reads YAML values as on the command line: `no`, `2:4`, `010` and dates are text.

In YAML 1.1, as read by PyYAML and OmegaConf, they are false, 124, 8 and dates.
"""

import re
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

_DIGITS, _EXPONENT = r"[0-9]+(?:_[0-9]+)*", r"(?:[eE][-+]?[0-9]+)"
_VALUES = {  # tag -> pattern, and its possible first characters
    "bool": ("true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "null": ("~|null|Null|NULL|", [*"~nN", ""]),
    "int": (r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", [*"-+0123456789"]),
    "float": (
        rf"[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?{_EXPONENT}?|{_DIGITS}{_EXPONENT}|\.{_DIGITS}{_EXPONENT}?|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "merge": ("<<", ["<"]),
}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no stubs
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {twice}", node.start_mark)
        return super().construct_mapping(node, deep=deep)


for _tag, (_pattern, _first) in _VALUES.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        yaml.YAMLError: It is not YAML, or has a duplicate key.
    """
    return yaml.load(text, _Loader)
