"""Plan the memory of a run on each rank from its configs alone: of a hub id, no weights are downloaded."""

from __future__ import annotations

from dataclasses import asdict

from fsdp_shard.cli import recipe
from fsdp_shard.config import PlanConfig, write_config
from fsdp_shard.models import check_model_config
from fsdp_shard.planning import planned_model
from fsdp_shard.utils import say, write_result


def check(config: PlanConfig) -> None:
    """What can be found wrong before torch is loaded."""
    config.adapter.check_installed()
    config.optim.check_installed()
    source = planned_model(config).source
    check_model_config(source.directory)
    source.check_unquantized()


@recipe(PlanConfig, check=check, writes_config=True)
def main(config: PlanConfig) -> None:
    """Print what each rank of `finetune` would need, and with `dispatch.device_map` where `generate` puts blocks."""
    from fsdp_shard.inference import KVCacheBudget, plan_from_config
    from fsdp_shard.models import check_model_task, context_of, load_config
    from fsdp_shard.planning import PlannedRun, figures, plan_memory, plan_report
    from fsdp_shard.training import settle_run_length

    model, trusted = planned_model(config), config.model.trust_remote_code
    model_config = load_config(model.source.directory, trusted)
    check_model_task(model_config, config.model.task)
    context = context_of(model_config, trusted)
    length, num_ranks = settle_run_length(config.data, model.step, context), config.launch.num_ranks
    saving = config.checkpoint.asynchronous
    run = PlannedRun(config.model, config.shard, config.train, config.optim, length, num_ranks, config.adapter, saving)
    plan = plan_memory(model_config, run)
    say(f"{context.describe(length)}\n{plan_report(plan, config.device.memory_bytes)}")
    dispatched = {}
    if config.dispatch.device_map is not None:
        budget = KVCacheBudget(config.train.micro_batch_size, length)
        devices = plan_from_config(load_config(model.source.directory, trusted), config.dispatch, budget)
        say(f"\n{devices.table()}\n{devices.describe()} of {budget}")
        dispatched = {"device_map": devices.devices, "dispatch": asdict(devices)}
    if model.step is not None:
        say(f"\nThe run would resume from {model.step}; nothing was written into its directory. {model.note or ''}")
    elif config.kept_run_dir is not None:
        write_config(config)
        length_of_run = {"sequence_length": length}
        write_result(config.kept_run_dir, figures(plan, config.device.memory_bytes) | dispatched | length_of_run)


if __name__ == "__main__":
    main()
