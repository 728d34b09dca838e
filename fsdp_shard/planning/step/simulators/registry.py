"""The simulators by wrapper. A new wrapper needs a file in this folder and a line here."""

from collections.abc import Mapping

from fsdp_shard.planning.step.simulators.ddp_simulator import DdpSimulator
from fsdp_shard.planning.step.simulators.fsdp1_simulator import Fsdp1Simulator
from fsdp_shard.planning.step.simulators.fsdp2_simulator import Fsdp2Simulator
from fsdp_shard.planning.step.simulators.step_simulator import StepSimulator

# Name in `shard=NAME` -> its simulator.
SIMULATORS: Mapping[str, type[StepSimulator]] = {"fsdp2": Fsdp2Simulator, "fsdp1": Fsdp1Simulator, "ddp": DdpSimulator}
