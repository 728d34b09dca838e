"""Completes prompts in batches, divided among data-parallel ranks.

Batches depend on the lengths of the prompts and the batch size alone, so a resumed run has those of the run before.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from fsdp_shard.distributed import LONG_WAIT_SECONDS, DistributedContext
from fsdp_shard.inference.generation.decoder import Answer, Decoder, OnText, seed_draws
from fsdp_shard.inference.generation.padding_trial import reads_padding
from fsdp_shard.inference.generation.prompts import Completion, Prompt
from fsdp_shard.inference.named_adapters import use_adapter
from fsdp_shard.utils import say

_WINDOW_BATCHES = 16  # rows are written in input order: at most this many batches wait for an earlier prompt


def windows(
    lengths: Sequence[int], batch_size: int, *, equal: bool = False, kinds: Sequence[str | None] | None = None
) -> Iterator[list[list[int]]]:
    """Batches of positions in `lengths`, longest first, in windows that keep the output near input order.

    The longest come first: if a batch does not fit in memory, that is known at once.

    Args:
        lengths: Tokens of each prompt.
        batch_size: Prompts in a batch, at most.
        equal: Give all prompts of a batch one length, for models that read padding too.
        kinds: What else all prompts of a batch must have in common; None for nothing.

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
    """Complete each prompt, in order. Every batch has its own random numbers, so a resumed run draws the same.

    Args:
        decoder: Runs the model.
        prompts: The prompts.
        encoded: Token ids of each.
        seed: Seed of sampling.
        num_done: Number of prompts to skip, as a run before completed them; that of rank 0 counts.
        context: The ranks that divide the batches; None for a single process.
        on_text: Called with text as it is generated, for a single prompt.

    Yields:
        Completions in the order of the prompts; on data-parallel ranks other than rank 0, none.
    """
    rank, num_ranks = (context.data_rank, context.num_data_ranks) if context else (0, 1)
    if context is not None:  # one may have a batch whose answers are long, and another none
        context = context.with_new_group(LONG_WAIT_SECONDS)
        num_done = context.broadcast_object(num_done)
    lengths, adapters = [len(ids) for ids in encoded], [prompt.adapter for prompt in prompts]
    log = say if context is None or context.is_main else lambda text: None
    for window in _windows(decoder, lengths, adapters, log):
        wanted = [batch for batch in window if max(batch) >= num_done]
        answers: dict[int, Answer] = {}
        for batch in wanted[rank::num_ranks]:
            use_adapter(decoder.model, adapters[batch[0]])
            seed_draws(seed, min(batch))
            answers |= zip(batch, decoder.run([encoded[position] for position in batch], on_text), strict=True)
            while num_ranks == 1 and num_done in answers:
                yield _completion(decoder, prompts[num_done], answers.pop(num_done))
                num_done += 1
        if num_ranks > 1 and wanted:
            assert context is not None
            gathered = ChainMap(*context.gather_object(answers))
            for position in sorted(position for position in gathered if position >= num_done):
                yield _completion(decoder, prompts[position], gathered[position])
            num_done = max(map(max, wanted)) + 1


def _windows(
    decoder: Decoder, lengths: Sequence[int], adapters: Sequence[str | None], log: Callable[[str], object]
) -> Iterator[list[list[int]]]:
    """The windows of prompts, with batches of one length where the model reads padding."""
    size = decoder.settings.batch_size
    mixed = [batch for window in windows(lengths, size, kinds=adapters) for batch in window]
    of_each = [[lengths[position] for position in batch] for batch in mixed]
    equal = reads_padding(decoder.model, decoder.pad_token, of_each, log)
    return windows(lengths, size, equal=equal, kinds=adapters)


def _completion(decoder: Decoder, prompt: Prompt, answer: Answer) -> Completion:
    messages = None if prompt.conversation is None else prompt.conversation["messages"]
    tokens, log_probabilities = answer.tokens, answer.log_probabilities
    return Completion(prompt.text, decoder.text(answer), len(tokens), log_probabilities, prompt.adapter, messages)
