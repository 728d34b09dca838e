"""Documents to one stream of tokens in a file, made once by one process and memory-mapped by all.

A token file is a directory `<cache>/<fingerprint>/` with `tokens.bin` (little-endian uint16 or uint32) and `meta.json`.
It is written beside its place and renamed, so it is complete or absent. The fingerprint covers the text, how it is cut
into documents, and the tokenizer; window length is no part of it, as windows are views. Knows no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.data.kinds.kind import beginning, plain_ids
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.tokenized.cache_directory import cached, write_json
from fsdp_shard.data.tokenized.worker_pool import ordered_map
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 1
_BATCH_CHARACTERS = 1 << 20  # enough documents at once for the tokenizer's threads, little enough to hold


@dataclass(frozen=True)
class TokenFile:
    """One tokenized text, on disk. `digest` is of the tokens alone: equal digests are equal streams."""

    directory: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_empty_documents: int
    digest: str

    def open(self) -> npt.NDArray[Any]:
        """The tokens [num_tokens], memory-mapped and read-only; raises DataError where this process cannot see them."""
        file = Path(self.directory) / "tokens.bin"
        try:
            return np.memmap(file, dtype=self.dtype, mode="r", shape=(self.num_tokens,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file} cannot be mapped here ({error}); every rank must see the token cache. Set data.cache_dir to a "
                f"directory that all machines share."
            ) from error


def tokenize(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    what: str,
    num_workers: int = 1,
    *,
    begins: bool = True,
) -> TokenFile:
    """The token file of `source` below `cache_dir`: the one that is there, or a new one. `what` is named in errors.

    The end-of-text token is put between documents, and the beginning-of-text token before each one when the tokenizer
    adds it by itself, unless `begins` is false, as for windows that get one each. Raises DataError when there are fewer
    than two tokens, or when the cache cannot be written.
    """
    return cached(
        directory := cache_dir / fingerprint(source, tokenizer, begins=begins),
        _read_meta,
        lambda temporary: _write(
            temporary, directory, source, tokenizer, beginning(tokenizer) if begins else [], what, num_workers
        ),
    )


def fingerprint(source: Source, tokenizer: PreTrainedTokenizerBase, *, begins: bool = True) -> str:
    """Name of the token file of this text under this tokenizer."""
    parts = [_FORMAT_VERSION, source.fingerprint(), tokenizer_state(tokenizer), *([] if begins else ["no beginnings"])]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """All that decides which tokens a text has, as JSON."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        backend.no_truncation()  # both are left over from the last call, and of no effect on the next
        backend.no_padding()
        state = xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # chat templates name them
    around = tokenizer("a")["input_ids"], tokenizer(text_target="a")["input_ids"]  # languages, of targets too
    ends = [beginning(tokenizer), tokenizer.eos_token_id, tokenizer.sep_token_id]
    return [state, *ends, special, getattr(tokenizer, "split_special_tokens", False), *around]


def _write(
    temporary: Path,
    directory: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    begin: list[int],
    what: str,
    num_workers: int,
) -> None:
    """Write tokens.bin and meta.json into `temporary`, flushed to the disk."""
    from tqdm import tqdm

    end = end_of_text(tokenizer)
    dtype = "<u2" if len(tokenizer) <= 1 << 16 else "<u4"
    num_tokens = num_documents = num_seen = 0
    digest = xxhash.xxh3_128()
    with (
        (temporary / "tokens.bin").open("wb") as out,
        tqdm(desc=f"tokenizing {what}", unit=" tokens", unit_scale=True, disable=None) as bar,
    ):
        counted = _Counted(source.documents())
        for encoded in ordered_map(partial(plain_ids, tokenizer=tokenizer), _batches(counted), num_workers):
            for ids in encoded:
                separator = [require_separator(end, what)] if num_documents else []
                piece = np.asarray([*separator, *begin, *ids], dtype=dtype)
                out.write(piece.data)
                digest.update(piece.data)
                num_tokens, num_documents = num_tokens + len(piece), num_documents + 1
                bar.update(len(piece))
        num_seen = counted.num_seen
        out.flush()
        os.fsync(out.fileno())
    if num_tokens < 2:
        raise DataError(f"{what} has {num_tokens} tokens in {num_seen} documents; there must be two to predict one.")
    digest.update(dtype.encode())
    meta = TokenFile(str(directory), dtype, num_tokens, num_documents, num_seen - num_documents, digest.hexdigest())
    write_json(temporary / "meta.json", {"format_version": _FORMAT_VERSION, **asdict(meta)})


class _Counted:
    """Passes on the documents that have text in them; `num_seen` counts the others too."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.num_seen = 0

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.num_seen += 1
            if document.strip():
                yield document


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token to put between documents; BERT has [SEP] only."""
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return None if end is None else int(end)


def require_separator(end: int | None, what: str) -> int:
    """`end`; raises DataError when the tokenizer has none."""
    if end is None:
        raise DataError(
            f"{what} has several documents, but the model's tokenizer has no end-of-text token to put between them. "
            f"Set eos_token in its tokenizer_config.json, or join the text into one document."
        )
    return end


def _read_meta(directory: Path) -> TokenFile | None:
    """What `directory` holds, or None when it is absent, of another format version, or not whole."""
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if meta.pop("format_version") != _FORMAT_VERSION:
            return None
        file = TokenFile(**{**meta, "directory": str(directory)})
        size = (directory / "tokens.bin").stat().st_size
        return file if size == file.num_tokens * np.dtype(file.dtype).itemsize else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
