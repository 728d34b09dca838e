"""From the settings of `data.*` to the stream of samples, for `data.streaming=true`; in every process alike."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import xxhash

from fsdp_shard.data.config import DataConfig, is_stream, mixture_of, sources_of
from fsdp_shard.data.kinds.kind import beginning, ends_in_special
from fsdp_shard.data.kinds.registry import kind_of
from fsdp_shard.data.samples.factory import Shape
from fsdp_shard.data.samples.mixture import seed_of
from fsdp_shard.data.samples.mixture_schedule import whole_shares
from fsdp_shard.data.sources.row_stream import open_rows
from fsdp_shard.data.streaming.dataset import StreamDataset, Streamed
from fsdp_shard.data.streaming.samples import Maker, RowMaker, TextMaker
from fsdp_shard.data.streaming.streaming_mixture import StreamMixture
from fsdp_shard.data.task import MASKED_LM, SpecialTokens, Task
from fsdp_shard.data.tokenized.token_cache import end_of_text, require_separator, tokenizer_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 2


def open_streams(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, task: Task | None = None, seed: int = 0
) -> tuple[Streamed, list[str]]:
    """The samples of `data.path` or `data.mixture` from their beginning, and what they are, for people.

    Raises DataError.
    """
    if not config.mixture:
        stream, how = open_stream(config, tokenizer, task, seed)
        return stream, [f"train: {how}"]
    shares = whole_shares({name: source.weight for name, source in mixture_of(config).items()})
    streams, notes = {}, []
    for name, source in sources_of(config).items():
        streams[name], how = open_stream(source, tokenizer, task, seed_of(seed, name))
        notes.append(f"train, {name} ({shares[name]} of {sum(shares.values())} samples): {how}")
    return StreamMixture(streams, shares, seed), notes


def open_stream(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, task: Task | None = None, seed: int = 0
) -> tuple[StreamDataset, str]:
    """The samples of one source from their beginning, and what they are, for people. Raises DataError."""
    task = task or Task()
    special = SpecialTokens.of(tokenizer) if task.name == MASKED_LM else None
    shape, rows = Shape(config, task, special, seed), open_rows(config, seed)
    how = f"{config.where}.path={config.path} is streamed"
    how += f", each {config.shuffle_buffer} rows shuffled" if config.shuffle_buffer > 1 else ", its rows in order"
    maker = _text(shape, tokenizer) if is_stream(config, task.name) else _rows(shape, tokenizer)
    kept = (config.sequence_length, config.packing, config.shuffle_buffer, config.target_length, config.mask_fraction)
    about = [_FORMAT_VERSION, kept, task.name, rows.identity(), tokenizer_state(tokenizer)]
    about += [getattr(tokenizer, "chat_template", None), kind_of(config, task.name).fingerprint()]
    identity = f"stream:{xxhash.xxh3_128_hexdigest(json.dumps(about, sort_keys=True).encode())}"
    return StreamDataset(rows, maker, config.shuffle_buffer, seed, identity), how


def _text(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> Maker:
    def seed_at(first: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{shape.seed} {first}".encode())

    return TextMaker(
        column=shape.config.text_column,
        sequence_length=shape.config.sequence_length,
        room=shape.room,
        overlap=int(shape.special is None),  # the last token of a window's labels is the first of the next one's
        windows=lambda tokens, first: shape.windows(tokens, "", seed_at(first)),
        tokenizer=tokenizer,
        begin=[] if shape.special is not None else beginning(tokenizer),  # each window has those already
        end=require_separator(end_of_text(tokenizer), f"{shape.config.where}.path={shape.config.path}"),
    )


def _rows(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> Maker:
    kind = kind_of(shape.config, shape.task.name)
    kind.check_tokenizer(tokenizer)
    return RowMaker(
        kind=kind,
        sequence_length=shape.config.sequence_length,
        packing=shape.config.packing,
        cut=shape.cut,
        samples=shape.samples,
        tokenizer=tokenizer,
        keeps_last=ends_in_special(tokenizer),
    )
