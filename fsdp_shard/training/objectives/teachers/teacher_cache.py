"""The most likely tokens of a teacher for the samples of a source, on disk: computed in parts, mapped in training.

A directory contains four arrays in numpy's format; holes in them take no space:

- `starts.npy`, int64 [num_samples + 1]: where the predictions of each sample begin;
- `log_probs.npy`, float32 [num_predictions, k], and `tokens.npy`, int32 [num_predictions, k]: as in `Targets`;
- `done.npy`, bool [num_samples]: which samples have values. It is replaced once these values are on the disk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_shard.data import Ints, SourceDataset, cache_errors
from fsdp_shard.errors import DataError
from fsdp_shard.utils import atomic_directory, write_atomically

LOG_PROBS, TOKENS = "log_probs", "tokens"
_STARTS, _DONE = "starts", "done"
_DTYPES = {LOG_PROBS: np.dtype(np.float32), TOKENS: np.dtype(np.int32)}


@dataclass(frozen=True)
class TeacherCache:
    """The values of the samples of one source.

    Attributes:
        directory: Their directory.
        k: Tokens of each prediction.
    """

    directory: Path
    k: int

    def create(self, source: SourceDataset) -> None:
        """Create the directory, without values, unless it exists.

        Raises:
            DataError: The directory cannot be written.
        """
        if self.directory.exists():
            return
        counts = [source.batch([index]).num_predictions for index in range(len(source))]
        with cache_errors(self.directory.parent), atomic_directory(self.directory) as new:  # another run may be faster
            starts = np.cumsum([0, *counts], dtype=np.int64)
            np.save(new / f"{_STARTS}.npy", starts)
            np.save(new / f"{_DONE}.npy", np.zeros(len(source), bool))
            for name, dtype in _DTYPES.items():
                shape = (max(1, int(starts[-1])), self.k)
                np.lib.format.open_memmap(new / f"{name}.npy", mode="w+", dtype=dtype, shape=shape).flush()

    def starts(self, num_samples: int) -> Ints:
        """Return where the predictions of each sample begin, int64 [num_samples + 1]."""
        found: Ints = self._array(_STARTS, (num_samples + 1,), np.dtype(np.int64))
        if found[0] or bool((np.diff(found) < 0).any()):
            file = self.directory / f"{_STARTS}.npy"
            raise DataError(f"{file} is damaged: it does not ascend from 0. Delete {self.directory}.")
        return found

    def done(self, num_samples: int) -> npt.NDArray[np.bool_]:
        """Return which samples have values, [num_samples]."""
        return np.array(self._array(_DONE, (num_samples,), np.dtype(bool)))

    def values(self, num_predictions: int) -> dict[str, npt.NDArray[Any]]:
        """Map the values of all predictions, by name, [num_predictions, k]."""
        shape = (max(1, num_predictions), self.k)
        return {name: self._array(name, shape, dtype) for name, dtype in _DTYPES.items()}

    def mark(self, done: npt.NDArray[np.bool_]) -> None:
        """Record which samples have values that are already on the disk."""
        content = io.BytesIO()
        np.save(content, done)
        with cache_errors(self.directory.parent):
            write_atomically(self.directory / f"{_DONE}.npy", content.getvalue(), sync=True)

    @contextmanager
    def writer(self, num_predictions: int) -> Iterator[CacheWriter]:
        """Open the values to write some of them. Several processes may do so, for different values."""
        offsets = {name: int(getattr(array, "offset", 0)) for name, array in self.values(num_predictions).items()}
        with cache_errors(self.directory.parent):
            files = {name: os.open(self.directory / f"{name}.npy", os.O_RDWR) for name in offsets}
            try:
                yield CacheWriter(files, offsets, self.k)
            finally:
                for file in files.values():
                    os.close(file)

    def _array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        file = self.directory / f"{name}.npy"
        try:
            found: npt.NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{file} is damaged ({error}). Delete {self.directory}, so that it is made again."
            ) from error
        if found.shape != shape or found.dtype != dtype:
            raise DataError(
                f"{file} is damaged: it has {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}. Delete "
                f"{self.directory}, so that it is made again."
            )
        return found


@dataclass(frozen=True)
class CacheWriter:
    """Writes values in place, not through mapped memory: machines that share a disk would overwrite each other's pages.

    Attributes:
        files: Open files by the names of the values.
        offsets: The byte offset of the first value in each file.
        k: Tokens of each prediction.
    """

    files: dict[str, int]
    offsets: dict[str, int]
    k: int

    def write(self, first: int, values: dict[str, npt.NDArray[Any]]) -> None:
        """Write values by name, each [num, k], from prediction `first` on."""
        for name, array in values.items():
            dtype = _DTYPES[name]
            content = memoryview(np.asarray(array, dtype).tobytes())
            at = self.offsets[name] + first * self.k * dtype.itemsize
            while content:
                written = os.pwrite(self.files[name], content, at)
                content, at = content[written:], at + written

    def sync(self) -> None:
        """Wait until all written values are on the disk."""
        for file in self.files.values():
            os.fsync(file)
