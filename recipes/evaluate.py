"""Measure the perplexity of a checkpoint of any format on a text, its blocks spread over GPUs, CPU and disk."""

from __future__ import annotations

from functools import partial

from fsdp_shard.checkpoint.source import locate
from fsdp_shard.cli import recipe
from fsdp_shard.config import EvaluateConfig
from fsdp_shard.evaluation.base import check_text
from fsdp_shard.evaluation.perplexity import check_context, evaluation_windows, perplexity
from fsdp_shard.inference.dispatch import check_checkpoint, dispatch
from fsdp_shard.models import check_causal, load_config, load_tokenizer
from fsdp_shard.results import write_result


def check(config: EvaluateConfig) -> None:
    """What can be found wrong before torch is loaded."""
    check_text(config.data)
    check_checkpoint(config.checkpoint)


@recipe(EvaluateConfig, check=check)
def main(config: EvaluateConfig) -> None:
    """Evaluate the model in `checkpoint` on `data`."""
    from tqdm import tqdm

    source = locate(config.checkpoint)
    model_config = load_config(source, config.dispatch.trust_remote_code)
    check_causal(model_config)
    check_context(model_config, config.data.sequence_length)
    windows = evaluation_windows(config.data, load_tokenizer(source, config.dispatch.trust_remote_code))
    print(f"{windows.num_predictions} tokens in {len(windows)} windows of {windows.sequence_length}", flush=True)

    model = dispatch(source, model_config, config.dispatch, tell=partial(print, flush=True))
    with tqdm(total=len(windows), unit="window", desc="evaluate", disable=None) as bar:
        figures = perplexity(model, windows, config.batch_size, bar.update)

    print(f"perplexity {figures.perplexity:.4f} (loss {figures.loss:.4f}) over {figures.num_tokens} tokens")
    write_result(
        config.run_dir,
        {
            "perplexity": figures.perplexity,
            "loss": figures.loss,
            "num_tokens": figures.num_tokens,
            "seconds": figures.seconds,
        },
    )


if __name__ == "__main__":
    main()
