"""Generate text from a checkpoint of any format, its blocks spread over GPUs, CPU and disk."""

from __future__ import annotations

import time
from pathlib import Path

from fsdp_shard.checkpoint.source import locate
from fsdp_shard.cli import recipe
from fsdp_shard.config import GenerateConfig
from fsdp_shard.inference.dispatch import check_checkpoint, dispatch
from fsdp_shard.inference.prompts import describe, read_prompts, write_completions
from fsdp_shard.memory import peak_resident_bytes
from fsdp_shard.models import load_config, load_tokenizer
from fsdp_shard.results import write_result
from fsdp_shard.sizes import format_size


def check(config: GenerateConfig) -> None:
    """What can be found wrong before torch is loaded."""
    read_prompts(config)
    check_checkpoint(config.checkpoint)


@recipe(GenerateConfig, check=check)
def main(config: GenerateConfig) -> None:
    """Complete each prompt with the model in `checkpoint`."""
    import torch

    from fsdp_shard.inference.decode import Figures, complete, encode

    torch.manual_seed(config.seed)
    prompts, source = read_prompts(config), locate(config.checkpoint)
    model_config, tokenizer = load_config(source), load_tokenizer(source)
    encoded = encode(tokenizer, prompts, model_config, config.generation.max_new_tokens, chat=config.chat)

    start, wanted = time.perf_counter(), config.dispatch
    model = dispatch(
        source,
        model_config,
        wanted.device_map,
        wanted.max_memory,
        wanted.dtype,
        on_plan=lambda plan: print(f"{source.weights}: {plan.describe()}", flush=True),
    )
    load_seconds = time.perf_counter() - start

    figures = Figures()
    output = Path(config.output or Path(config.run_dir) / "completions.jsonl")
    completions = complete(model, tokenizer, prompts, encoded, config.generation, figures)
    for number, completion in enumerate(write_completions(output, completions)):
        if text := describe(completion, number):
            print(text, flush=True)

    peak = peak_resident_bytes()
    print(
        f"\n{len(prompts)} completions, {figures.num_new_tokens} new tokens in {output}; "
        f"loaded in {load_seconds:.1f} s, {figures.tokens_per_second:.1f} tokens/s, peak memory {format_size(peak)}"
    )
    write_result(
        config.run_dir,
        {
            "num_prompts": len(prompts),
            "num_new_tokens": figures.num_new_tokens,
            "load_seconds": load_seconds,
            "first_token_seconds": figures.first_token_seconds,
            "tokens_per_second": figures.tokens_per_second,
            "peak_memory_bytes": peak,
            "peak_device_memory_bytes": {
                ordinal: torch.cuda.max_memory_allocated(ordinal) for ordinal in range(torch.cuda.device_count())
            },
            "device_map": model.hf_device_map,
            "output": str(output),
        },
    )


if __name__ == "__main__":
    main()
