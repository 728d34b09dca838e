"""The kinds of rows. To add one, add a file to this folder and its settings class to the bases of `KindSettings`."""

from dataclasses import dataclass
from typing import cast

from fsdp_shard.data.kinds.chat import ChatSettings
from fsdp_shard.data.kinds.instruction import InstructionSettings
from fsdp_shard.data.kinds.kind import RowSettings
from fsdp_shard.data.kinds.pairs import PairsSettings
from fsdp_shard.data.kinds.plain_text import TextSettings
from fsdp_shard.data.kinds.preference import PreferenceSettings


@dataclass
class KindSettings(PreferenceSettings, PairsSettings, InstructionSettings, ChatSettings, TextSettings):
    """The settings of all kinds of rows."""


_SETTINGS = cast("tuple[type[RowSettings], ...]", KindSettings.__bases__)
KINDS = {settings.name: settings for settings in reversed(_SETTINGS)}
