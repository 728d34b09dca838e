"""What two checkpoints predict after each token of a prompt: for `diff --logits`. One model is in memory at a time."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint import locate
from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.config import DispatchConfig
from fsdp_shard.inference.dispatch import dispatch_model
from fsdp_shard.models import check_causal, load_config, load_tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LogitsReport:
    """`max_difference` over all logits; `mean_divergence` and `max_divergence` are KL(A || B) a position, in nats.

    `top_agrees` says for each token of the prompt whether both models hold the same next token for likeliest;
    `disagreements` gives those places: (position, the prompt up to there, token of A, token of B).
    """

    num_tokens: int
    max_difference: float
    mean_divergence: float
    max_divergence: float
    top_agrees: tuple[bool, ...]
    disagreements: tuple[tuple[int, str, str, str], ...]

    @property
    def is_equal(self) -> bool:
        return self.max_difference == 0

    def __str__(self) -> str:
        agree = sum(self.top_agrees)
        lines = [
            f"logits after {self.num_tokens} tokens: the largest difference is {self.max_difference:.3g}",
            f"KL divergence of B from A: {self.mean_divergence:.3g} nats a token, {self.max_divergence:.3g} at most",
            f"the likeliest next token is the same at {agree} of {self.num_tokens} positions",
        ]
        for position, text, first, second in self.disagreements:
            lines.append(f"  {position}: after ...{text[-30:]!r} A has {first!r}, B {second!r}")
        return "\n".join(lines)


def diff_logits(a: str, b: str, prompt: str) -> LogitsReport:
    """Run both models on `prompt`, tokenized by the tokenizer of `a`, in the dtype that each is stored in.

    Raises what loading does, DataError for a prompt without tokens, and ModelError where the two cannot be compared:
    another vocabulary, or no decoder-only model.
    """
    import torch

    tokenizer = load_tokenizer(locate(a))
    tokens = list(tokenizer(prompt)["input_ids"])
    if not tokens:
        raise DataError(f"--logits {prompt!r} has no tokens that the model in {a} knows; give other text.")
    first, second = _logits(a, tokens), _logits(b, tokens)
    if first.shape != second.shape:
        raise ModelError(
            f"{a} predicts {first.shape[-1]} tokens, but {b} predicts {second.shape[-1]}: logits cannot be compared."
        )
    for path, logits in ((a, first), (b, second)):
        if not logits.isfinite().all():
            raise ModelError(
                f"A logit of {path} is NaN or infinite; `fsdp-shard verify {path}` looks for that in the weights."
            )

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    log_a, log_b = first.log_softmax(-1), second.log_softmax(-1)
    divergence = (log_a.exp() * (log_a - log_b)).sum(-1).clamp(min=0)
    top_a, top_b = first.argmax(-1), second.argmax(-1)
    agrees = top_a == top_b
    return LogitsReport(
        num_tokens=len(tokens),
        max_difference=float((first - second).abs().max()),
        mean_divergence=float(divergence.mean()),
        max_divergence=float(divergence.max()),
        top_agrees=tuple(agrees.tolist()),
        disagreements=tuple(
            (at, text(tokens[: at + 1]), text([int(top_a[at])]), text([int(top_b[at])]))
            for at in torch.nonzero(~agrees).flatten().tolist()
        ),
    )


def _logits(path: str, tokens: list[int]) -> torch.Tensor:
    """[num_tokens, vocabulary] of the model at `path`, as float64 on the CPU; the model is gone after it."""
    import torch

    source = locate(path)
    config = load_config(source)
    check_causal(config)
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room is not None and len(tokens) > room:
        raise DataError(f"--logits has {len(tokens)} tokens, but the context of {path} is {room}; shorten it.")
    model = dispatch_model(source, config, DispatchConfig())
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            return logits.double().cpu()
    finally:
        del model
        gc.collect()
