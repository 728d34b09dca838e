"""The settings that a plan is made from, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.errors import RunError
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning.config import PlanDataConfig, PlannedLaunchConfig, PlanSavingConfig
from fsdp_shard.planning.devices import DeviceConfig
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import AdapterConfig, ObjectiveConfig, OptimConfig, TrainConfig
from fsdp_shard.utils import say, walk

if TYPE_CHECKING:
    from fsdp_shard.inference import DispatchConfig
    from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan
    from fsdp_shard.planning.search.pareto_front import Front


class SectionSettings(Protocol):
    """The sections of a run that change its memory, and what the command line has of them."""

    given: frozenset[str]
    model: ModelConfig
    shard: ShardConfig
    objective: ObjectiveConfig
    adapter: AdapterConfig
    optim: OptimConfig
    train: TrainConfig

    @property
    def launch(self) -> LaunchConfig:
        """The ranks."""


class PlannedSettings(SectionSettings, Protocol):
    """The config of a plan, as far as planning uses it."""

    run_dir: str
    run: str | None
    search: bool
    launch: PlannedLaunchConfig
    data: PlanDataConfig
    checkpoint: PlanSavingConfig
    device: DeviceConfig
    dispatch: DispatchConfig
    trace: bool

    @property
    def adapter_sources(self) -> Mapping[str, Location]:
        """The adapters of `generate`, by name."""

    @property
    def kept_run_dir(self) -> str | None:
        """Where files are left, if any are."""

    @property
    def source(self) -> Location:
        """What `model.path` leads to."""


@dataclass(frozen=True)
class PlannedModel:
    """The model of a planned run.

    Attributes:
        source: Where it is.
        resumed_from: The directory of the step that the run would resume from; None if it would begin.
        note: Why the model could not be compared with that of the step.
    """

    source: Location
    resumed_from: Path | None = None
    note: str | None = None


@dataclass(frozen=True)
class RunPlan:
    """What a run would need.

    Attributes:
        model: Its model.
        text: The plan as text.
        figures: Those of result.json.
        misfit: Why it does not fit in `device.memory`, in a sentence; None if it does, or if that is not known.
        front: What a search found.
        memory: The memory of each rank.
        memory_bytes: The memory of a device, if known.
        host: The host memory of a machine, if known.
    """

    model: PlannedModel
    text: str
    figures: Mapping[str, Any]
    misfit: str | None = None
    front: Front | None = None
    memory: MemoryPlan | None = None
    memory_bytes: int | None = None
    host: HostMemory | None = None

    @property
    def resumes(self) -> bool:
        """Whether the run would go on from a step: `run_dir` is then that of the run."""
        return self.model.resumed_from is not None

    def draw(self, directory: str | Path) -> None:
        """Leave plan.html, and timeline.png if matplotlib is installed, in `directory`; of a search, search.png."""
        if self.front is not None and self.front.points:
            from fsdp_shard.planning.search.front_plot import PICTURE, plot_front

            plot_front(self.front, Path(directory) / PICTURE)
        if self.memory is not None:
            from fsdp_shard.planning.pictures.plan_page import PAGE, write_pictures

            problem = write_pictures(self.memory, self.memory_bytes, Path(directory), str(self.model.source), self.host)
            say(f"\nPictures: {Path(directory) / PAGE}. {problem or ''}".rstrip())

    def require_fit(self) -> None:
        """Raise RunError if the run does not fit in `device.memory`."""
        if self.misfit is not None:
            raise RunError(self.misfit)


def chosen_settings(config: SectionSettings) -> set[str]:
    """Names of the settings and groups that the user chose: on the command line, or unlike the defaults."""
    names = set(config.given)
    if config.launch.num_ranks > 1:
        names.add("launch.ranks")
    usual = {"shard": "Fsdp2Config", "objective": "ObjectiveConfig", "adapter": "AdapterConfig", "optim": "AdamWConfig"}
    for section in ("model", "train", *usual):
        value = getattr(config, section)
        if type(value).__name__ != usual.get(section, type(value).__name__):
            names.add(section)
        defaults = {name: default for name, _, default in walk(type(value)(), f"{section}.")}
        names.update(name for name, _, now in walk(value, f"{section}.") if now != defaults[name])
    return names


def switched_off(config: SectionSettings) -> set[str]:
    """Names of the settings that were typed as false, which no advice sets to true."""
    sections = ("model", "train", "shard", "objective", "adapter", "optim")
    values = [found for name in sections for found in walk(getattr(config, name), f"{name}.")]
    return {name for name, _, now in values if now is False and name in config.given}
