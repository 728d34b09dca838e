"""What a pickle that is read without being run may name and call: constructors of a given table, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_shard.checkpoint.torch_save.pickle_objects import Global, Malformed, StandIn

# Constructors may copy so many times as many items as the pickle has bytes, however often it recalls one.
_COPIES = 16
_CONTAINERS = (tuple, dict, list, str, bytes, bytearray, set, frozenset)
_TWO_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 writes the names of Python 2

Names = Mapping[tuple[str, str], Any]
"""(module, name) -> a constructor of what stands in for a class or function, or (not callable) a constant."""


class Calls:
    """The calls of one pickle of `num_bytes`; all that is wrong with one is `Malformed`."""

    def __init__(self, names: Names, num_bytes: int) -> None:
        self._names = names
        self._globals: dict[tuple[str, str], Any] = {}
        self._budget = _COPIES * num_bytes

    def find(self, module: str, name: str) -> Any:
        """What stands for `module.name`: a `Global`, or a constant."""
        module = _TWO_NAMES.get(module, module)
        key = (module, name)
        if key not in self._globals:
            found = self._names.get(key)
            if found is None:
                asked = f"{module}.{name}"
                raise Malformed(
                    f"asks to run {asked[:200]!r}, which no state dict is made of, so nothing of it is read"
                )
            self._globals[key] = Global(f"{module}.{name}", found) if callable(found) else found
        return self._globals[key]

    def call(self, function: Any, arguments: Any, keywords: Any = None) -> Any:
        """What the constructor that stands for a class or function makes of the arguments."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("calls what is no class or function")
        if function.name == "builtins.getattr":
            return self._attribute(*arguments)
        try:
            self._charge(arguments)
            return function.make(*arguments, **(keywords or {}))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise Malformed(f"gives {function.name} what it does not take ({short(error)})") from None

    def _charge(self, values: tuple[Any, ...]) -> None:
        """A list that is named once and handed to a million constructors must not take a million times its size."""
        cost = len(values)
        for value in values:
            if isinstance(value, _CONTAINERS):
                cost += len(value)
                if isinstance(value, dict):
                    for item in value.values():
                        if isinstance(item, _CONTAINERS):
                            cost += len(item)
        self._budget -= cost
        if self._budget < 0:
            raise Malformed("copies the same items over and over")

    def _attribute(self, owner: Any = None, name: Any = None, *rest: Any) -> Any:
        """Protocols below 4 have no dotted names: a nested class or a member of an enum is written as a getattr."""
        if rest or not isinstance(owner, Global) or not isinstance(name, str):
            raise Malformed("asks to run 'builtins.getattr' on what is no class that state dicts are made of")
        module, _, outer = owner.name.rpartition(".")
        return self.find(module, f"{outer}.{name}")

    def build(self, target: Any, state: Any) -> None:
        """Hand a stand-in what the class's own `__setstate__` would get."""
        if not isinstance(target, StandIn):
            raise Malformed(f"sets the state of a {type(target).__name__}")
        try:
            self._charge(state if isinstance(state, tuple) else (state,))
            target.set_state(state)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise Malformed(f"gives a {type(target).__name__} a state that it cannot have ({short(error)})") from None


def short(error: Exception) -> str:
    """One line of an error's own words."""
    return " ".join(str(error).split())[:200]
