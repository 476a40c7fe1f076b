"""The tensors of a model: of a folder with one file or with shards (safetensors or `.bin`), or of a GGUF file.

They are memory-mapped, read on use, and checked: type, shape, and that every number is finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.gguf.tensors import GgufTensors
from longdraft.checkpoint.gpt_oss import OssTensors
from longdraft.checkpoint.memory import temporary
from longdraft.checkpoint.packed_tensors import wrap
from longdraft.checkpoint.tensor_file import CPU, DTYPES, FLOATS, StoredTensors, TensorFile
from longdraft.checkpoint.tensor_source import Packed, TensorSource
from longdraft.checkpoint.torch_file import TorchFile
from longdraft.errors import ModelError
from longdraft.kernels.formats.groups import BlockRows, GroupedWeight
from longdraft.kernels.formats.int4 import Int4Weight
from longdraft.kernels.formats.int8 import Quantised
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.interface import PartOfWeight
from longdraft.kernels.weights import QuantisedWeight
from longdraft.parallel import Pick

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = "pytorch_model.bin"
ADAPTER = "adapter_config.json"  # of a LoRA adapter
TORCH_INDEX = "pytorch_model.bin.index.json"
ReadCallback = Callable[[int, int], None]  # called with (bytes read, bytes in all)


class TensorFiles(TensorSource):
    """The tensors of a model by name. They are memory-mapped and read on use.

    folder   the model's folder, or its GGUF file
    single   name of the file, where a folder has no shards
    on_read  called with (bytes read, bytes in all) after each tensor
    """

    def __init__(self, folder: Path, single: str = WEIGHTS, on_read: ReadCallback | None = None) -> None:
        self.folder = folder
        self.files = _open(folder, single)
        self._file_of: dict[str, StoredTensors] = {}
        for file in self.files:
            for name in file.entries:
                if name in self._file_of:
                    raise ModelError(f"{name} is in {self._file_of[name].path} and in {file.path}; remove one of them")
                self._file_of[name] = file
        self._on_read = on_read
        self._read: set[str] = set()
        self._mapped = ""  # the tensor whose pages may be in memory

    def names(self) -> set[str]:
        return set(self._file_of)

    @property
    def nbytes(self) -> int:
        return sum(self._size(name) for name in self._file_of)

    @property
    def has_own_numbers(self) -> bool:
        """Whether a file has quantised matrices that `exact` can keep."""
        return any(file.has_own_numbers for file in self.files)

    @property
    def is_quantised(self) -> bool:
        """Whether a file has quantised matrices, of any format."""
        return any(entry.dtype not in DTYPES for file in self.files for entry in file.entries.values())

    @contextmanager
    def second_reading(self) -> Iterator[None]:
        """See `TensorSource`. `on_read` counts from 0."""
        self._read = set()
        yield
        self._report(*self.names())  # those that the copy shares are not read again

    def read(self, name: str, pick: Pick | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """See `TensorSource`. A read-only view of the file.

        Raises ModelError for other types, and for values that are NaN or infinite. The rest of a tensor is not read.
        """
        file = self._file_of[name]
        if problem := self.wrong_type(name):
            raise ModelError(f"{file.path}: {problem}")
        whole = self._view(name, dtype)
        tensor = whole if pick is None else pick(whole)
        # A sum with a NaN or an infinity is not finite, and costs a fraction of reading the tensor. A finite tensor
        # whose sum overflows is counted as well, and passes.
        if not tensor.sum().isfinite() and (bad := int((~tensor.isfinite()).sum())):
            raise ModelError(f"{file.path}: {name} has {bad} values that are NaN or infinite: the file is damaged, or "
                             "its training failed; get it again")
        self._report(name)
        return tensor

    def _report(self, *names: str) -> None:
        """Count tensors as read."""
        self._read.update(names)
        if self._on_read:
            self._on_read(sum(map(self._size, self._read)), self.nbytes)

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers or truth values as int64. Raises ModelError for floating-point numbers."""
        tensor = self._view(name)
        if tensor.is_floating_point():
            raise ModelError(f"{self._file_of[name].path}: {name} has dtype {tensor.dtype}; allowed: whole numbers")
        return tensor.to(torch.int64, copy=True)

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        """See `TensorSource`. Needs memory for the result and the part being read only."""
        own = {self._file_of[name].float_dtype(name) for name in names}
        dtype = dtype or (own.pop() if len(own) == 1 else None) or torch.float32
        picks = picks or [None] * len(names)
        if len(names) == 1 and (only := self.read(names[0], picks[0], dtype)).dtype == dtype:
            return only
        shapes = [_picked(self.shape(name), pick) for name, pick in zip(names, picks, strict=True)]
        stacked = temporary((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
        row = 0
        for name, pick, shape in zip(names, picks, shapes, strict=True):
            stacked[row : row + shape[0]] = self.read(name, pick, dtype)
            row += shape[0]
        self._release()
        return stacked

    def exact(self, names: Sequence[str], quantize: str, device: torch.device = CPU) -> QuantisedWeight | None:
        """See `TensorSource`. Raises ModelError for scales that are NaN or infinite."""
        parts = self._exact(names, quantize, device)
        return None if parts is None else _stacked(parts)

    def exact_parts(self, names: Sequence[str], quantize: str,
                    device: torch.device) -> Sequence[PartOfWeight] | None:
        joined: list[PartOfWeight] = []
        for part in self._exact(names, quantize, device) or ():
            if isinstance(part, Quantised):
                return None
            both = _joined(joined[-1], part) if joined else None
            joined[-1:] = [both] if both else [*joined[-1:], part]
        return joined or None

    def _exact(self, names: Sequence[str], quantize: str, device: torch.device) -> list[QuantisedWeight] | None:
        parts: list[QuantisedWeight] = []
        for name in names:
            part = self._file_of[name].exact(name, quantize, device) if quantize != "none" else None
            if part is None:
                return None
            least, common = (part.least, part.common) if isinstance(part, GroupedWeight) else (None, None)
            if not all(numbers.isfinite().all() for numbers in (part.scale, least, common) if numbers is not None):
                raise self._damaged(name)
            parts.append(part)
            self._file_of[name].forget(name)  # what it holds are copies, or is small
        self._report(*names)
        return parts

    def pack_blocks(self, names: Sequence[str], quantize: str,
                    pack: Callable[[BlockRows], tuple[Packed, int | None]]) -> Packed | None:
        parts: dict[str, BlockRows] = {}
        for name in names:
            part = self._file_of[name].blocks(name, quantize)
            if part is None:
                return None
            parts[name] = part
        packed, damaged = pack(BlockRows.stacked(list(parts.values())))
        if damaged is not None:
            raise self._damaged(next(name for name, part in parts.items() if (part.addresses == damaged).any()))
        for name in names:
            self._file_of[name].forget(name)
        self._report(*names)
        return packed

    def _damaged(self, name: str) -> ModelError:
        return ModelError(f"{self._file_of[name].path}: {name} has scales that are NaN or infinite: the file is "
                          "damaged; get it again")

    def mxfp4(self, names: Sequence[str]) -> Mxfp4Weight | None:
        parts = []
        for name in names:
            part = self._file_of[name].mxfp4(name)
            if part is None or not part.is_normal:
                return None
            parts.append(part)
        self._report(*names)
        return Mxfp4Weight(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def _view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor's numbers. Releases the pages of the previous one."""
        self._release()
        self._mapped = name
        return self._file_of[name].view(name, dtype)

    def stored(self, name: str) -> tuple[str, Tensor]:
        self._release()
        self._mapped = name
        return self._file_of[name].stored(name)

    def _release(self) -> None:
        if self._mapped:
            self._file_of[self._mapped].forget(self._mapped)

    def _size(self, name: str) -> int:
        entry = self._file_of[name].entries[name]
        return entry.stop - entry.start

    def wrong_type(self, name: str) -> str:
        file = self._file_of[name]
        return "" if file.float_dtype(name) else (f"{name} has dtype {file.entries[name].dtype}; allowed: "
                                                  f"{', '.join(FLOATS)}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].entries[name].shape

    def fingerprint(self) -> str:
        digest = super().fingerprint()
        self._release()
        return digest


def _stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Weights one below another, as they are or in groups that hold all. None: there are no such groups."""
    rows = [part for part in parts if isinstance(part, Quantised)]
    if rows:
        return Quantised.stacked(rows) if len(rows) == len(parts) else None
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    if len(int4) == len(parts):
        return Int4Weight.stacked(int4)
    grouped = [GroupedWeight.of_int4(part) if isinstance(part, Int4Weight) else part for part in parts]
    known = [part for part in grouped if isinstance(part, GroupedWeight)]
    return GroupedWeight.stacked(known) if len(known) == len(parts) else None


def _joined(upper: PartOfWeight, lower: PartOfWeight) -> PartOfWeight | None:
    """Two weights of one kind one below another; None for others."""
    if isinstance(upper, Int4Weight) and isinstance(lower, Int4Weight):
        return Int4Weight.stacked([upper, lower])
    if isinstance(upper, GroupedWeight) and isinstance(lower, GroupedWeight) and upper.kind == lower.kind:
        return GroupedWeight.stacked([upper, lower])
    return None


def _picked(shape: tuple[int, ...], pick: Pick | None) -> tuple[int, ...]:
    return shape if pick is None else tuple(pick(torch.empty(shape, device="meta")).shape)


def _open(folder: Path, single: str) -> Sequence[StoredTensors]:
    if folder.is_file():
        model = open_gguf(folder)
        return [GgufTensors(model, file) for file in model.files]
    if single != WEIGHTS:
        return [TensorFile(folder / single)]
    if (folder / INDEX).exists():
        return _safetensors(folder, shard_names(folder / INDEX))
    if (folder / TORCH_INDEX).exists() and not (folder / WEIGHTS).exists():
        return [TorchFile(folder / name) for name in shard_names(folder / TORCH_INDEX)]
    if (folder / TORCH_WEIGHTS).is_file() and not (folder / WEIGHTS).exists():
        return [TorchFile(folder / TORCH_WEIGHTS)]
    return _safetensors(folder, [WEIGHTS])


def _safetensors(folder: Path, names: Sequence[str]) -> Sequence[StoredTensors]:
    files = [TensorFile(folder / name) for name in names]
    has_config = (folder / "config.json").is_file()
    config = read_json(folder / "config.json") if has_config else {}
    if config.get("model_type") == "gpt_oss":
        return [OssTensors(file, files) for file in files]
    return wrap(folder, files, config) if has_config else files


def has_weights(folder: Path) -> bool:
    """Whether a folder has the weights of a model, in any format."""
    return any((folder / name).exists() for name in (WEIGHTS, INDEX, TORCH_WEIGHTS, TORCH_INDEX))


def require_no_adapter(folder: Path) -> None:
    """Raise ModelError for a folder of a LoRA adapter, which has no weights of a model."""
    about = folder / ADAPTER
    if about.is_file() and not has_weights(folder):
        base = str(read_json(about).get("base_model_name_or_path") or "its base model")[:200]
        raise ModelError(f"{folder} has a LoRA adapter for {base}, not a model; merge the two, and give that folder: "
                         "PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(FOLDER)")


def shard_names(index: Path) -> list[str]:
    """The files that an index lists. Raises ModelError for paths, which could lead out of the folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise ModelError(f"{index} must have a weight_map from tensor names to file names")
    suffix = ".bin" if index.name == TORCH_INDEX else ".safetensors"
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(suffix):
            raise ModelError(f"{index} lists {name[:200]!r}; allowed: names of {suffix} files in its folder")
    return names


def dump_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
