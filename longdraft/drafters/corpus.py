"""Corpora of earlier texts for the drafter `suffix`: read and indexed once for each engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from longdraft.drafters.suffix_index import SEPARATOR, Index, TokenArray, new_index
from longdraft.errors import UsageError

_CURE = "give a UTF-8 text, a .npy file of token ids as --tokens-out writes them, or a folder of .txt and .npy files"


class Corpora:
    """The indexed corpora of one engine.

    encode      text to token ids, without special tokens
    vocab_size  of the target; ids in .npy files must be smaller
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], vocab_size: int) -> None:
        self._encode, self._vocab_size = encode, vocab_size
        self._indexed: dict[tuple[str, int], Index] = {}

    def index(self, path: str, longest: int) -> Index:
        """The index of the texts at `path`, for matches of up to `longest` tokens.

        Raises UsageError if there are none, or if a file is no UTF-8 text and no row of token ids.
        """
        if (path, longest) not in self._indexed:
            index = new_index(0, longest)
            for file in _files(Path(path)):
                index.extend(self._tokens(file))
                index.extend(np.array([SEPARATOR], np.int32))
            self._indexed[path, longest] = index
        return self._indexed[path, longest]

    def _tokens(self, file: Path) -> TokenArray:
        try:
            if file.suffix != ".npy":
                ids = np.array(self._encode(file.read_bytes().decode("utf-8-sig")), np.int32)
                return np.where(ids < self._vocab_size, ids, SEPARATOR).astype(np.int32)  # the model has no row there
            ids = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            what = "a .npy file of numbers" if file.suffix == ".npy" else "UTF-8 text"
            reason = error.strerror if isinstance(error, OSError) and error.strerror else f"it is not {what}"
            raise UsageError(f"corpus cannot read {file}: {reason}; {_CURE}") from error
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UsageError(f"corpus {file} holds {ids.dtype} of shape {list(ids.shape)}; allowed: one row of ids")
        if ids.size and not (ids.min() >= 0 and ids.max() < self._vocab_size):
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise UsageError(f"corpus {file} holds the token id {bad}; allowed: 0 to {self._vocab_size - 1}")
        return np.ascontiguousarray(ids, np.int32)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"corpus {path} does not exist; {_CURE}")
    files = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".npy") and file.is_file())
    if not files:
        raise UsageError(f"corpus {path} is a folder without .txt or .npy files; {_CURE}")
    return files
