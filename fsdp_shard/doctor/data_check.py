"""Checks how a run uses its data: how often samples are trained, and which are cut, dropped, or also held out."""

from collections.abc import Iterator

from fsdp_shard import models
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import RowLosses, row_losses
from fsdp_shard.doctor.findings import Finding, noted, ok, skipped, warning
from fsdp_shard.doctor.run_checks import DataFunction, PreparedData, missing_settings, model_config
from fsdp_shard.utils import format_count

_MANY_TRUNCATED, _MANY_DROPPED = 0.25, 0.1
_NUM_LOOKED_AT = 256  # samples to compare with the vocabulary


def check_data(config: FinetuneConfig, get_samples: DataFunction) -> Iterator[Finding]:
    """Prepare the data, and find how often each sample would be trained, and which never would be.

    Args:
        config: Settings of the run.
        get_samples: Returns the data, or None without a model or data.
    """
    prepared = get_samples()
    if prepared is None:
        yield skipped(missing_settings(config))
        return
    samples = prepared.samples
    yield from map(noted, samples.notes)
    for losses in row_losses(config.data, prepared.tokenized, prepared.task):
        yield from _lost_rows(losses, config.data.window_length)
    yield from _vocabulary(config, prepared)
    num_samples, batch = samples.train.num_samples, config.train.global_batch_size
    num_steps = config.train.for_data(num_samples).num_steps
    needed = num_steps * batch
    text = f"{format_count(num_steps, 'step')} with {format_count(needed, 'sample')} of"
    if num_samples is None:
        yield ok(f"{text} the stream")
        return
    if num_samples < batch:
        yield warning(
            f"each step would train some of {num_samples:,} samples twice, as train.global_batch_size={batch} is more; "
            f"give more data, or a smaller batch."
        )
    yield ok(f"{text} {num_samples:,}: {format_count(needed / num_samples, 'epoch')}")


def _lost_rows(losses: RowLosses, length: int) -> Iterator[Finding]:
    where, total = losses.where, losses.num_trained + losses.num_dropped
    if losses.num_dropped > _MANY_DROPPED * total:
        larger = "set a larger data.sequence_length, or " if losses.num_beyond else ""
        if losses.skipped:
            trained = format_count(losses.num_trained, losses.what)
            dropped = f"left out: {', '.join(losses.skipped)}, which leaves {trained}"
        else:
            within = f" in the first {length} tokens" if losses.num_beyond else ""
            rows = format_count(total, losses.what)
            dropped = f"{losses.num_dropped:,} of {rows} are dropped with nothing to learn{within}"
        yield warning(f"{where}: {dropped}; {larger}look at the rows.")
    if losses.num_truncated > _MANY_TRUNCATED * losses.num_trained:
        yield warning(
            f"{where}: {losses.num_truncated:,} of {format_count(losses.num_trained, losses.what)} are cut to {length} "
            f"tokens, so that their ends are never trained; set a larger data.sequence_length."
        )


def _vocabulary(config: FinetuneConfig, prepared: PreparedData) -> Iterator[Finding]:
    """Find tokens without an embedding: the tokenizer belongs to another model, or was extended without the model."""
    known = model_config(config)
    train = prepared.samples.train
    if train.num_samples is not None:
        batch = train.batch(range(min(_NUM_LOOKED_AT, train.num_samples)))
        models.check_vocabulary(batch.inputs["input_ids"], known)
    num_tokens, num_embeddings = len(prepared.tokenizer), getattr(known.get_text_config(), "vocab_size", None)
    if isinstance(num_embeddings, int) and num_tokens > num_embeddings:
        yield warning(
            f"the tokenizer has {num_tokens:,} tokens, and {models.config_file(known)} a vocabulary of "
            f"{num_embeddings:,}: a text with one of the others would end the run. Copy the tokenizer files of that "
            f"model."
        )
