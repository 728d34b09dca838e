"""Plan the memory of a run on each rank from its configs alone: of a hub id, no weights are downloaded."""

import fsdp_shard as fs


@fs.recipe(fs.PlanConfig, check=fs.check_plan, writes_config=True)
def main(config: fs.PlanConfig) -> None:
    """Print what each rank of `finetune` would need, and with `dispatch.device_map` where `generate` puts blocks.

    Where it does not fit in `device.memory`, settings that would are printed, and the exit status is 1.
    """
    plan = fs.plan_run(config)
    print(plan.text)
    if config.kept_run_dir is not None and not plan.resumes:  # nothing is written into the directory of a run
        fs.write_config(config)
        fs.write_result(config.kept_run_dir, plan.figures)
        plan.draw(config.kept_run_dir)
    plan.require_fit()


if __name__ == "__main__":
    main()
