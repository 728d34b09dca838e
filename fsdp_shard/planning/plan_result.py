"""The input settings of a plan, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.errors import RunError
from fsdp_shard.planning.config import PlanDataConfig, PlannedLaunchConfig, PlanSavingConfig
from fsdp_shard.planning.devices import DeviceConfig
from fsdp_shard.planning.planned_run import RunSections
from fsdp_shard.utils import say, walk

if TYPE_CHECKING:
    from fsdp_shard.inference import DispatchConfig
    from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan
    from fsdp_shard.planning.search.pareto_front import Front


class SectionSettings(RunSections, Protocol):
    """The sections of a run that affect its memory, and the command line's part of them."""

    explicit_settings: frozenset[str]

    @property
    def launch(self) -> LaunchConfig:
        """The ranks."""


class PlannedSettings(SectionSettings, Protocol):
    """The part of a plan's config that planning uses."""

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
        """The directory for output files, if any."""

    @property
    def source(self) -> Location:
        """The located `model.path`."""


@dataclass(frozen=True)
class PlannedModel:
    """The model of a planned run.

    Attributes:
        source: Its location.
        resumed_from: The directory of the step that the run would resume from; None for a new run.
        note: Why the model could not be compared with the step's model.
    """

    source: Location
    resumed_from: Path | None = None
    note: str | None = None


@dataclass(frozen=True)
class PlanResult:
    """The planned requirements of a run.

    Attributes:
        model: Its model.
        text: The plan as text.
        figures: The figures of result.json.
        misfit: Why the run does not fit in `device.memory`, in a sentence; None if it fits or this is unknown.
        front: The result of a search.
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
        """Whether the run would continue from a step; `run_dir` then belongs to the run."""
        return self.model.resumed_from is not None

    def draw(self, directory: str | Path) -> None:
        """Write plan.html, and timeline.png if matplotlib is installed, to `directory`; for a search, search.png."""
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
    """Names of the settings and groups that the user set on the command line, or that differ from the defaults."""
    names = set(config.explicit_settings)
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
    """Names of the settings typed as false, which advice never sets to true."""
    sections = ("model", "train", "shard", "objective", "adapter", "optim")
    values = [found for name in sections for found in walk(getattr(config, name), f"{name}.")]
    return {name for name, _, now in values if now is False and name in config.explicit_settings}
