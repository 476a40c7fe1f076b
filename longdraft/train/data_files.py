"""Documents in files, read one after the other: texts, or token ids that were made before.

    for document in read_documents(["books.parquet", "hf:NAME:CONFIG@SPLIT", "saved-data-set/"], "text"): ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import UsageError, missing_extra
from longdraft.system.files import lone_surrogate
from longdraft.train.settings import HUB, is_hub_data

Tokens = NDArray[np.int32]
Document = str | Tokens
SUFFIXES = (".parquet", ".jsonl", ".txt")
DATASET_FILE, DATASETS_FILE = "state.json", "dataset_dict.json"  # in a folder that the library `datasets` saved


def check_files(files: Sequence[str]) -> None:
    """Raise UsageError unless every local file exists and has a supported suffix. Hub data is checked later."""
    for name in files:
        if is_hub_data(name):
            continue
        if (Path(name) / DATASET_FILE).is_file() or (Path(name) / DATASETS_FILE).is_file():
            continue
        if not Path(name).is_file():
            raise UsageError(f"no file {name!r}; data files are {', '.join(SUFFIXES)}, or folders that the library "
                             "datasets saved")
        if Path(name).suffix.lower() not in SUFFIXES:
            raise UsageError(f"the format of {name!r} is unknown; its name must end in {', '.join(SUFFIXES)}")


def read_documents(files: Sequence[str], column: str) -> Iterator[Document]:
    """The documents of the files that are not empty, in order, read when they are asked for.

    Raises UsageError with the file's name and the reason.
    """
    check_files(files)
    for name in files:
        if is_hub_data(name):
            yield from filter(_has_content, _hub(name, column))
            continue
        path = Path(name)
        read = _READERS[path.suffix.lower()] if path.is_file() else _saved_dataset
        try:
            yield from filter(_has_content, read(path, column))
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _has_content(document: Document) -> bool:
    return bool(document.strip() if isinstance(document, str) else len(document))


def _ids(values: Any, where: str, column: str) -> Tokens:
    """Token ids from a row. UsageError unless they are whole numbers that int32 holds."""
    try:
        ids = np.asarray(values)
        if ids.ndim == 1 and (not len(ids) or (ids.dtype.kind in "iu" and int(ids.max()) < 1 << 31)):
            return ids.astype(np.int32)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{where}: {column!r} is not a list of token ids; name a column of texts or of token ids with "
                     "--text-column")


def _txt(path: Path, column: str) -> Iterator[str]:
    yield path.read_text(encoding="utf-8-sig")


def _jsonl(path: Path, column: str) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise UsageError(f"{path} line {number}: not an object with the key {column!r}; "
                                 "name another key with --text-column") from error
            if isinstance(text, list):
                yield _ids(text, f"{path} line {number}", column)
                continue
            if not isinstance(text, str):
                raise UsageError(f"{path} line {number}: {column!r} is a {type(text).__name__}, not a text")
            if (index := lone_surrogate(text)) is not None:  # only JSON can contain a lone surrogate
                raise UsageError(f"{path} line {number}: {column!r} has a lone surrogate at character "
                                 f"{index}; correct or remove the document")
            yield text


def _parquet(path: Path, column: str) -> Iterator[Document]:
    pyarrow = _pyarrow("parquet files")
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _require_column(path, file.schema_arrow, column)
        yield from _of_batches(path, file.iter_batches(batch_size=16, columns=[column]), column)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is not a readable parquet file: {error}") from error


def _saved_dataset(path: Path, column: str) -> Iterator[Document]:
    """A folder that `Dataset.save_to_disk` wrote; of a folder with several splits, the split `train`."""
    pyarrow = _pyarrow("saved data sets")
    if (path / DATASETS_FILE).is_file():
        splits = json.loads((path / DATASETS_FILE).read_text(encoding="utf-8")).get("splits", [])
        if "train" not in splits:
            raise UsageError(f"{path} has no split 'train'; give the folder of one of its splits: {', '.join(splits)}")
        path = path / "train"
    try:
        state = json.loads((path / DATASET_FILE).read_text(encoding="utf-8"))
        names = [each["filename"] for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path / DATASET_FILE} is not that of a saved data set") from error
    for name in names:
        file = path / Path(name).name
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                _require_column(file, stream.schema, column)
                yield from _of_batches(file, (batch.select([column]) for batch in stream), column)
        except pyarrow.ArrowException as error:
            raise UsageError(f"{file} is not a readable Arrow file: {error}") from error


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra(what, str(error.name), "train", verb="need") from error
    return pyarrow


def _require_column(path: Path, schema: Any, column: str) -> None:
    """Raise UsageError unless the column holds texts or lists."""
    from pyarrow import types

    kinds = {field.name: field.type for field in schema}
    kinds_read = (types.is_string, types.is_large_string, types.is_list, types.is_large_list, types.is_fixed_size_list)
    if column not in kinds or not any(is_kind(kinds[column]) for is_kind in kinds_read):
        raise UsageError(f"{path} has no text column {column!r}; its columns: {', '.join(kinds)}; "
                         "name one with --text-column")


def _of_batches(path: Path, batches: Iterator[Any], column: str) -> Iterator[Document]:
    for batch in batches:
        for value in batch.column(0).to_pylist():
            if value is not None:
                yield value if isinstance(value, str) else _ids(value, str(path), column)


def _hub(name: str, column: str) -> Iterator[Document]:
    """Stream the documents of a data set of the hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(f"{name} needs {error.name}; pip install datasets") from error
    what, _, split = name.removeprefix(HUB).partition("@")
    path, _, config = what.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split or "train", streaming=True)
        for row in rows:
            if isinstance(text := row.get(column), list):
                yield _ids(text, name, column)
                continue
            if not isinstance(text, str):
                raise UsageError(f"{name} has no text column {column!r}; its columns: {', '.join(row)}; name one with "
                                 "--text-column")
            yield text
    except UsageError:
        raise
    except Exception as error:  # the library raises errors of files, of the network and its own
        raise UsageError(f"cannot read {name}: {str(error).strip().splitlines()[0]}") from error


_READERS = {".parquet": _parquet, ".jsonl": _jsonl, ".txt": _txt}
