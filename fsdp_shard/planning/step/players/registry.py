"""The players: that of a new wrapper is a file of this folder and a line here."""

from collections.abc import Mapping

from fsdp_shard.planning.step.players.ddp_player import DdpPlayer
from fsdp_shard.planning.step.players.fsdp1_player import Fsdp1Player
from fsdp_shard.planning.step.players.fsdp2_player import Fsdp2Player
from fsdp_shard.planning.step.players.player import Player

# Name in `shard=NAME` -> its player.
PLAYERS: Mapping[str, type[Player]] = {"fsdp2": Fsdp2Player, "fsdp1": Fsdp1Player, "ddp": DdpPlayer}
