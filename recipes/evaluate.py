"""Evaluate a checkpoint of any format by perplexity or lm-eval tasks, its blocks spread over GPUs, CPU and disk."""

import fsdp_shard as fs


@fs.recipe(fs.EvaluateConfig, check=fs.check_evaluation)
def main(config: fs.EvaluateConfig) -> None:
    """Evaluate the model in `checkpoint` by `task`, alone or compared with another one."""
    with fs.join_ranks(config.launch) as context:
        figures = fs.run_evaluation(config, config.run_dir, config.seed, context)
        if context is None or context.is_main:
            fs.write_result(config.run_dir, figures)


if __name__ == "__main__":
    main()
