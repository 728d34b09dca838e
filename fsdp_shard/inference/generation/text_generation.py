"""Runs `generate`: loads a model, completes prompts or holds a conversation, and reports figures."""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import cuda
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.data import with_chat_template
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.inference.config import GenerateSettings
from fsdp_shard.inference.dispatch import Log, dispatch_model, reserve_adapter_memory
from fsdp_shard.inference.generation import batching, chat_session, kv_cache_size, prompts as prompt_files
from fsdp_shard.inference.generation.completions_file import CompletionsFile, open_completions
from fsdp_shard.inference.generation.decoder import Decoder, DecodingFigures
from fsdp_shard.inference.generation.tokenize_prompts import check_room, tokenize_prompts
from fsdp_shard.inference.named_adapters import add_adapters, use_adapter
from fsdp_shard.models import context_length_of, load_config, load_tokenizer
from fsdp_shard.utils import check, format_count, format_size, peak_resident_bytes, report_progress, say

_write = partial(print, end="", flush=True)
_FIGURES = ("first_token_seconds", "tokens_per_second", "disk_bytes_per_token")  # of the decoder, in result.json


def complete_prompts(
    settings: GenerateSettings, run_dir: str | None, seed: int, context: DistributedContext | None = None
) -> dict[str, Any]:
    """Complete the prompts into a file, or hold a conversation on the terminal.

    Args:
        settings: The model, the prompts, and generation settings.
        run_dir: Directory of completions.jsonl, unless `settings.output` names another file; without either,
            completions are only printed.
        seed: Seed of sampling.
        context: The ranks that divide the work; None for a single process.

    Returns:
        The figures of result.json: totals over all ranks on rank 0; of little use on other ranks.

    Raises:
        FsdpShardError: A setting is wrong, or the model or the prompts cannot be read.

    Example:
        >>> fs.complete_prompts(config, config.run_dir, config.seed)["tokens_per_second"]  # doctest: +SKIP
        41.7
    """
    check(settings)
    source, is_main = settings.source, context is None or context.is_main
    log: Log = say if is_main else lambda text: None
    sampling, trust = settings.generation, settings.dispatch.trust_remote_code
    config, tokenizer = load_config(source.config_directory, trust), load_tokenizer(source.tokenizer_directory, trust)
    tokenizer = with_chat_template(tokenizer, settings, prefix="")
    prompts = [] if settings.is_conversation else prompt_files.read_prompts(settings)
    encoded = tokenize_prompts(tokenizer, prompts, config, chat=settings.chat, system=settings.system)
    room = context_length_of(config, trust)
    if beyond := check_room(prompts, encoded, sampling.max_new_tokens, room, has_encoder=config.is_encoder_decoder):
        log(f"warning: {beyond}")

    start = time.perf_counter()
    model = _load(settings, config, kv_cache_size.kv_cache_budget(encoded, sampling), log, context)
    load_seconds = time.perf_counter() - start
    decoder = Decoder(model, tokenizer, sampling)
    file = open_completions(settings, run_dir, prompts, seed) if is_main and not settings.is_conversation else None
    if settings.is_conversation:
        num_prompts = chat_session.converse(decoder, input, _write, room.length, seed, settings.system)
        result: dict[str, Any] = {"num_prompts": num_prompts}
    else:
        _complete(decoder, prompts, encoded, seed, file, context)
        result = {"num_prompts": len(prompts), "output": str(file.path) if file else ""}

    figures, peak_bytes = _total(decoder.figures, context), peak_resident_bytes()
    num_tokens, num_before = (file.num_new_tokens, file.num_rows_before) if file else (figures.num_new_tokens, 0)
    now = f" ({len(prompts) - num_before} by this run)" if num_before else ""
    done = f"{format_count(result['num_prompts'], 'completion')}{now}, {format_count(num_tokens, 'new token')}"
    log(f"\n{done}; {_describe(figures, load_seconds, peak_bytes)}")
    result |= {"num_new_tokens": num_tokens} | {name: getattr(figures, name) for name in _FIGURES}
    if result.get("output") and (settings.output or settings.leaves_files):
        log(f"written to {result['output']}")
    return result | {
        "load_seconds": load_seconds,
        "peak_memory_bytes": peak_bytes,
        "peak_device_memory_bytes": {gpu: cuda.max_memory_allocated(gpu) for gpu in range(cuda.device_count())},
        "device_map": model.hf_device_map,
    }


def _describe(figures: DecodingFigures, load_seconds: float, peak_bytes: int) -> str:
    return (
        f"loaded in {load_seconds:.1f} s, {figures.tokens_per_second:.1f} tokens/s, "
        f"peak memory {format_size(peak_bytes)}, {format_size(figures.disk_bytes_per_token)} read from disk per token"
    )


def _load(
    settings: GenerateSettings,
    config: PretrainedConfig,
    budget: kv_cache_size.KVCacheBudget | None,
    log: Log,
    context: DistributedContext | None,
) -> PreTrainedModel:
    """Load the model on its devices, with its adapters; `settings.default_adapter` is active."""
    source, adapters, dispatch = settings.source, settings.adapter_sources, settings.dispatch
    if not adapters:
        return dispatch_model(source, config, dispatch, budget, log=log, context=context)
    dispatch = reserve_adapter_memory(dispatch, source, adapters)
    model = dispatch_model(source, config, dispatch, budget, log=log, context=context)
    add_adapters(model, adapters, source)
    use_adapter(model, settings.default_adapter)
    log(f"adapters: {', '.join(f'{name} ({location.weights})' for name, location in adapters.items())}")
    return model


def _complete(
    decoder: Decoder,
    prompts: Sequence[prompt_files.Prompt],
    encoded: Sequence[Sequence[int]],
    seed: int,
    file: CompletionsFile | None,
    context: DistributedContext | None,
) -> None:
    """Complete the prompts into `file`, which only rank 0 may have, and print the first completions there."""
    num_before = file.num_rows_before if file else 0
    if num_before:
        print(
            f"{num_before} of {format_count(len(prompts), 'completion')} exist already; resuming after them", flush=True
        )
    is_main = context is None or context.is_main
    on_text = _write if is_main and len(prompts) == 1 else None  # a single completion is shown as it is generated
    if on_text:
        print(f"\n> {prompts[0].text}", flush=True)
    completions = batching.complete(
        decoder, prompts, encoded, seed=seed, num_done=num_before, context=context, on_text=on_text
    )
    if not is_main:
        deque(completions, maxlen=0)  # other ranks complete their part, but receive no results
        return
    with report_progress(len(prompts) - num_before, "generate", "completions") as count:
        for number, completion in enumerate(file.append(completions) if file else completions):
            if not on_text and (text := prompt_files.format_completion(completion, number)):
                print(text, flush=True)
            count(1)


def _total(figures: DecodingFigures, context: DistributedContext | None) -> DecodingFigures:
    """Sum the figures of all ranks, on rank 0. Ranks that divide a layer do the same work, so one of them counts."""
    parts = context.gather_object(figures)[:: context.num_tensor_ranks] if context else [figures]
    return DecodingFigures(
        min((part.first_token_seconds for part in parts if part.first_token_seconds is not None), default=None),
        max((part.seconds for part in parts), default=0.0),
        sum(part.num_new_tokens for part in parts),
        sum(part.disk_bytes for part in parts),
    )
