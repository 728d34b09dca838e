"""Generates tokens with transformers' `generate`, one batch at a time, and measures it."""

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from fsdp_shard.errors import ConfigError, LossError, ModelError
from fsdp_shard.inference.config import GenerationSettings
from fsdp_shard.inference.generation.prefix_cache import PrefixCache
from fsdp_shard.models import continued_text, end_tokens, kv_cache_of, model_run_errors, origin, until_end
from fsdp_shard.utils import disk_bytes_read, no_cudnn_attention

# Decoding methods in a model's own config that need another model, return several answers, or guess several tokens at
# once, which works only with batches of one text.
_UNSUPPORTED = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "force_words_ids",
    "token_healing",
    "max_time",
)

OnText = Callable[[str], object]


@dataclass(frozen=True)
class Answer:
    """New tokens up to and including the first end-of-text token, and each token's log probability."""

    tokens: list[int]
    log_probabilities: list[float] | None = None


@dataclass
class DecodingFigures:
    """Measurements of all batches so far: seconds, tokens, and bytes read from disk."""

    first_token_seconds: float | None = None
    seconds: float = 0.0
    num_new_tokens: int = 0
    disk_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second; the time includes the prompts."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0

    @property
    def disk_bytes_per_token(self) -> float:
        """Bytes read from disk per new token."""
        return self.disk_bytes / self.num_new_tokens if self.num_new_tokens else 0.0


class Decoder:
    """Runs batches of token ids through `model`, and updates `figures` with each batch."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.config = generation_config(model, tokenizer, settings)
        self.figures = DecodingFigures()

    def run(
        self,
        batch: Sequence[Sequence[int]],
        on_text: OnText | None = None,
        prefix_cache: PrefixCache | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[Answer]:
        """Generate an answer to each row of `batch`.

        Args:
            batch: Token ids of each prompt.
            on_text: Called with a single row's text as it is generated; with beam search, once with all of it.
            prefix_cache: Keys and values of the previous row, whose common prefix with this one is not recomputed.
            is_stopped: Called after each token; generation ends when it returns True.

        Returns:
            An answer for each row.

        Raises:
            LossError: The model's logits are not finite.
            ModelError: The model cannot be run.
        """
        at_end: OnText | None = None
        if self.settings.num_beams > 1:  # the best beam is known only at the end, and the KV cache is that of all beams
            at_end, on_text, prefix_cache = on_text, None, None
        start, disk = time.perf_counter(), disk_bytes_read()
        watch = _Watch(self.model, self.figures, start, is_stopped, scores=self.settings.output_scores)
        try:
            answers = self._generate(batch, watch, on_text, prefix_cache)
            if at_end is not None:
                at_end(self.text(answers[0], batch[0]))
        finally:
            watch.remove()
            self.figures.seconds += time.perf_counter() - start
            self.figures.disk_bytes += disk_bytes_read() - disk
        self.figures.num_new_tokens += sum(len(answer.tokens) for answer in answers)
        return answers

    @property
    def pad_token(self) -> int:
        """The token that pads the shorter prompts of a batch."""
        return int(self.config.pad_token_id or 0)

    def text(self, answer: Answer, prompt: Sequence[int]) -> str:
        """The text that an answer adds to the tokens of `prompt`, without special tokens.

        An encoder-decoder's answer does not continue its prompt.
        """
        if self.model.config.is_encoder_decoder:
            prompt = ()
        return continued_text(self.tokenizer, prompt, answer.tokens)

    def _generate(
        self,
        batch: Sequence[Sequence[int]],
        watch: "_Watch",
        on_text: OnText | None,
        prefix_cache: PrefixCache | None,
    ) -> list[Answer]:
        length, pad = max(map(len, batch)), self.pad_token
        is_encoder_decoder = self.model.config.is_encoder_decoder
        ids = torch.full((len(batch), length), pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):  # pad decoders on the left, encoders on the right
            columns = slice(len(prompt)) if is_encoder_decoder else slice(length - len(prompt), length)
            ids[row, columns] = torch.tensor(prompt)
            mask[row, columns] = 1
        if self.config.cache_implementation is not None:  # transformers then creates the cache itself
            prefix_cache = None
        options: dict[str, Any] = {} if prefix_cache is None else prefix_cache.take(batch[0])
        if getattr(self.model.config, "output_router_logits", False):
            options["output_router_logits"] = False  # transformers fails to compute their loss with a cache
        # On the computing device, because transformers moves each token's logits to the device of the ids.
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        generate: Any = self.model.generate
        finite = _FiniteLogits()
        beams = self.settings.num_beams
        hint = f"Remove generation.num_beams={beams} if the model has no beam search." if beams > 1 else ""
        with model_run_errors(self.model, hint), _own_config(self.model, self.config), no_cudnn_attention():
            output = generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=self.config,
                logits_processor=transformers.LogitsProcessorList([finite]),
                stopping_criteria=transformers.StoppingCriteriaList([watch]),
                tokenizer=self.tokenizer,  # required if the model's config has stop_strings
                streamer=None if on_text is None else _Streamer(self.tokenizer, on_text),
                **options,
            )
        finite.check(self.model)
        if prefix_cache is not None:
            prefix_cache.put(output.sequences[0].tolist(), kv_cache_of(output))
        start = 1 if is_encoder_decoder else length
        named: Any = self.config.eos_token_id  # a list, or None
        ends = set(named or ())
        sequences = output.sequences.cpu()
        stops = self._stops(sequences, start)
        tokens = [until_end(row, ends)[:stop] for row, stop in zip(sequences[:, start:].tolist(), stops, strict=True)]
        scores = watch.scores()
        return [Answer(row, None if scores is None else scores[n][: len(row)]) for n, row in enumerate(tokens)]

    def _stops(self, sequences: torch.Tensor, start: int) -> list[int | None]:
        """For each row, the number of tokens after `start` until the first of `stop_strings` is complete, or None.

        Rows that complete before others in a batch are padded. Sequences on a GPU would be waited for at each token.
        """
        stops: list[int | None] = [None] * len(sequences)
        if not (strings := self.config.stop_strings):
            return stops
        is_complete = transformers.StopStringCriteria(tokenizer=self.tokenizer, stop_strings=strings)
        for end in range(start + 1, sequences.shape[1] + 1):
            for row in torch.nonzero(is_complete(sequences[:, :end], None)).flatten().tolist():
                stops[row] = stops[row] or end - start
        return stops


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
) -> GenerationConfig:
    """The model's own generation config, updated by `settings`; options of unused methods are unset."""
    config = copy.deepcopy(model.generation_config)
    assert config is not None, "tokenize_prompts refuses models that cannot generate"
    _check_tokens(model, config)
    if settings.output_scores and config.guidance_scale not in (None, 1):
        raise ConfigError(
            f"generation.output_scores=true cannot be combined with guidance_scale {config.guidance_scale} in the "
            f"generation config of {model.config.name_or_path}, by which another pass of the model decides about each "
            f"token; remove one of them."
        )
    config.max_new_tokens, config.max_length, config.do_sample = settings.max_new_tokens, None, settings.do_sample
    config.num_beams, config.num_return_sequences = settings.num_beams, 1
    for name in _UNSUPPORTED:
        setattr(config, name, None)
    if settings.repetition_penalty is not None:
        config.repetition_penalty = settings.repetition_penalty
    for name in settings.sampling_settings:
        value = getattr(settings, name)
        if value is not None or not settings.do_sample:  # None unsets the model's own value
            setattr(config, name, value)
    if settings.stop_strings:
        config.stop_strings = list(settings.stop_strings)
    if settings.num_beams == 1:
        config.length_penalty = config.early_stopping = None
    config.return_dict_in_generate = True
    config.use_cache = settings.cache != "none"
    if settings.cache == "offloaded":
        if model.config.is_encoder_decoder:
            raise ConfigError(
                f"generation.cache=offloaded does not work for {type(model).__name__}, whose layers read keys of the "
                f"encoder without fetching them; remove it."
            )
        if model.device.type != "cuda":
            raise ConfigError("generation.cache=offloaded has no effect, as the model computes on the CPU; remove it.")
        config.cache_implementation = "offloaded"
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", None) or sys.maxsize
    ends = _valid_tokens(end_tokens(model, tokenizer), vocab_size)
    config.eos_token_id = ends or None
    config.pad_token_id = _valid_tokens([config.pad_token_id, tokenizer.pad_token_id, *ends, 0], vocab_size)[0]
    return config


def seed_draws(seed: int, number: int) -> None:
    """Make further draws depend only on the seed and on an answer's number."""
    torch.manual_seed((seed * 1_000_003 + number) % 2**63)


def _valid_tokens(tokens: Sequence[int | None], vocab_size: int) -> list[int]:
    """The values that are tokens of the model."""
    return [token for token in tokens if token is not None and 0 <= token < vocab_size]


def _check_tokens(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Raise ModelError if an end or padding token is not a number; transformers accepts anything in the file."""
    for name in ("eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        tokens = value if isinstance(value, (list, tuple)) and name == "eos_token_id" else [value]
        if any(token is not None and type(token) is not int for token in tokens):
            raise ModelError(
                f"The generation config of {model.config.name_or_path} has {name} {value!r}; expected the number of a "
                f"token. Repair its generation_config.json or config.json."
            )


@contextmanager
def _own_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Make `config` the model's own temporarily: `generate` falls back on it for options that are None."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


class _Streamer(BaseStreamer):
    """Emits the words of a single row's answer as they are completed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: OnText) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._before: list[int] = []  # the prompt, and the lines of the answer that are complete
        self._line: list[int] = []
        self._emitted = ""  # of the line

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt's tokens, then each new one."""
        if not self._before:
            self._before = value.flatten().tolist()
            return
        self._line += value.flatten().tolist()
        text = continued_text(self._tokenizer, self._before, self._line)
        # The next token may change a word, or complete a character; scripts after U+2E80 have no spaces.
        is_final = text[-1:] == "\n" or "\u2e80" <= text[-1:] < "\ufffd"
        self._emit(text if is_final else text[: text.rfind(" ") + 1])
        if text.endswith("\n"):
            self._before, self._line, self._emitted = self._before + self._line, [], ""

    def end(self) -> None:
        """Emit the rest."""
        self._emit(continued_text(self._tokenizer, self._before, self._line))

    def _emit(self, text: str) -> None:
        if text.startswith(self._emitted) and text != self._emitted:
            self._on_text(text[len(self._emitted) :])
            self._emitted = text


class _FiniteLogits(transformers.LogitsProcessor):
    """Records on the device whether all logits are finite, except those of forbidden tokens, which are -inf."""

    def __init__(self) -> None:
        self._is_finite: torch.Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        is_finite = scores.amax(-1, keepdim=True).isfinite()
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        return scores.masked_fill(~is_finite, 0.0)  # a GPU that draws from NaN is lost to the process

    def check(self, model: PreTrainedModel) -> None:
        """Raise LossError if some logits were not finite."""
        if self._is_finite is not None and not bool(self._is_finite.all()):
            name = origin(model.config.name_or_path or "") or type(model).__name__
            raise LossError(
                f"The logits of {name} are not finite: weights or activations are not finite. Verify the checkpoint, "
                f"or load it with dispatch.dtype=float32."
            )


class _Watch(transformers.StoppingCriteria):
    """Stops generation on request, times the first token and, with `scores`, records log probabilities."""

    def __init__(
        self,
        model: PreTrainedModel,
        figures: DecodingFigures,
        start: float,
        is_stopped: Callable[[], bool],
        *,
        scores: bool,
    ) -> None:
        self._figures, self._start, self._is_stopped = figures, start, is_stopped
        self._last: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []
        self._handle = model.register_forward_hook(self._record) if scores else None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self._figures.first_token_seconds is None:
            input_ids[:, -1].tolist()  # waits for the GPU, which has only queued its computation
            self._figures.first_token_seconds = time.perf_counter() - self._start
        if self._last is not None:
            chosen = input_ids[:, -1:].to(self._last.device)
            self._chosen.append(self._last.gather(-1, chosen)[:, 0])
        return torch.full((len(input_ids),), self._is_stopped(), dtype=torch.bool, device=input_ids.device)

    def scores(self) -> list[list[float]] | None:
        """For each row, the log probabilities of its new tokens; None if not recorded."""
        return None if self._handle is None else torch.stack(self._chosen, 1).tolist()

    def remove(self) -> None:
        """Remove the hook from the model."""
        if self._handle is not None:
            self._handle.remove()

    def _record(self, module: Any, args: Any, output: Any) -> None:
        self._last = output.logits[:, -1].float().log_softmax(-1)
