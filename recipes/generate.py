"""Generate text from a checkpoint of any format, its blocks spread over GPUs, CPU and disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from fsdp_shard.checkpoint import locate
from fsdp_shard.cli import recipe
from fsdp_shard.config import GenerateConfig
from fsdp_shard.distributed import shares_memory, world_sizes
from fsdp_shard.errors import ConfigError
from fsdp_shard.inference import (
    Share,
    check_checkpoint,
    check_standard_input,
    describe,
    dispatch_model,
    open_output,
    read_prompts,
    room_for,
    shared_work,
)
from fsdp_shard.models import load_config, load_tokenizer
from fsdp_shard.utils import format_size, peak_resident_bytes, write_result


def check(config: GenerateConfig) -> None:
    """What can be found wrong before torch is loaded."""
    check_standard_input(config, is_shared=max(world_sizes(config.launch)) > 1 and not shares_memory(config.launch))
    if not config.is_conversation:
        open_output(config, config.run_dir, read_prompts(config), config.seed)
    elif max(world_sizes(config.launch)) > 1:
        raise ConfigError("launch.ranks shares prompts out, and a conversation has none; leave it out.")
    if any(ranks % config.tensor_parallel for ranks in world_sizes(config.launch)):
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel} needs a multiple of so many ranks, and launch.ranks has "
            f"{max(world_sizes(config.launch))}; give launch.ranks={config.tensor_parallel}."
        )
    check_checkpoint(config.checkpoint)


@recipe(GenerateConfig, check=check)
def main(config: GenerateConfig) -> None:
    """Complete each prompt with the model in `checkpoint`, or talk with it."""
    ranks, launch = max(world_sizes(config.launch)), config.launch
    with shared_work(ranks, launch.device, launch.timeout_seconds, config.tensor_parallel) as share:
        generate(config, share)


def generate(config: GenerateConfig, share: Share) -> None:
    """This rank's part of the work; the first one tells of all of it."""
    from fsdp_shard.inference import Decoder, check_chat, check_generates, complete, converse, encode, peak_gpu_bytes

    say: Callable[[str], object] = partial(print, flush=True) if share.is_first else lambda text: None
    source, trusted = locate(config.checkpoint), config.dispatch.trust_remote_code
    model_config, tokenizer = load_config(source, trusted), load_tokenizer(source, trusted)
    check_generates(model_config)
    if config.is_conversation:
        check_chat(tokenizer)
    prompts = [] if config.is_conversation else read_prompts(config)
    encoded = encode(tokenizer, prompts, model_config, config.generation.max_new_tokens, chat=config.chat)

    start, room = time.perf_counter(), room_for(encoded, config.generation)
    model = dispatch_model(source, model_config, config.dispatch, room, tell=say, share=share)
    load_seconds, decoder = time.perf_counter() - start, Decoder(model, tokenizer, config.generation)

    written = {}
    if config.is_conversation:
        num_prompts = converse(decoder, input, partial(print, end="", flush=True), config.seed)
    else:
        output = open_output(config, config.run_dir, prompts, config.seed) if share.is_first else None
        num_prompts, done = len(prompts), share.agree(len(output.rows) if output else 0)
        if done:
            say(f"{done} of {num_prompts} completions are there already; going on from there")
        stream = partial(print, end="", flush=True) if num_prompts == 1 and share.is_first else None
        if stream is not None:
            say(f"\n> {prompts[0].text}")
        completions = complete(decoder, prompts, encoded, seed=config.seed, done=done, share=share, on_text=stream)
        for number, completion in enumerate(output.append(completions) if output else completions):
            if stream is None and (text := describe(completion, number)):
                say(text)
        written = {"output": str(output.path) if output else ""}

    figures, peak = share.total(decoder.figures), peak_resident_bytes()
    if not share.is_first:
        return
    say(
        f"\n{num_prompts} completions, {figures.num_new_tokens} new tokens; loaded in {load_seconds:.1f} s, "
        f"{figures.tokens_per_second:.1f} tokens/s, peak memory {format_size(peak)}, "
        f"{format_size(figures.disk_bytes_per_token)} read from disk a token"
    )
    write_result(
        config.run_dir,
        {
            "num_prompts": num_prompts,
            "num_new_tokens": figures.num_new_tokens,
            "load_seconds": load_seconds,
            "first_token_seconds": figures.first_token_seconds,
            "tokens_per_second": figures.tokens_per_second,
            "disk_bytes_per_token": figures.disk_bytes_per_token,
            "peak_memory_bytes": peak,
            "peak_device_memory_bytes": peak_gpu_bytes(),
            "device_map": model.hf_device_map,
            **written,
        },
    )


if __name__ == "__main__":
    main()
