"""Perplexity of a checkpoint of any format, or tasks of lm-eval, its blocks spread over GPUs, CPU and disk."""

from __future__ import annotations

from functools import partial

from fsdp_shard.checkpoint import locate
from fsdp_shard.cli import recipe
from fsdp_shard.config import EvaluateConfig
from fsdp_shard.evaluation import EVALUATIONS, check_evaluation
from fsdp_shard.inference import check_checkpoint, dispatch_model
from fsdp_shard.models import check_causal, check_packing, load_config, load_tokenizer
from fsdp_shard.utils import write_result


def check(config: EvaluateConfig) -> None:
    """What can be found wrong before torch is loaded."""
    check_evaluation(config)
    check_checkpoint(config.checkpoint)


@recipe(EvaluateConfig, check=check)
def main(config: EvaluateConfig) -> None:
    """Evaluate the model in `checkpoint` by `task`."""
    source = locate(config.checkpoint)
    model_config = load_config(source, config.dispatch.trust_remote_code)
    check_causal(model_config)
    if config.data.packing:
        check_packing(model_config)
    tokenizer = load_tokenizer(source, config.dispatch.trust_remote_code)
    evaluation = EVALUATIONS[config.task](config, config.run_dir, model_config, tokenizer)
    print(evaluation.describe(), flush=True)

    model = dispatch_model(source, model_config, config.dispatch, tell=partial(print, flush=True))
    figures = evaluation.measure(model)
    print(figures.text)
    write_result(config.run_dir, figures.row)


if __name__ == "__main__":
    main()
