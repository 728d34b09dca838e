"""Plan the memory of a run on each rank from its configs alone: of a hub id, no weights are downloaded."""

from __future__ import annotations

from dataclasses import asdict

from fsdp_shard.cli import recipe
from fsdp_shard.config import PlanConfig, write_config
from fsdp_shard.models import check_model_config
from fsdp_shard.planning import planned_model
from fsdp_shard.utils import write_result


def check(config: PlanConfig) -> None:
    """What can be found wrong before torch is loaded."""
    config.adapter.check_installed()
    config.optim.check_installed()
    source = planned_model(config).source
    check_model_config(source.model_directory)
    source.check_unquantized()


@recipe(PlanConfig, check=check, writes_config=True)
def main(config: PlanConfig) -> None:
    """Print what each rank of `finetune` would need, and with `dispatch.device_map` where `generate` puts blocks."""
    from fsdp_shard.inference import KVCacheBudget, plan_from_config
    from fsdp_shard.models import check_model_task, load_config
    from fsdp_shard.planning import PlannedRun, figures, plan_memory, plan_report

    length, num_ranks = config.data.sequence_length, config.launch.num_ranks
    saving = config.checkpoint.asynchronous
    run = PlannedRun(config.model, config.shard, config.train, config.optim, length, num_ranks, config.adapter, saving)
    model = planned_model(config)
    model_config = load_config(model.source.directory, config.model.trust_remote_code)
    check_model_task(model_config, config.model.task)
    plan = plan_memory(model_config, run)
    print(plan_report(plan, config.device.memory_bytes))
    dispatched = {}
    if config.dispatch.device_map is not None:
        budget = KVCacheBudget(config.train.micro_batch_size, config.data.sequence_length)
        devices = plan_from_config(
            load_config(model.source.directory, config.model.trust_remote_code), config.dispatch, budget
        )
        print(f"\n{devices.table()}\n{devices.describe()} of {budget}")
        dispatched = {"device_map": devices.devices, "dispatch": asdict(devices)}
    if model.step is not None:
        print(f"\nThe run would resume from {model.step}; nothing was written into its directory. {model.note or ''}")
    elif config.kept_run_dir is not None:
        write_config(config)
        write_result(config.kept_run_dir, figures(plan, config.device.memory_bytes) | dispatched)


if __name__ == "__main__":
    main()
