"""Say what would go wrong in a finetune with these settings, before it does. Trains nothing."""

from __future__ import annotations

from functools import cache

from fsdp_shard.cli import load_recipe, recipe
from fsdp_shard.config import DoctorConfig
from fsdp_shard.distributed import joined_rank
from fsdp_shard.doctor import (
    Report,
    data,
    disk,
    hardware,
    memory,
    plan_of,
    ranks,
    remote,
    room,
    run_directory,
    settings,
    software,
)
from fsdp_shard.utils import shipped


@recipe(DoctorConfig)
def main(config: DoctorConfig) -> None:
    """Examine the machine, the settings as finetune takes them, and its ranks; print a line for each thing found."""
    report = Report(print if joined_rank() == 0 else lambda line: None)
    finetune = load_recipe(shipped("recipes") / "finetune.py")
    plan = cache(lambda: plan_of(config))
    report.add("software", software)
    report.add("machine", lambda: hardware(config.launch, config.shard))
    report.add("run_dir", lambda: run_directory(config.run_dir, config.resume, config.train))
    report.add("disk", lambda: disk(config.run_dir))
    report.add("remote", lambda: remote(config.checkpoint.remote))
    report.add("settings", lambda: settings(config, finetune.check))
    report.add("memory", lambda: memory(plan(), config))
    report.add("room", lambda: room(plan(), config))
    report.add("data", lambda: data(config))
    report.add("ranks", lambda: ranks(config))
    report.conclude()


if __name__ == "__main__":
    main()
