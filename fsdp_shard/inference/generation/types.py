"""What the decoder gives: an answer to a prompt, and figures of the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Answer:
    """New tokens up to and including the first end-of-text token, and the logarithm of each one's probability."""

    tokens: list[int]
    log_probabilities: list[float] | None = None


@dataclass
class Figures:
    """Seconds until the first token of the first batch, seconds of all batches, the tokens, bytes from the disk."""

    first_token_seconds: float | None = None
    seconds: float = 0.0
    num_new_tokens: int = 0
    disk_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / self.seconds if self.seconds else 0.0

    @property
    def disk_bytes_per_token(self) -> float:
        return self.disk_bytes / self.num_new_tokens if self.num_new_tokens else 0.0

    def add(self, other: Figures) -> None:
        """Count what another rank did at the same time."""
        firsts = [one for one in (self.first_token_seconds, other.first_token_seconds) if one is not None]
        self.first_token_seconds = min(firsts, default=None)
        self.seconds = max(self.seconds, other.seconds)
        self.num_new_tokens += other.num_new_tokens
        self.disk_bytes += other.disk_bytes
