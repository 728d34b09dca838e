"""Plan the memory of a run on each rank from its configs alone: nothing is downloaded but the model's config."""

from __future__ import annotations

from fsdp_shard.checkpoint.source import locate
from fsdp_shard.cli import recipe
from fsdp_shard.config import PlanConfig
from fsdp_shard.models import load_config
from fsdp_shard.results import write_result


def check(config: PlanConfig) -> None:
    """What can be found wrong before torch is loaded."""
    locate(config.model.path, config.model.gguf_file)


@recipe(PlanConfig, check=check)
def main(config: PlanConfig) -> None:
    """Print what each rank of `finetune` with these settings would need."""
    from fsdp_shard.planning.memory import PlannedRun, plan_memory
    from fsdp_shard.planning.report import figures, report

    source = locate(config.model.path, config.model.gguf_file)
    run = PlannedRun(
        config.model, config.shard, config.train, config.optim, config.data.sequence_length, config.launch.num_ranks
    )
    plan = plan_memory(load_config(source, config.model.trust_remote_code), run)
    print(report(plan, config.device.memory_bytes))
    write_result(config.run_dir, figures(plan, config.device.memory_bytes))


if __name__ == "__main__":
    main()
