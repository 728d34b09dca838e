"""Evaluate a checkpoint of any format by perplexity or tasks of lm-eval, its blocks spread over GPUs, CPU and disk."""

from __future__ import annotations

from fsdp_shard.cli import recipe
from fsdp_shard.config import EvaluateConfig
from fsdp_shard.evaluation import check_evaluation, settle_windows
from fsdp_shard.inference import check_checkpoint
from fsdp_shard.utils import say, write_result


def check(config: EvaluateConfig) -> None:
    """Checks that need no torch, and then the length of windows, which needs the model's config."""
    check_evaluation(config)
    check_checkpoint(config.source)
    settle_windows(config)


@recipe(EvaluateConfig, check=check)
def main(config: EvaluateConfig) -> None:
    """Evaluate the model in `checkpoint` by `task`."""
    from fsdp_shard.evaluation import EVALUATIONS
    from fsdp_shard.inference import dispatch_model
    from fsdp_shard.models import check_causal, check_packing, load_config, load_tokenizer

    source = config.source
    model_config = load_config(source.directory, config.dispatch.trust_remote_code)
    check_causal(model_config)
    if config.data.packing:
        check_packing(model_config)
    tokenizer = load_tokenizer(source.tokenizer, config.dispatch.trust_remote_code)
    evaluation = EVALUATIONS[config.task](config, config.run_dir, model_config, tokenizer)
    say(evaluation.describe())

    model = dispatch_model(source, model_config, config.dispatch, log=say)
    figures = evaluation.measure(model)
    say(figures.text)
    write_result(config.run_dir, figures.row)


if __name__ == "__main__":
    main()
