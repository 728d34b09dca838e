"""Plan a run's memory on each rank from its configs alone; for a hub id, no weights are downloaded."""

import fsdp_shard as fs


@fs.recipe(fs.PlanConfig, check=fs.check_plan, writes_config=True)
def main(config: fs.PlanConfig) -> None:
    """Print each rank's memory in `finetune`, and with `dispatch.device_map` the block placement of `generate`.

    If the run does not fit in `device.memory`, print settings that would fit; the exit status is then 1.
    """
    plan = fs.plan_run(config)
    print(plan.text)
    if config.kept_run_dir is not None and not plan.resumes:  # never write into a run's directory
        fs.write_config(config)
        fs.write_result(config.kept_run_dir, plan.figures)
        plan.draw(config.kept_run_dir)
    plan.require_fit()


if __name__ == "__main__":
    main()
