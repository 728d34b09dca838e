"""Generates the settings reference from the declarations: the text of `--help` and of docs/config.md.

`python -m fsdp_shard.config.reference` prints docs/config.md.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_shard.config.command_configs import COMMANDS, OPTIONS, RunConfig, command_of, is_used
from fsdp_shard.utils import REQUIRED, configs, in_yaml

# Type names of text settings, as `from __future__ import annotations` leaves them.
_OPTIONAL_TEXT: tuple[Any, ...] = (str | None, "str | None", "Optional[str]")
_TEXT: tuple[Any, ...] = (str, "str", *_OPTIONAL_TEXT)


@dataclass(frozen=True)
class Setting:
    """A leaf of a config: its dotted name, its default in command-line form, and its declaration.

    Options of a group whose default, help or accepted values differ from the first option's are listed in `defaults`,
    as (options, their default), and in `help` and `accepts`.
    """

    name: str
    default: str
    help: str
    accepts: str
    only_with: str = ""  # the group option that has it, if not all of the group's options do
    is_text: bool = False  # accepts any text, not only a few words
    can_unset: bool = True  # on the command line, `null` unsets it
    defaults: tuple[tuple[str, str], ...] = ()

    @property
    def has_no_default(self) -> bool:
        """Whether it must be given; `doctor` reports what lacks, so it has empty text there."""
        return self.default in (REQUIRED, "")

    @property
    def sentence(self) -> str:
        """The help text with the accepted values and the options that have the setting."""
        extra = "; ".join(part for part in (self.accepts, self.only_with and f"only {self.only_with}") if part)
        return f"{self.help} ({extra})" if extra else self.help


def settings_of(schema: type[RunConfig]) -> list[Setting]:
    """Every setting that the command reads, including those of all group options, in declaration order."""
    config = schema()
    config.run_dir = schema.run_dir  # which a config resolves
    return [setting for setting in _walk(config, "") if is_used(schema, setting.name)]


def _walk(config: Any, prefix: str) -> Iterator[Setting]:
    # Required settings first and sections last, so that readers meet the short names first.
    values = {field: getattr(config, field.name) for field in dataclasses.fields(config)}
    for field in sorted(values, key=lambda f: (dataclasses.is_dataclass(values[f]), values[f] != REQUIRED)):
        name, value = prefix + field.name, values[field]
        options = {option: node for option, node in OPTIONS.get(name, {}).items() if issubclass(node, type(value))}
        if options:
            yield from _walk_options(name, options)
        elif dataclasses.is_dataclass(value):
            yield from _walk(value, f"{name}.")
        else:
            rules = field.metadata
            is_text = field.type in _TEXT and rules.get("choices") is None
            can_unset = field.type in _OPTIONAL_TEXT and not rules.get("free_text")
            yield Setting(name, _format(value), rules.get("help", ""), _accepts(rules), "", is_text, can_unset)


def _walk_options(group: str, nodes: dict[str, type]) -> Iterator[Setting]:
    """Yield the settings of all options of a group, each once, with the options that have it unless all do."""
    having: dict[str, dict[str, Setting]] = {}
    for option, node in nodes.items():
        for setting in _walk(node(), f"{group}."):
            having.setdefault(setting.name, {})[option] = setting
    for found in having.values():
        helps, accepts = ({option: getattr(one, name) for option, one in found.items()} for name in ("help", "accepts"))
        yield dataclasses.replace(
            next(iter(found.values())),
            defaults=tuple(_others({option: one.default for option, one in found.items()})),
            help=" ".join(_variants(helps)),
            accepts="; ".join(_variants(accepts)),
            only_with="" if len(found) == len(nodes) else " or ".join(f"{group}={option}" for option in found),
        )


def _variants(texts: Mapping[str, str]) -> list[str]:
    """The first option's text, and different ones with the options that have them."""
    named = [f"{options}: {text or 'any value'}" for options, text in _others(texts)]
    return [text for text in (next(iter(texts.values())), *named) if text]


def _others(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (options, value) for each value that differs from the first option's."""
    _, *others = dict.fromkeys(values.values())
    yield from ((", ".join(option for option in values if values[option] == other), other) for other in others)


def _format(value: Any) -> str:
    """Format `value` as in an override, with a placeholder for the time in the default of run_dir."""
    if isinstance(value, str):
        return value.replace("${now:%Y-%m-%d_%H-%M-%S}", "<date>_<time>")
    if isinstance(value, list):
        return "[" + ",".join(_format(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_format(item)}" for key, item in value.items()) + "}"
    return in_yaml(value)


def _accepts(rules: Any) -> str:
    if (choices := rules.get("choices")) is not None:
        return " | ".join(map(_format, choices))
    words = (("minimum", "at least"), ("above", "more than"), ("maximum", "at most"))
    return ", ".join(f"{word} {rules[rule]}" for rule, word in words if rules.get(rule) is not None)


def groups_of(schema: type) -> dict[str, list[str]]:
    """Group -> its options, for the groups in the command's defaults list; dataclasses precede presets."""
    root = next(item.path for item in configs() if item.name == f"{command_of(schema)}.yaml")
    groups = re.findall(r"^  - (\w+): ", root.read_text(encoding="utf-8"), re.MULTILINE)
    presets = [item.name.removesuffix(".yaml").rpartition("/") for item in configs()]
    options = {group: [*OPTIONS.get(group, {}), *(name for of, _, name in presets if of == group)] for group in groups}
    return {group: names for group, names in options.items() if names}


def help_text(schema: type, command: str) -> str:
    """The text of `--help` for a command."""
    groups = [f"  {group:<12} {', '.join(options)}" for group, options in groups_of(schema).items()]
    lines = [
        f"{command} [FILE.yaml] [name=value ...]",
        "",
        f"  {(schema.__doc__ or '').strip().partition(chr(10))[0]}",
        "",
        "name=value sets a setting, group=option selects a set of them. -m with name=a,b runs once for each value.",
        """Text is taken as it is, with all its characters; in a sweep, quote each: 'prompt="Hi, you","Bye"'.""",
        "FILE.yaml has settings of yours, such as `train: {steps: 100}` or `adapter: lora`; name=value overrides it.",
        "--cfg job prints the config without running, --config-dir DIR adds your presets, --debug shows tracebacks.",
        "",
        *(["Groups", *groups, ""] if groups else ()),
        "Settings and their defaults (??? is required)",
    ]
    for setting in settings_of(schema):
        lines.append("; ".join([f"  {setting.name}={setting.default}", *map(" ".join, setting.defaults)]))
        lines += textwrap.wrap(setting.sentence, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def markdown() -> str:
    """The content of docs/config.md."""
    lines = [
        "# Settings",
        "",
        "Generated by `make docs` from the declarations in the code. On the command line, `name=value` sets a setting",
        f"and `group=option` selects a set of them. `{REQUIRED}` is required. Where options of a group differ, the",
        "first default and description are those of all but the options that are named after it.",
        "",
        "A setting that is text, such as a prompt or a path, takes what follows `=` as it is: commas, quotes,",
        "brackets, backslashes, `${x}` and newlines have no meaning. `null` unsets text whose default is `null` or",
        f"`{REQUIRED}`; only `prompt=null` is a prompt. Other values have",
        "[Hydra's syntax](https://hydra.cc/docs/advanced/override_grammar/basic/), such as `[a,b]` and `{a: b}`.",
        """With `-m`, `name=a,b` runs once for each value; of text, quote each: `prompt="Hello, world","Bye"`.""",
    ]
    for command, schema in COMMANDS.items():
        lines += ["", f"## fsdp-shard {command}", "", (schema.__doc__ or "").strip().partition("\n")[0], ""]
        if base := next((name for name, other in COMMANDS.items() if other in schema.__mro__[1:]), None):
            lines.append(f"Its settings are those of `{base}`, none of which is required.")
            continue
        groups = (
            f"- `{group}=` {', '.join(f'`{o}`' for o in options)}" for group, options in groups_of(schema).items()
        )
        lines += [*groups, "", "| setting | default | description |", "|---|---|---|"]
        lines += [f"| `{s.name}` | {_defaults(s)} | {_cell(s.sentence)} |" for s in settings_of(schema)]
    return "\n".join(lines) + "\n"


def _defaults(setting: Setting) -> str:
    others = (f"{options} `{_cell(default)}`" for options, default in setting.defaults)
    return "; ".join([f"`{_cell(setting.default)}`", *others])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "\\n")


if __name__ == "__main__":
    print(markdown(), end="")
