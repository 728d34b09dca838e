"""Completes prompts in batches, divided among data-parallel ranks.

Batches depend only on prompt lengths and batch size, so a resumed run has the same batches as the original run.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from fsdp_shard.distributed import LONGEST_TIMEOUT_SECONDS, DistributedContext, run_on_all
from fsdp_shard.inference.generation.decoder import Answer, Decoder, OnText, seed_draws
from fsdp_shard.inference.generation.padding_trial import reads_padding
from fsdp_shard.inference.generation.prompts import Completion, Prompt
from fsdp_shard.inference.named_adapters import use_adapter
from fsdp_shard.utils import say

_WINDOW_BATCHES = 16  # rows are written in input order, so at most this many batches wait for an earlier prompt


def windows(
    lengths: Sequence[int], batch_size: int, *, equal: bool = False, kinds: Sequence[str | None] | None = None
) -> Iterator[list[list[int]]]:
    """Yield batches of indices into `lengths`, longest first, in windows that keep the output near input order.

    The longest come first, so a batch that does not fit in memory is detected at once.

    Args:
        lengths: Number of tokens in each prompt.
        batch_size: Maximum number of prompts per batch.
        equal: Batch only prompts of equal length, for models that are affected by padding.
        kinds: Another property that all prompts in a batch must share; None for nothing.

    Yields:
        The batches of each window.
    """
    size = batch_size * _WINDOW_BATCHES
    for first in range(0, len(lengths), size):
        these = range(first, min(first + size, len(lengths)))
        kind = {position: "" if kinds is None else kinds[position] or "" for position in these}
        order = sorted(these, key=lambda position: (kind[position], -lengths[position]))
        runs = [
            list(run)
            for _, run in groupby(order, key=lambda position: (kind[position], lengths[position] if equal else 0))
        ]
        yield [run[start : start + batch_size] for run in runs for start in range(0, len(run), batch_size)]


def complete(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    num_done: int = 0,
    context: DistributedContext | None = None,
    on_text: OnText | None = None,
) -> Iterator[Completion]:
    """Complete each prompt, in order. Every batch has its own random numbers, so a resumed run draws the same ones.

    Args:
        decoder: Runs the model.
        prompts: The prompts.
        encoded: Token ids of each prompt.
        seed: Seed of sampling.
        num_done: Number of prompts to skip because an earlier run completed them; rank 0's value counts.
        context: The ranks that divide the batches; None for a single process.
        on_text: Called with generated text as it appears, for a single prompt.

    Yields:
        Completions in prompt order; nothing on data-parallel ranks other than rank 0.

    Raises:
        LossError, ModelError: As in `Decoder.run`, on all ranks.
    """
    rank, num_ranks = (context.data_rank, context.num_data_ranks) if context else (0, 1)
    if context is not None:  # one rank may have a batch with long answers, and another none
        context = context.with_new_group(LONGEST_TIMEOUT_SECONDS)
        num_done = context.broadcast_object(num_done)
    lengths, adapters = [len(ids) for ids in encoded], [prompt.adapter for prompt in prompts]
    log = say if context is None or context.is_main else lambda text: None

    def answer(batches: Sequence[Sequence[int]]) -> Iterator[tuple[int, Answer]]:
        for batch in batches:
            use_adapter(decoder.model, adapters[batch[0]])
            seed_draws(seed, min(batch))
            yield from zip(batch, decoder.run([encoded[position] for position in batch], on_text), strict=True)

    for window in _windows(decoder, lengths, adapters, log):
        wanted = [batch for batch in window if max(batch) >= num_done]
        answers: dict[int, Answer] = {}
        for position, found in answer(wanted if num_ranks == 1 else ()):
            answers[position] = found
            while num_done in answers:
                yield _completion(decoder, prompts[num_done], encoded[num_done], answers.pop(num_done))
                num_done += 1
        if num_ranks > 1 and wanted:
            assert context is not None
            answers = run_on_all(context, partial(dict, answer(wanted[rank::num_ranks])))
            gathered = ChainMap(*context.gather_object(answers))
            for position in sorted(position for position in gathered if position >= num_done):
                yield _completion(decoder, prompts[position], encoded[position], gathered[position])
            num_done = max(map(max, wanted)) + 1


def _windows(
    decoder: Decoder, lengths: Sequence[int], adapters: Sequence[str | None], log: Callable[[str], object]
) -> Iterator[list[list[int]]]:
    """The windows of prompts, with batches of one length where the model reads padding."""
    size = decoder.settings.batch_size
    mixed = [batch for window in windows(lengths, size, kinds=adapters) for batch in window]
    of_each = [[lengths[position] for position in batch] for batch in mixed]
    equal = reads_padding(decoder.model, decoder.config, decoder.pad_token, of_each, log)
    return windows(lengths, size, equal=equal, kinds=adapters)


def _completion(decoder: Decoder, prompt: Prompt, ids: Sequence[int], answer: Answer) -> Completion:
    messages = None if prompt.conversation is None else prompt.conversation["messages"]
    text, count = decoder.text(answer, ids), len(answer.tokens)
    return Completion(prompt.text, text, count, answer.log_probabilities, prompt.adapter, messages)
