"""Times a loaded model while it generates, one batch of random prompts at a time, with the decoder of `generate`."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.errors import ModelError
from fsdp_shard.evaluation.config import SpeedConfig
from fsdp_shard.inference import Decoder, DevicePlan, GenerationSettings, device_name
from fsdp_shard.utils import disk_bytes_read, peak_resident_bytes, reset_peak_resident_bytes, resident_bytes

# Options of a model's own generation config that define where a text may end.
_ENDS = ("eos_token_id", "forced_eos_token_id", "stop_strings", "max_time", "min_length", "min_new_tokens")


@dataclass(frozen=True)
class Size:
    """A batch of `batch_size` prompts of `context_length` tokens each."""

    batch_size: int
    context_length: int

    def __str__(self) -> str:
        return f"batch {self.batch_size:,}, context {self.context_length:,}"


@dataclass(frozen=True)
class Spread:
    """A figure over several passes: its median, and its lowest and highest value."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    def row(self, name: str) -> dict[str, Any]:
        """The figure as `name`, with its range, for result.json."""
        return {name: self.median, f"{name}_range": [min(self.values), max(self.values)]}


@dataclass(frozen=True)
class SizeFigures:
    """The figures of one size.

    Attributes:
        size: The size.
        new_tokens: Number of generated tokens per text.
        first_token: Seconds from the prompts to the first token of each text.
        decode: Seconds from the first to the last token.
        peak_bytes: Peak memory by device while the passes ran; `cpu` covers the whole process.
        disk_bytes: Bytes read from disk in each pass, without the page cache.
        digest: The xxh3_128 of the generated tokens, for comparing runs.
    """

    size: Size
    new_tokens: int
    first_token: Spread
    decode: Spread
    peak_bytes: Mapping[str, int]
    disk_bytes: float
    digest: str

    @property
    def prefill(self) -> Spread:
        """Prompt tokens per second over all texts, up to the first new token."""
        num_tokens = self.size.batch_size * self.size.context_length
        return Spread([num_tokens / seconds for seconds in self.first_token.values])

    @property
    def decoded(self) -> Spread:
        """New tokens per second over all texts, after each first token."""
        return Spread([self.size.batch_size * rate for rate in self.decoded_per_text.values])

    @property
    def decoded_per_text(self) -> Spread:
        """New tokens per second for one text, after the first."""
        return Spread([(self.new_tokens - 1) / seconds for seconds in self.decode.values])

    @property
    def row(self) -> dict[str, Any]:
        """All figures, for result.json."""
        size = self.size
        return {
            "batch_size": size.batch_size,
            "context_length": size.context_length,
            "num_prompt_tokens": size.batch_size * size.context_length,
            "num_new_tokens": size.batch_size * self.new_tokens,
            **self.first_token.row("first_token_seconds"),
            **self.prefill.row("prefill_tokens_per_second"),
            **self.decoded.row("decode_tokens_per_second"),
            **self.decoded_per_text.row("decode_tokens_per_second_per_text"),
            "peak_memory_bytes": dict(self.peak_bytes),
            "disk_bytes_per_pass": self.disk_bytes,
            "new_tokens_digest": self.digest,
        }


class TimedModel:
    """A timed model that generates `settings.new_tokens` tokens for each text, whatever they are.

    Attributes:
        gpus: Numbers of the GPUs it uses.
        cpu_memory_is_peak: Whether the process memory is its peak during the passes of a size; if the system cannot
            track that, it is the memory after the passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        plan: DevicePlan,
        settings: SpeedConfig,
        seed: int,
    ) -> None:
        self._settings, self._seed = settings, seed
        self._decoder = Decoder(model, tokenizer, GenerationSettings(max_new_tokens=settings.new_tokens))
        for name in _ENDS:
            setattr(self._decoder.config, name, None)
        self._vocabulary = ordinary_tokens(model, tokenizer)
        self.gpus = sorted(
            device for device in {*plan.devices.values(), plan.execution_device} if isinstance(device, int)
        )
        self.cpu_memory_is_peak = reset_peak_resident_bytes()

    def measure(self, size: Size, count: Callable[[int], None]) -> SizeFigures:
        """Generate from prompts of one size: once as a warm-up, and `settings.repeats` times timed.

        Args:
            size: The size.
            count: Called with 1 after each pass.

        Raises:
            ModelError: The model cannot be run, or ends texts early.
        """
        prompts = self.prompts(size)
        self._pass(prompts)  # warm-up: allocates memory, selects kernels, fills the page cache
        count(1)
        self._reset_peaks()
        disk, first, rest, digest = disk_bytes_read(), [], [], ""
        for _ in range(self._settings.repeats):
            timed = self._pass(prompts)
            first.append(timed.first_token_seconds)
            rest.append(timed.decode_seconds)
            digest = digest or xxhash.xxh3_128_hexdigest(torch.tensor(timed.tokens).numpy().tobytes())
            count(1)
        disk_bytes = (disk_bytes_read() - disk) / self._settings.repeats
        peaks = self._peaks()
        return SizeFigures(size, self._settings.new_tokens, Spread(first), Spread(rest), peaks, disk_bytes, digest)

    def prompts(self, size: Size) -> list[list[int]]:
        """Random token ids [batch_size][context_length], determined by the seed and the size alone."""
        generator = torch.Generator().manual_seed(self._seed)
        drawn = torch.randint(len(self._vocabulary), (size.batch_size, size.context_length), generator=generator)
        found: list[list[int]] = self._vocabulary[drawn].tolist()
        return found

    def _pass(self, prompts: Sequence[Sequence[int]]) -> "_Pass":
        wanted = self._settings.new_tokens
        clock = _Clock(self.gpus, wanted)
        start = clock.now()
        answers = self._decoder.run(prompts, is_stopped=clock.read)
        tokens = [answer.tokens for answer in answers]
        if len(clock.times) != 2 or any(len(row) != wanted for row in tokens):
            raise ModelError(
                f"The model generated {min(map(len, tokens))} tokens where speed.new_tokens={wanted} asks for exactly "
                f"as many: code of its own ends texts early. Its speed cannot be measured; evaluate another model."
            )
        first, last = clock.times
        return _Pass(first - start, last - first, tokens)

    def _reset_peaks(self) -> None:
        reset_peak_resident_bytes()
        for gpu in self.gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    def _peaks(self) -> dict[str, int]:
        resident = peak_resident_bytes() if self.cpu_memory_is_peak else resident_bytes()
        return {device_name(gpu): torch.cuda.max_memory_allocated(gpu) for gpu in self.gpus} | {"cpu": resident}


@dataclass(frozen=True)
class _Pass:
    """The seconds of one pass, and the new tokens of each text."""

    first_token_seconds: float
    decode_seconds: float
    tokens: list[list[int]]


@dataclass
class _Clock:
    """Reads the time after the first and the last token of a pass, once the GPUs have finished their work."""

    gpus: Sequence[int]
    num_tokens: int
    times: list[float] = field(default_factory=list)
    num_read: int = 0

    def now(self) -> float:
        """The time in seconds, once all work queued on the GPUs is done."""
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)
        return time.perf_counter()

    def read(self) -> bool:
        """Called after each token; returns False to continue generation."""
        self.num_read += 1
        if self.num_read in (1, self.num_tokens):
            self.times.append(self.now())
        return False


def ordinary_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The ids [num_tokens] in the vocabularies of both model and tokenizer, without special tokens.

    Raises:
        ModelError: There are none.
    """
    in_model = getattr(model.config.get_text_config(), "vocab_size", None) or len(tokenizer)
    special = set(tokenizer.all_special_ids)
    found = [token for token in range(min(in_model, len(tokenizer))) if token not in special]
    if not found:
        raise ModelError("The tokenizer has no tokens but special ones to make prompts of; give that of the model.")
    return torch.tensor(found)
