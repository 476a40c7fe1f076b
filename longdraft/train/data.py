"""From text files to sequences of token ids: read, tokenise, pack, and read in a reproducible order.

Documents are shuffled by the seed, concatenated (each with the tokenizer's own special tokens and the end-of-text id)
and cut into sequences of equal length. The order in epoch e is a function of (seed, e), so the number of sequences read
is the whole state of the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft.errors import UsageError, check
from longdraft.text.tokenizer import read_tokenizer, require_ids_in_vocabulary
from longdraft.train.data_files import Document, Tokens
from longdraft.train.settings import is_hub_data
from longdraft.version import __version__

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARACTERS = 8_000_000  # tokenised at a time; the tokenizer needs about 30 bytes per character


class Split(NamedTuple):
    """Token ids of whole documents."""

    training: list[Tokens]
    validation: list[Tokens]


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelError if it has many ids outside the model's vocabulary."""
    tokenizer, _ = read_tokenizer(folder)
    require_ids_in_vocabulary(tokenizer.get_vocab(with_added_tokens=True), vocab_size, folder)
    return tokenizer


def tokenise(documents: Iterator[Document], tokenizer: Tokenizer, end_id: int | None,
             vocab_size: int) -> Iterator[Tokens]:
    """Token ids of each document, with `end_id` at its end unless that is None. Documents of token ids come unchanged,
    each after the texts before it. UsageError for an id outside the vocabulary.

    vocab_size  of the model, which may have no row for some tokens of its tokenizer
    """
    vocabulary = min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    for batch in _batches(documents):
        if not isinstance(batch, list):
            yield _checked(batch, vocabulary)
            continue
        for encoding in tokenizer.encode_batch_fast(batch):
            ids = encoding.ids
            if end_id is not None and ids and ids[-1] != end_id:
                ids = [*ids, end_id]
            yield _checked(np.array(ids, dtype=np.int32), vocab_size)


def _checked(ids: Tokens, vocabulary: int) -> Tokens:
    extremes = (int(ids.min()), int(ids.max())) if len(ids) else ()
    bad = next((token for token in extremes if not 0 <= token < vocabulary), None)
    check(bad is None, "a token id of the data", bad, f"0 to {vocabulary - 1}, those of the model's tokenizer")
    return ids


def _batches(documents: Iterator[Document]) -> Iterator[list[str] | Tokens]:
    """Texts in lists of BATCH_CHARACTERS or a little more, and documents of token ids, in order."""
    texts: list[str] = []
    size = 0
    for document in documents:
        if isinstance(document, str):
            texts.append(document)
            size += len(document)
        if texts and (not isinstance(document, str) or size >= BATCH_CHARACTERS):
            yield texts
            texts, size = [], 0
        if not isinstance(document, str):
            yield document
    if texts:
        yield texts


def limited(documents: Iterator[Tokens], least: int, most: int, count: int) -> Iterator[Tokens]:
    """Documents of at least `least` tokens: the first `most` tokens of each (0: all), at most `count` of them (0: all).

    Nothing is read after the last one.
    """
    used = (document[:most] if most else document for document in documents if len(document) >= least)
    return islice(used, count or None)


def hold_out(documents: list[Tokens], part: float, seed: int) -> Split:
    """Hold out a part of the documents for validation; of a single document, its end."""
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - part))
        return Split([documents[0][:cut]], [documents[0][cut:]])
    order = np.random.default_rng([seed, 1]).permutation(len(documents))
    held = {int(i) for i in order[: max(1, round(part * len(documents)))]}
    return Split([d for i, d in enumerate(documents) if i not in held],
                 [d for i, d in enumerate(documents) if i in held])


def pack(documents: list[Tokens], sequence_length: int, seed: int, what: str) -> Tokens:
    """Shuffled documents as sequences [N, sequence_length] int32, without the incomplete last one."""
    total = sum(len(document) for document in documents)
    if total == 0:
        raise UsageError(f"the {what} data holds no text; give files with text, or a smaller --min-tokens")
    if total < sequence_length:
        raise UsageError(f"sequence_length is {sequence_length}, but the {what} data has {total} tokens; "
                         "give more data or a smaller --sequence-length")
    order = np.random.default_rng([seed, 0]).permutation(len(documents))
    laid = np.concatenate([documents[i] for i in order])
    count = total // sequence_length
    return laid[: count * sequence_length].reshape(count, sequence_length)


class Sequences:
    """An endless series of packed sequences: position p is number p % N of epoch p // N."""

    def __init__(self, packed: Tokens, seed: int) -> None:
        self.packed = packed
        self._seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.packed)

    def read(self, position: int, count: int) -> Tokens:
        """Sequences at positions [position, position + count): [count, sequence_length]."""
        return np.stack([self.packed[self._index(p)] for p in range(position, position + count)])

    def _index(self, position: int) -> int:
        epoch, number = divmod(position, len(self.packed))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, 2, epoch]).permutation(len(self.packed))
            self._epoch = epoch
        return int(self._order[number])

    def fingerprint(self) -> str:
        """sha256 of shape and ids. A training can be resumed on the same data only."""
        digest = hashlib.sha256(str(self.packed.shape).encode())
        digest.update(np.ascontiguousarray(self.packed).data)
        return digest.hexdigest()


def spread(packed: Tokens, max_tokens: int) -> Tokens:
    """Evenly spaced sequences of `packed` with at most `max_tokens` tokens (0: all), but at least one."""
    wanted = len(packed) if max_tokens == 0 else max(1, min(len(packed), max_tokens // packed.shape[1]))
    return packed[np.linspace(0, len(packed) - 1, wanted).round().astype(np.int64)]


def as_ids(sequences: Tokens, device: torch.device) -> torch.Tensor:
    """The sequences as int64. It is a copy: the data may be a map of a file."""
    return torch.from_numpy(sequences.astype(np.int64)).to(device)


def names(files: Sequence[str]) -> list[str]:
    """File names without their folders, for provenance without paths of this machine."""
    return [name if is_hub_data(name) else Path(name).name for name in files]


def model_name(model: str) -> str:
    """A model's name for the record: of a folder its name, without the path on this machine."""
    from longdraft.checkpoint.hub import is_local

    return Path(model).resolve().name if is_local(model) else model


def versions() -> dict[str, Any]:
    """The versions of the libraries, for the record."""
    import platform
    from importlib import metadata

    libraries = {name: metadata.version(name) for name in ("accelerate", "torch", "transformers", "tokenizers")}
    return libraries | {"longdraft": __version__, "python": platform.python_version()}
