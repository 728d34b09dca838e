"""Dry run of finetune: report the problems it would encounter with these settings, without training."""

from functools import cache

import fsdp_shard as fs
from fsdp_shard import doctor


@fs.recipe(fs.DoctorConfig)
def main(config: fs.DoctorConfig) -> None:
    """Check the machine, the settings (as finetune does), and the ranks; print a line per finding."""
    report = doctor.Report()
    plan = cache(lambda: doctor.plan_run(config))
    samples = cache(lambda: doctor.prepare_samples(config))
    report.add("software", doctor.check_software())
    report.add("machine", doctor.check_hardware(config.launch, config.shard))
    report.add("process", doctor.check_environment(config.launch))
    report.add("run_dir", doctor.check_run_directory(config))
    report.add("disk", doctor.check_disk(config.run_dir))
    report.add("remote", doctor.check_remote(config.checkpoint.remote))
    report.add("settings", doctor.check_settings(config, fs.check_finetune))
    report.add("memory", doctor.check_memory(config, plan))
    report.add("data", doctor.check_data(config, samples))
    report.add("space", doctor.check_disk_space(config, plan, samples))
    report.add("ranks", doctor.check_ranks(config))
    report.conclude()


if __name__ == "__main__":
    main()
