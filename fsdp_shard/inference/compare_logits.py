"""Compares two checkpoints' predictions after each token of a prompt, for `diff --logits`; loads one at a time."""

import gc
from dataclasses import dataclass

import torch

from fsdp_shard.checkpoint import Location
from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.config import DispatchConfig
from fsdp_shard.inference.dispatch import dispatch_model
from fsdp_shard.inference.generation.tokenize_prompts import tokenize
from fsdp_shard.models import (
    check_causal,
    check_vocabulary,
    context_length_of,
    load_config,
    load_tokenizer,
    model_run_errors,
)
from fsdp_shard.utils import format_count


@dataclass(frozen=True)
class LogitsReport:
    """The differences between the logits of two models, A and B.

    Attributes:
        num_tokens: Number of tokens in the prompt.
        max_difference: The largest absolute difference of a logit.
        mean_divergence: KL(A || B) per position, in nats.
        max_divergence: The largest KL divergence.
        top_agrees: For each position, whether both models predict the same most likely next token.
        disagreements: The other positions: (position, prompt up to it, token of A, token of B).
        warnings: A line for each model that was never trained on that many positions.
    """

    num_tokens: int
    max_difference: float
    mean_divergence: float
    max_divergence: float
    top_agrees: tuple[bool, ...]
    disagreements: tuple[tuple[int, str, str, str], ...]
    warnings: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all logits are bitwise identical."""
        return self.max_difference == 0

    def __str__(self) -> str:
        agree, tokens = sum(self.top_agrees), format_count(self.num_tokens, "token")
        lines = [
            *(f"warning: {line}" for line in self.warnings),
            f"logits after {tokens}: the largest difference is {self.max_difference:.3g}",
            f"KL divergence of B from A: {self.mean_divergence:.3g} nats per token, {self.max_divergence:.3g} at most",
            f"the most likely next token is the same at {agree} of {format_count(self.num_tokens, 'position')}",
        ]
        for position, text, first, second in self.disagreements:
            lines.append(f"  {position}: after ...{text[-30:]!r} A predicts {first!r}, B {second!r}")
        return "\n".join(lines)


def diff_logits(a: Location, b: Location, prompt: str) -> LogitsReport:
    """Run both models on `prompt`, each in its stored dtype.

    Args:
        a: The first checkpoint, whose tokenizer is used.
        b: The second.
        prompt: The text.

    Returns:
        The differences.

    Raises:
        DataError: The prompt has no tokens.
        ConfigError: The prompt has more tokens than a model has positions.
        ModelError: The models cannot be compared: different vocabularies, a model that is not decoder-only, or
            non-finite logits.
    """
    tokenizer = load_tokenizer(a.tokenizer_directory)
    tokens = tokenize(tokenizer, prompt)
    for source in (a, b):
        check_vocabulary(tokens, load_config(source.config_directory))
    if not tokens:
        raise DataError(f"--logits {prompt!r} has no tokens that the model in {a} knows; give other text.")
    warnings = [line for source in (a, b) if (line := _check(source, len(tokens)))]
    first, second = _logits(a, tokens), _logits(b, tokens)
    if first.shape != second.shape:
        raise ModelError(
            f"{a} predicts {first.shape[-1]} tokens, but {b} predicts {second.shape[-1]}: logits cannot be compared."
        )

    log_a, log_b = first.log_softmax(-1), second.log_softmax(-1)
    divergence = (log_a.exp() * (log_a - log_b)).sum(-1).clamp(min=0)
    decode = tokenizer.decode
    tops = list(zip(first.argmax(-1).tolist(), second.argmax(-1).tolist(), strict=True))
    return LogitsReport(
        num_tokens=len(tokens),
        max_difference=float((first - second).abs().max()),
        mean_divergence=float(divergence.mean()),
        max_divergence=float(divergence.max()),
        top_agrees=tuple(one == two for one, two in tops),
        disagreements=tuple(
            (position, str(decode(tokens[: position + 1])), str(decode(one)), str(decode(two)))
            for position, (one, two) in enumerate(tops)
            if one != two
        ),
        warnings=tuple(warnings),
    )


def _check(source: Location, num_tokens: int) -> str | None:
    """Check that the model predicts next tokens; return a warning if the prompt is longer than its context."""
    config = load_config(source.config_directory)
    check_causal(config)
    return context_length_of(config).check(f"{source}: --logits, with {num_tokens} tokens,", num_tokens, "shorten it")


def _logits(source: Location, tokens: list[int]) -> torch.Tensor:
    """Logits [num_tokens, vocabulary] of the model at `source`, float64 on the CPU; the model is deleted afterwards."""
    # diff has already listed the tensors
    model = dispatch_model(source, load_config(source.config_directory), DispatchConfig(), log=lambda text: None)
    try:
        with torch.inference_mode(), model_run_errors(model):
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().cpu()
    finally:
        del model
        gc.collect()
    if not logits.isfinite().all():
        raise ModelError(
            f"A logit of {source} is NaN or infinite; `fsdp-shard verify {source}` checks the weights for that."
        )
    return logits
