"""Completions of `train.sample_prompts` in a planned run, on fake tensors, as `complete_greedily` generates them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_shard.models import kv_cache_of
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.recording.events import DONE, Event
from fsdp_shard.planning.step.recording.fake_attention import FULL
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.sharding import without_context_parallel

_LOOP_BYTES = 4096  # left over from the skipped passes: positions, and tokens that are read


@dataclass(frozen=True)
class Completions:
    """Completions of a run.

    Attributes:
        prompt_length: Tokens of the longest prompt. The tokenizer is unknown, so each byte counts as a token, plus one
            that begins the prompt.
        num_new: Number of new tokens.
    """

    prompt_length: int
    num_new: int
    rows = FULL

    @classmethod
    def of(cls, run: PlannedRun) -> Completions | None:
        """Return the completions of a run, if it has any."""
        longest = max((len(text.encode()) for text in run.train.sample_prompts), default=None)
        return None if longest is None else cls(longest + 1, run.train.sample_tokens)

    def setting(self, model: nn.Module) -> AbstractContextManager[None]:
        """Configure attention for the passes: each rank has whole sequences."""
        return without_context_parallel(model)

    def run(self, model: nn.Module, recorder: Recorder) -> None:
        """Generate the first two tokens, then set up the state before the last token, then generate the last token.

        A real run does not do the second part. The recording has a DONE after each of the three parts. The model's
        output stays in memory until the next one exists.
        """
        ids = torch.zeros((1, self.prompt_length), dtype=torch.long)
        output = model(input_ids=ids, use_cache=True)
        ids, given, cache = _next(ids, output)
        if self.num_new > 1:
            output = model(input_ids=given, **cache, use_cache=True)
            ids, given, cache = _next(ids, output)
        recorder.mark(DONE, "")
        if self.num_new < 3:
            return
        del output
        ids = torch.zeros((1, self.prompt_length + self.num_new - 3), dtype=torch.long)
        ids, given, cache = _next(ids, model(input_ids=ids, use_cache=True))
        output = model(input_ids=given, **cache, use_cache=True)
        ids, given, cache = _next(ids, output)
        recorder.mark(DONE, "")
        output = model(input_ids=given, **cache, use_cache=True)
        _next(ids, output)
        recorder.mark(DONE, "")

    def parts(self, recording: Sequence[Event]) -> tuple[Sequence[Event], ...]:
        """The parts of the recording: the first, and the last including what the one between left."""
        first, *more = [number for number, event in enumerate(recording) if event.kind == DONE]
        if not more:
            return (recording[: first + 1],)
        second = more[0]
        left = _LOOP_BYTES + sum(event.change for event in recording[first + 1 : second + 1])
        return recording[: first + 1], (Event(DONE, "", left, left, left, 0), *recording[second + 1 :])


def _next(ids: torch.Tensor, output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The tokens including the most likely next one, the model's next input, and its cache."""
    new = output.logits[:, -1].argmax(-1, keepdim=True)
    ids, cache = torch.cat([ids, new], 1), kv_cache_of(output)
    return ids, new if cache else ids, cache
