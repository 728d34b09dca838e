"""Generate text from a checkpoint of any format, its blocks spread over GPUs, CPU and disk."""

from __future__ import annotations

from fsdp_shard.cli import recipe
from fsdp_shard.config import GenerateConfig
from fsdp_shard.inference import check_checkpoint, check_generation
from fsdp_shard.utils import write_result


def check(config: GenerateConfig) -> None:
    """Checks that need no torch."""
    check_generation(config, config.launch, config.kept_run_dir, config.seed)
    check_checkpoint(config.source)


@recipe(GenerateConfig, check=check)
def main(config: GenerateConfig) -> None:
    """Complete each prompt with the model in `checkpoint`, or hold a conversation with it."""
    from fsdp_shard.inference import generate, join_ranks

    with join_ranks(config.launch, config.tensor_parallel) as context:
        figures = generate(config, config.kept_run_dir, config.seed, context)
        if config.kept_run_dir is not None and (context is None or context.is_main):
            write_result(config.kept_run_dir, figures)


if __name__ == "__main__":
    main()
