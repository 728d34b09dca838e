"""Token ids to new ones with transformers' `generate`, in batches, and how long that took."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from fsdp_shard.errors import ConfigError
from fsdp_shard.inference.config import GenerationSettings
from fsdp_shard.inference.generation.batching import windows
from fsdp_shard.inference.generation.data_parallel import Share
from fsdp_shard.inference.generation.prefix_cache import Turns
from fsdp_shard.inference.generation.prompts import Completion, Prompt
from fsdp_shard.inference.generation.types import Answer, Figures
from fsdp_shard.utils import disk_bytes_read

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


# Of a model's own config: ways of decoding that need another model or give several answers.
_OTHER_WAYS = ("prompt_lookup_num_tokens", "penalty_alpha", "dola_layers", "force_words_ids", "token_healing")

OnText = Callable[[str], object]


class Decoder:
    """Runs batches of token ids through `model`; `figures` is brought up to date with each."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.config = generation_config(model, tokenizer, settings)
        self.figures = Figures()

    def run(
        self,
        batch: Sequence[Sequence[int]],
        on_text: OnText | None = None,
        turns: Turns | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[Answer]:
        """The answer to each row; `on_text` is handed the text of a single row as it comes, or whole with beams.

        With `turns`, what its row has in common with the row before is not computed again. `is_stopped` is asked after
        each token whether that was the last.
        """
        start, disk = time.perf_counter(), disk_bytes_read()
        watch = _Watch(self.model, self.figures, start, is_stopped, scores=self.settings.output_scores)
        try:
            if self.settings.num_beams == 1:
                answers = self._generate(batch, watch, on_text, turns)
            else:  # which of them is the answer is known at the end, and keys and values are those of all
                answers = self._generate(batch, watch, None, None)
                if on_text is not None:
                    on_text(self.text(answers[0]))
        finally:
            watch.remove()
            self.figures.seconds += time.perf_counter() - start
            self.figures.disk_bytes += disk_bytes_read() - disk
        self.figures.num_new_tokens += sum(len(answer.tokens) for answer in answers)
        return answers

    def text(self, answer: Answer) -> str:
        return str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True))

    def _generate(
        self, batch: Sequence[Sequence[int]], watch: _Watch, on_text: OnText | None, turns: Turns | None
    ) -> list[Answer]:
        length, pad = max(map(len, batch)), int(self.config.pad_token_id or 0)
        is_pair = self.model.config.is_encoder_decoder
        ids = torch.full((len(batch), length), pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):  # what is gone on from stands at the end, what an encoder reads does not
            place = slice(0, len(prompt)) if is_pair else slice(length - len(prompt), length)
            ids[row, place] = torch.tensor(prompt)
            mask[row, place] = 1
        if self.config.cache_implementation is not None:  # transformers then makes the cache itself
            turns = None
        cache = None if turns is None else turns.take(batch[0])
        generate: Any = self.model.generate
        with _own_config(self.model, self.config):
            output = generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=self.config,
                stopping_criteria=StoppingCriteriaList([watch]),
                tokenizer=self.tokenizer,  # asked for where the model's own config has stop_strings
                streamer=None if on_text is None else _Streamer(self.tokenizer, on_text),
                **({} if cache is None else {"past_key_values": cache}),
            )
        if turns is not None:
            turns.keep(output.sequences[0].tolist(), output.get("past_key_values"))
        ends, begin = set(_end_tokens(self.config)), 1 if is_pair else length
        tokens = [_until_end(row, ends) for row in output.sequences[:, begin:].tolist()]
        scores = watch.scores()
        return [Answer(row, None if scores is None else scores[n][: len(row)]) for n, row in enumerate(tokens)]


def complete(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    done: int = 0,
    share: Share | None = None,
    on_text: OnText | None = None,
) -> Iterator[Completion]:
    """A completion for each prompt but the first `done`, in their order; on ranks beside rank 0, none.

    Every batch has random numbers of its own, so a run that goes on draws what it would have drawn. `on_text` is for a
    single prompt.
    """
    share = share or Share()
    lengths, reads_padding = [len(ids) for ids in encoded], bool(getattr(decoder.model, "_is_stateful", False))
    for window in windows(lengths, decoder.settings.batch_size, equal=reads_padding):
        wanted = [batch for batch in window if max(batch) >= done]
        answers: dict[int, Answer] = {}
        for number, batch in enumerate(wanted):
            if number % share.num_groups == share.group:
                torch.manual_seed((seed * 1_000_003 + min(batch)) % 2**63)
                found = decoder.run([encoded[place] for place in batch], on_text)
                answers.update(zip(batch, found, strict=True))
            if share.num_groups == 1:
                while done in answers:
                    yield _completion(decoder, prompts[done], answers.pop(done))
                    done += 1
        if share.num_groups > 1 and wanted:
            answers = share.merge(answers)
            for place in sorted(place for place in answers if place >= done):
                yield _completion(decoder, prompts[place], answers[place])
            done = max(map(max, wanted)) + 1


def _completion(decoder: Decoder, prompt: Prompt, answer: Answer) -> Completion:
    return Completion(prompt.text, decoder.text(answer), len(answer.tokens), answer.log_probabilities)


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
) -> GenerationConfig:
    """The model's own generation config with `settings` in it; what only sampling or beams look at is unset without."""
    config = copy.deepcopy(model.generation_config)
    assert config is not None, "encode refuses models that cannot generate"
    config.max_new_tokens, config.max_length, config.do_sample = settings.max_new_tokens, None, settings.do_sample
    config.num_beams, config.num_return_sequences = settings.num_beams, 1
    for name in _OTHER_WAYS:
        setattr(config, name, None)
    for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
        value = getattr(settings, name)
        if value is not None:
            setattr(config, name, value)
        elif not settings.do_sample and name != "repetition_penalty":
            setattr(config, name, None)
    if settings.num_beams == 1:
        config.length_penalty = config.early_stopping = None
    config.return_dict_in_generate = True
    config.use_cache = settings.cache != "none"
    if settings.cache == "offloaded":
        if not torch.cuda.is_available():
            raise ConfigError("generation.cache=offloaded would do nothing: torch finds no GPU here. Leave it out.")
        config.cache_implementation = "offloaded"
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or sys.maxsize
    if config.pad_token_id is None or not 0 <= config.pad_token_id < vocabulary:
        config.pad_token_id = next((t for t in (tokenizer.pad_token_id, *_end_tokens(config)) if t is not None), 0)
    return config


@contextmanager
def _own_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Let `config` be the model's own while the block runs: `generate` takes from that what is None elsewhere."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


def _end_tokens(config: GenerationConfig) -> list[int]:
    ends: Any = config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


class _Streamer(TextStreamer):
    """Hands on text as soon as no later token can change it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: OnText) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


class _Watch(StoppingCriteria):
    """Stops when it is told to; notes when the first token was there, and with `scores` how probable each token was."""

    def __init__(
        self, model: PreTrainedModel, figures: Figures, start: float, is_stopped: Callable[[], bool], *, scores: bool
    ) -> None:
        self._figures, self._start, self._is_stopped = figures, start, is_stopped
        self._last: torch.Tensor | None = None
        self._found: list[torch.Tensor] = []
        self._handle = model.register_forward_hook(self._see, always_call=False) if scores else None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self._figures.first_token_seconds is None:
            self._figures.first_token_seconds = time.perf_counter() - self._start
        if self._last is not None:
            chosen = input_ids[:, -1:].to(self._last.device)
            self._found.append(self._last.gather(-1, chosen)[:, 0].cpu())
        return torch.full((len(input_ids),), self._is_stopped(), dtype=torch.bool, device=input_ids.device)

    def scores(self) -> list[list[float]] | None:
        """For each row, the logarithms of the probabilities of its new tokens."""
        return None if self._handle is None else torch.stack(self._found, 1).tolist()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _see(self, module: Any, args: Any, output: Any) -> None:
        self._last = output.logits[:, -1].float().log_softmax(-1)
