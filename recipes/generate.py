"""Generate text from a checkpoint of any format, its blocks spread over GPUs, CPU and disk."""

import fsdp_shard as fs


def check(config: fs.GenerateConfig) -> None:
    """Checks that need no torch."""
    fs.check_generation(config, config.launch, config.kept_run_dir, config.seed)
    fs.check_checkpoint(config.source)


@fs.recipe(fs.GenerateConfig, check=check)
def main(config: fs.GenerateConfig) -> None:
    """Complete each prompt with the model in `checkpoint`, or hold a conversation with it."""
    with fs.join_ranks(config.launch, config.tensor_parallel) as context:
        figures = fs.complete_prompts(config, config.kept_run_dir, config.seed, context)
        if config.kept_run_dir is not None and (context is None or context.is_main):
            fs.write_result(config.kept_run_dir, figures)


if __name__ == "__main__":
    main()
