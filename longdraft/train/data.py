"""From text files to sequences of token ids: read, tokenise, pack, and read in a reproducible order.

Documents are shuffled by the seed, concatenated (each with the tokenizer's own special tokens and the end-of-text id)
and cut into sequences of equal length. The order in epoch e is a function of (seed, e), so the number of sequences read
is the whole state of the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.core import lone_surrogate
from longdraft.errors import ModelError, UsageError
from longdraft.version import __version__

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
SUFFIXES = (".parquet", ".jsonl", ".txt")
HUB = "hf:"  # hf:NAME, hf:NAME:CONFIG, either with @SPLIT
BATCH_CHARACTERS = 8_000_000  # tokenised at a time; the tokenizer needs about 30 bytes per character


class Split(NamedTuple):
    """Token ids of whole documents."""

    training: list[Tokens]
    validation: list[Tokens]


def is_hub_data(name: str) -> bool:
    return name.startswith(HUB)


def check_files(files: Sequence[str]) -> None:
    """Raise UsageError unless every local file exists and has a supported suffix. Hub data is checked later."""
    for name in files:
        if is_hub_data(name):
            continue
        if not Path(name).is_file():
            raise UsageError(f"no file {name!r}; data files are {', '.join(SUFFIXES)}")
        if Path(name).suffix.lower() not in SUFFIXES:
            raise UsageError(f"the format of {name!r} is unknown; its name must end in {', '.join(SUFFIXES)}")


def read_documents(files: Sequence[str], column: str) -> Iterator[str]:
    """The non-empty texts of the files, in order. Raises UsageError with the file's name and the reason."""
    check_files(files)
    for name in files:
        if is_hub_data(name):
            yield from (text for text in _hub(name, column) if text.strip())
            continue
        path = Path(name)
        read = {".parquet": _parquet, ".jsonl": _jsonl, ".txt": _txt}[path.suffix.lower()]
        try:
            yield from (text for text in read(path, column) if text.strip())
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _txt(path: Path, column: str) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise UsageError(f"{path} line {number}: not an object with the key {column!r}; "
                                 "name another key with --text-column") from error
            if not isinstance(text, str):
                raise UsageError(f"{path} line {number}: {column!r} is a {type(text).__name__}, not a text")
            if (place := lone_surrogate(text)) is not None:  # only JSON can contain a lone surrogate
                raise UsageError(f"{path} line {number}: {column!r} has a lone surrogate at character "
                                 f"{place}; correct or remove the document")
            yield text


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"parquet files need {error.name}; pip install 'longdraft[train]'") from error
    try:
        file = parquet.ParquetFile(path)
        kinds = {field.name: field.type for field in file.schema_arrow}
        if column not in kinds or not (pyarrow.types.is_string(kinds[column])
                                       or pyarrow.types.is_large_string(kinds[column])):
            raise UsageError(f"{path} has no text column {column!r}; its columns: {', '.join(kinds)}; "
                             "name one with --text-column")
        for batch in file.iter_batches(batch_size=16, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is not a readable parquet file: {error}") from error


def _hub(name: str, column: str) -> Iterator[str]:
    """Stream the texts of a data set of the hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(f"{name} needs {error.name}; pip install datasets") from error
    what, _, split = name.removeprefix(HUB).partition("@")
    path, _, config = what.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split or "train", streaming=True)
        for row in rows:
            if not isinstance(text := row.get(column), str):
                raise UsageError(f"{name} has no text column {column!r}; its columns: {', '.join(row)}; name one with "
                                 "--text-column")
            yield text
    except UsageError:
        raise
    except Exception as error:  # the library raises errors of files, of the network and its own
        raise UsageError(f"cannot read {name}: {str(error).strip().splitlines()[0]}") from error


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelError if it has ids outside the model's vocabulary."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"cannot read {path}: {error}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise ModelError(f"{path} has ids up to {largest}, but the model's vocabulary has {vocab_size} "
                         "tokens; the tokenizer belongs to another model")
    tokenizer.no_truncation()
    return tokenizer


def tokenise(texts: Iterator[str], tokenizer: Tokenizer, end_id: int | None) -> Iterator[Tokens]:
    """Token ids of each document, with `end_id` at its end unless that is None."""
    batch: list[str] = []
    size = 0

    def flush() -> Iterator[Tokens]:
        for encoding in tokenizer.encode_batch_fast(batch):
            ids = encoding.ids
            if end_id is not None and ids and ids[-1] != end_id:
                ids = [*ids, end_id]
            yield np.array(ids, dtype=np.int32)

    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield from flush()
            batch, size = [], 0
    if batch:
        yield from flush()


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
        raise UsageError(f"the {what} data holds no text; give files with text")
    if total < sequence_length:
        raise UsageError(f"sequence_length is {sequence_length}, but the {what} data has {total} tokens; "
                         "give more data or a smaller --sequence-length")
    order = np.random.default_rng([seed, 0]).permutation(len(documents))
    laid = np.concatenate([documents[i] for i in order])
    count = total // sequence_length
    return laid[: count * sequence_length].reshape(count, sequence_length)


class Sequences:
    """An endless series of packed sequences: position p is place p % N of epoch p // N."""

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
        epoch, place = divmod(position, len(self.packed))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, 2, epoch]).permutation(len(self.packed))
            self._epoch = epoch
        return int(self._order[place])

    def fingerprint(self) -> str:
        """sha256 of shape and ids. A training can be resumed on the same data only."""
        digest = hashlib.sha256(str(self.packed.shape).encode())
        digest.update(np.ascontiguousarray(self.packed).data)
        return digest.hexdigest()


def spread(packed: Tokens, max_tokens: int) -> Tokens:
    """Evenly spaced sequences of `packed` with at most `max_tokens` tokens (0: all), but at least one."""
    wanted = len(packed) if max_tokens == 0 else max(1, min(len(packed), max_tokens // packed.shape[1]))
    return packed[np.linspace(0, len(packed) - 1, wanted).round().astype(np.int64)]


def names(files: Sequence[str]) -> list[str]:
    """File names without their folders, for provenance without paths of this machine."""
    return [name if is_hub_data(name) else Path(name).name for name in files]


def model_name(model: str) -> str:
    """A model's name for the record: of a folder its name, without the path on this machine."""
    from longdraft.model.hub import is_local

    return Path(model).resolve().name if is_local(model) else model


def versions() -> dict[str, Any]:
    """The versions of the libraries, for the record."""
    import platform
    from importlib import metadata

    found = {name: metadata.version(name) for name in ("accelerate", "torch", "transformers", "tokenizers")}
    return found | {"longdraft": __version__, "python": platform.python_version()}
