"""Documents as one stream of tokens in a file, written once by one process and memory-mapped by all.

A token file is a directory `<cache>/<fingerprint>/` with `tokens.bin` (little-endian uint16 or uint32) and `meta.json`.
The fingerprint covers the text, how it is cut into documents, and the tokenizer, but not the length of windows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.data.kinds.kind import Tokenizer, beginning, plain_ids
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.tokenized import cache_directory as cache
from fsdp_shard.data.tokenized.worker_pool import ordered_map
from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_count

_FORMAT_VERSION = 1
_BATCH_CHARACTERS = 1 << 20  # enough documents for the tokenizer's threads, few enough for the memory


@dataclass(frozen=True)
class TokenFile:
    """One tokenized text on disk. `digest` is of the tokens alone: equal digests are equal streams."""

    directory: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_empty_documents: int
    digest: str

    def open(self) -> npt.NDArray[Any]:
        """Memory-map the tokens [num_tokens], read-only; raise DataError if this process cannot see them."""
        return cache.map_array(self.directory, "tokens", self.dtype, self.num_tokens)

    def sizes(self) -> dict[str, int]:
        """Return the size of each array in bytes."""
        return {"tokens": self.num_tokens * np.dtype(self.dtype).itemsize}


def tokenize(
    source: Source, tokenizer: Tokenizer, cache_dir: Path, num_workers: int = 1, *, begins: bool = True
) -> TokenFile:
    """Tokenize the documents of a source, unless that is in the cache.

    The end-of-text token is put between documents, and the beginning-of-text token before each one if the tokenizer
    adds that to a text.

    Args:
        source: The documents.
        tokenizer: The tokenizer.
        cache_dir: Directory of the cache.
        num_workers: Processes that tokenize.
        begins: Whether documents may begin with the beginning-of-text token; false if every window gets one.

    Raises:
        DataError: There are fewer than two tokens, or the cache cannot be written.
    """
    begin = beginning(tokenizer) if begins else []
    return cache.cached(
        cache_dir / fingerprint(source, tokenizer, begins=begins),
        lambda directory: cache.read_meta(directory, _FORMAT_VERSION, TokenFile, TokenFile.sizes),
        lambda temporary: _write(temporary, source, tokenizer, begin, num_workers),
    )


def fingerprint(source: Source, tokenizer: Tokenizer, *, begins: bool = True) -> str:
    """Return the name of the token file of this text under this tokenizer."""
    no_beginnings = [] if begins else ["no beginnings"]
    return cache.cache_key([_FORMAT_VERSION, source.fingerprint(), tokenizer_state(tokenizer), *no_beginnings])


def tokenizer_state(tokenizer: Tokenizer) -> list[Any]:
    """Return, as JSON, everything about the tokenizer that decides about the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        backend.no_truncation()  # state of the last call, without effect on the next
        backend.no_padding()
        state = xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # chat templates name them
    around = tokenizer("a")["input_ids"], tokenizer(text_target="a")["input_ids"]  # languages, of targets too
    ends = [beginning(tokenizer), tokenizer.eos_token_id, tokenizer.sep_token_id]
    return [state, *ends, special, getattr(tokenizer, "split_special_tokens", False), *around]


def _write(temporary: Path, source: Source, tokenizer: Tokenizer, begin: list[int], num_workers: int) -> None:
    """Write tokens.bin and meta.json into `temporary`, flushed to the disk."""
    from tqdm import tqdm

    end = end_of_text(tokenizer)
    dtype = "<u2" if len(tokenizer) <= 1 << 16 else "<u4"
    num_tokens = num_documents = 0
    digest = xxhash.xxh3_128()
    with (
        (temporary / "tokens.bin").open("wb") as out,
        tqdm(desc=f"tokenizing {source.name}", unit=" tokens", unit_scale=True, disable=None) as bar,
    ):
        counted = _Counted(source.documents())
        batches = cache.batched(counted, len, _BATCH_CHARACTERS)
        for encoded in ordered_map(partial(plain_ids, tokenizer=tokenizer), batches, num_workers):
            for ids in encoded:
                separator = [require_separator(end, source.name)] if num_documents else []
                piece = np.asarray([*separator, *begin, *ids], dtype=dtype)
                out.write(piece.data)
                digest.update(piece.data)
                num_tokens, num_documents = num_tokens + len(piece), num_documents + 1
                bar.update(len(piece))
        cache.flush(out)
    if num_tokens < 2:
        raise DataError(
            f"{source.name} has {format_count(num_tokens, 'token')} in {format_count(counted.num_seen, 'document')}; "
            "at least two are needed."
        )
    digest.update(dtype.encode())
    num_empty = counted.num_seen - num_documents
    meta = TokenFile(str(temporary), dtype, num_tokens, num_documents, num_empty, digest.hexdigest())
    cache.write_meta(temporary, _FORMAT_VERSION, asdict(meta))


class _Counted:
    """The documents with text in them; `num_seen` counts the others too."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.num_seen = 0

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.num_seen += 1
            if document.strip():
                yield document


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the token between documents: end-of-text or, as in BERT, [SEP]; None without either."""
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return None if end is None else int(end)


def require_separator(end: int | None, what: str) -> int:
    """Return `end`; raise DataError if the tokenizer has none. `what` names the text."""
    if end is None:
        raise DataError(
            f"{what} has several documents, but the model's tokenizer has no end-of-text token to put between them. "
            f"Set eos_token in its tokenizer_config.json, or join the text into one document."
        )
    return end
