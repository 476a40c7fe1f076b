"""Weights from a Hugging Face folder, in one safetensors file or in shards, packed for the kernels.

A tensor that is missing, unexpected or misshapen is an error. `load_transformer` is the entry point.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.model import rope
from longdraft.model.config import ModelConfig, read_json
from longdraft.model.packed_file import PackedFile
from longdraft.model.sharding import shard_config
from longdraft.model.tensor_file import FLOATS, TensorFile
from longdraft.model.transformer import ModelWeights, Transformer
from longdraft.parallel import ColumnParallel, Pick, RowParallel, Shard, shard_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZE = ("none", "int8", "int4")
QUANTIZE_CHOICES = "none, int8 or int4"
HEADS_PREFIX = "model.medusa_layers."  # TokenSwift's heads inside a whole-model checkpoint

ReadCallback = Callable[[int, int], None]  # called with (bytes read, bytes in all)


class TensorFiles:
    """The tensors of a folder by name. They are memory-mapped and read on use.

    single   name of the file, where the folder has no shards
    on_read  called with (bytes read, bytes in all) after each tensor
    """

    sha256: str | None = None  # set by `fingerprint.weights_sha256`

    def __init__(self, folder: Path, single: str = WEIGHTS, on_read: ReadCallback | None = None) -> None:
        self.folder = folder
        self.files = [TensorFile(path) for path in _weight_files(folder, single)]
        self._file_of: dict[str, TensorFile] = {}
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

    @contextmanager
    def second_reading(self) -> Iterator[None]:
        """A context in which the tensors are read again, for a quantised copy: `on_read` counts from 0."""
        self._read = set()
        yield
        self._report(self.nbytes)

    def read(self, name: str, pick: Pick | None = None) -> Tensor:
        """A floating-point tensor, or the part that `pick` selects: a read-only view of the file, for immediate use.

        Raises ModelError for other types, and for values that are NaN or infinite. The rest of a tensor is not read.
        """
        file = self._file_of[name]
        if problem := self._wrong_type(name):
            raise ModelError(f"{file.path}: {problem}")
        tensor = self._view(name) if pick is None else pick(self._view(name))
        # A sum with a NaN or an infinity is not finite, and costs a fraction of reading the tensor. A finite tensor
        # whose sum overflows is counted as well, and passes.
        if not tensor.sum().isfinite() and (bad := int((~tensor.isfinite()).sum())):
            raise ModelError(f"{file.path}: {name} has {bad} values that are NaN or infinite: the file is damaged, or "
                             "its training failed; get it again")
        self._read.add(name)
        self._report(sum(map(self._size, self._read)))
        return tensor

    def _report(self, done: int) -> None:
        if self._on_read:
            self._on_read(done, self.nbytes)

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers or truth values as int64. Raises ModelError for floating-point numbers."""
        tensor = self._view(name)
        if tensor.is_floating_point():
            raise ModelError(f"{self._file_of[name].path}: {name} has dtype {tensor.dtype}; allowed: whole numbers")
        return tensor.to(torch.int64, copy=True)

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        """Tensors, or the parts that `picks` select, concatenated along their rows in one dtype.

        Needs memory for the result and the part being read only. dtype None: that of the first tensor.
        """
        own = FLOATS[self._file_of[names[0]].entries[names[0]].dtype]
        dtype = dtype or own
        if len(names) == 1 and own == dtype:
            return self.read(names[0], *picks)
        picks = picks or [None] * len(names)
        shapes = [_picked(self.shape(name), pick) for name, pick in zip(names, picks, strict=True)]
        stacked = _temporary((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
        row = 0
        for name, pick, shape in zip(names, picks, shapes, strict=True):
            stacked[row : row + shape[0]] = self.read(name, pick)
            row += shape[0]
        self._release()
        return stacked

    def _view(self, name: str) -> Tensor:
        """A tensor as it is stored. Releases the pages of the previous one."""
        self._release()
        self._mapped = name
        return self._file_of[name].view(name)

    def _release(self) -> None:
        if self._mapped:
            self._file_of[self._mapped].forget(self._mapped)

    def _size(self, name: str) -> int:
        entry = self._file_of[name].entries[name]
        return entry.stop - entry.start

    def _wrong_type(self, name: str) -> str:
        dtype = self._file_of[name].entries[name].dtype
        return "" if dtype in FLOATS else f"{name} has dtype {dtype}; allowed: {', '.join(FLOATS)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].entries[name].shape

    def check(self, expected: Mapping[str, tuple[int, ...]], present: Set[str], what: str) -> None:
        """Raise ModelError unless the tensors `present` are those of `expected`, in name and shape.

        what  the source of `expected`, for the message, which lists up to eight differences
        """
        both = sorted(expected.keys() & present)
        problems = [f"missing {name}" for name in sorted(expected.keys() - present)]
        problems += [f"unexpected {name}" for name in sorted(present - expected.keys())]
        problems += [f"{name} has shape {list(self.shape(name))}, not {list(expected[name])}"
                     for name in both if self.shape(name) != expected[name]]
        problems += [problem for name in both if (problem := self._wrong_type(name))]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ModelError(f"{self.folder} does not match {what}: {shown}")

    def fingerprint(self) -> str:
        """SHA-256 over name, shape, dtype and bytes of every tensor, except those of heads."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            if not name.startswith(HEADS_PREFIX):
                tensor = self._view(name)
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._release()
        return digest.hexdigest()


def _picked(shape: tuple[int, ...], pick: Pick | None) -> tuple[int, ...]:
    return shape if pick is None else tuple(pick(torch.empty(shape, device="meta")).shape)


def _temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in its own memory mapping, which the system gets back as soon as the tensor is unused.

    The allocator would place temporaries between the packed weights. The holes they leave are too small for later
    weights, which costs 1.25 times the memory for a model of 80 MB.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=dtype, count=math.prod(shape)).view(shape)


def _weight_files(folder: Path, single: str) -> list[Path]:
    index = folder / INDEX
    names = shard_names(index) if single == WEIGHTS and index.exists() else [single]
    return [folder / name for name in names]


def shard_names(index: Path) -> list[str]:
    """The files that an index lists. Raises ModelError for paths, which could lead out of the folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise ModelError(f"{index} must have a weight_map from tensor names to file names")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} lists {name[:200]!r}; allowed: names of .safetensors files in its folder")
    return names


class _StackedLinear(NamedTuple):
    """One of our matrices: tensors of the file, concatenated along their rows.

    parts            name of each tensor, and the lengths of the segments that its rows consist of
    is_row_parallel  ranks split the columns, and add up their results; otherwise they split the rows
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    columns: int
    has_bias: bool
    is_row_parallel: bool = False

    def picks(self, shard: Shard) -> list[Pick | None]:
        return [shard.columns() if self.is_row_parallel else shard.rows(segments) for _, segments in self.parts]


def _linears(config: ModelConfig) -> dict[str, _StackedLinear]:
    """The matrices of a layer, by their names in LayerWeights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("self_attn.q_proj", (q,)), ("self_attn.k_proj", (kv,)), ("self_attn.v_proj", (kv,)))
    gate_up: tuple[tuple[str, tuple[int, ...]], ...] = (("mlp.gate_proj", (inner,)), ("mlp.up_proj", (inner,)))
    if config.is_fused:
        qkv, gate_up = (("self_attn.qkv_proj", (q, kv, kv)),), (("mlp.gate_up_proj", (inner, inner)),)
    return {
        "qkv": _StackedLinear(qkv, hidden, config.qkv_bias),
        "out": _StackedLinear((("self_attn.o_proj", (hidden,)),), q, config.out_bias, is_row_parallel=True),
        "gate_up": _StackedLinear(gate_up, hidden, config.mlp_bias),
        "down": _StackedLinear((("mlp.down_proj", (hidden,)),), inner, config.mlp_bias, is_row_parallel=True),
    }


def _norms(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """The norms of a layer, by their names in LayerWeights: name in the file, and width."""
    first, second = "input_layernorm", "post_attention_layernorm"
    if config.post_norm:
        first, second = "post_attention_layernorm", "post_feedforward_layernorm"
    norms = {"attention_norm": (first, config.hidden_size), "mlp_norm": (second, config.hidden_size)}
    if config.head_norms != "none":
        heads = (config.num_heads, config.num_kv_heads) if config.head_norms == "all" else (1, 1)
        for name, count in zip(("q_norm", "k_norm"), heads, strict=True):
            norms[name] = (f"self_attn.{name}", count * config.head_dim)
    return norms


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a checkpoint of this configuration, by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for name, width in _norms(config).values():
            shapes[f"{layer}{name}.weight"] = (width,)
        for stacked in _linears(config).values():
            for name, segments in stacked.parts:
                shapes[f"{layer}{name}.weight"] = (sum(segments), stacked.columns)
                if stacked.has_bias:
                    shapes[f"{layer}{name}.bias"] = (sum(segments),)
    return shapes


def _rotated_order(config: ModelConfig) -> Tensor | None:
    """An order of qkv's rows in which the dimensions of each rotated pair are half a head apart, as the kernels expect.

    If RoPE rotates only the first `dims` dimensions of a head (a with b), the other ones are split in halves:

        [ a | b | c | d ]  ->  [ a | c | b | d ]

    Queries and keys have the same order, so their products do not change. None: the file's order is right.
    """
    head_dim, dims = config.head_dim, config.rope.dims
    if dims == head_dim:
        return None
    a, b, c, d = torch.split(torch.arange(head_dim), [dims // 2, dims // 2, *[(head_dim - dims) // 2] * 2])
    head = torch.cat([a, c, b, d])
    rotated = config.num_heads + config.num_kv_heads
    starts = torch.arange(rotated)[:, None] * head_dim
    values = torch.arange(rotated * head_dim, (rotated + config.num_kv_heads) * head_dim)
    return torch.cat([(starts + head).flatten(), values])


def load_transformer(files: TensorFiles, config: ModelConfig, kernels: Kernels, quantize: str = "none",
                     packed: PackedFile | None = None) -> Transformer:
    """The transformer of a folder. Raises ModelError that lists missing, unexpected and misshapen tensors.

    kernels   kernels of a rank load this rank's share of each weight only
    quantize  none | int8 | int4: each matrix is quantised while it is packed. int4 leaves the embedding table and the
              head in int8
    packed    a file of the quantised matrices, which are read from it, or written to it for the next time
    """
    _check(files, config)
    return _Loader(files, config, kernels, quantize, packed).transformer()


def load_draft_copy(files: TensorFiles, target: Transformer, quantize: str,
                    packed: PackedFile | None = None) -> Transformer:
    """A copy of `target` with quantised matrices, read from its files again, for drafts that the target verifies.

    quantize  int8 | int4, for the layers; the head is int8 with both
    packed    as for `load_transformer`

    The copy shares the target's embedding table. Rows of its KV cache have the target's layout. Raises ModelError if
    the target's weights are divided among ranks.
    """
    return _Loader(files, target.whole, target.kernels, quantize, packed).transformer(target.weights.embedding)


class _Loader:
    """Reads and packs the matrices of a checkpoint that `_check` has accepted."""

    def __init__(self, files: TensorFiles, config: ModelConfig, kernels: Kernels, quantize: str,
                 packed: PackedFile | None) -> None:
        self._packed = packed
        self._files, self._whole, self._kernels, self._quantize = files, config, kernels, quantize
        self._shard = shard_of(kernels)
        self._config = shard_config(config, self._shard, quantize)
        self._order = _rotated_order(self._config)
        self._dtype = kernels.dtype if quantize == "none" else None  # quantised from the file's own precision

    def transformer(self, embedding: Linear | None = None) -> Transformer:
        """The model. embedding: a table to share; None: it is read."""
        config = self._config
        # Largest first, while little else is in memory: packing a weight needs its memory twice.
        table = self._table("model.embed_tokens.weight") if embedding is None else embedding
        if config.is_tied:
            head = table if embedding is None else self._table("model.embed_tokens.weight")
        else:
            head = self._table("lm_head.weight")
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        weights = ModelWeights(table, layers, self._norm("model.norm.weight"), head, self._quantize)
        if self._packed:
            self._packed.save()
        return Transformer(config, weights, self._kernels, self._whole)

    def _layer(self, index: int) -> LayerWeights:
        config, layer, linears = self._config, f"model.layers.{index}.", _linears(self._whole)
        norms = {name: self._norm(f"{layer}{file_name}.weight") for name, (file_name, _) in _norms(config).items()}
        return LayerWeights(
            attention_norm=norms["attention_norm"],
            qkv=self._linear(layer, linears["qkv"], self._order),
            out=self._linear(layer, linears["out"]),
            mlp_norm=norms["mlp_norm"],
            gate_up=self._linear(layer, linears["gate_up"]),
            down=self._linear(layer, linears["down"]),
            window=config.window_of(index),
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            rotates=config.rotates(index),
        )

    def _linear(self, layer: str, stacked: _StackedLinear, order: Tensor | None = None) -> Linear:
        def read(suffix: str, dtype: torch.dtype | None) -> Tensor:
            names = [f"{layer}{name}.{suffix}" for name, _ in stacked.parts]
            rows = self._files.stack(names, dtype, () if is_row_parallel and suffix == "bias" else stacked.picks(shard))
            return rows if order is None else rows[order]

        shard = self._shard
        is_row_parallel = stacked.is_row_parallel and shard.size > 1
        has_bias = stacked.has_bias and not (is_row_parallel and shard.rank)  # the first rank adds it
        def pack() -> Linear:
            bias = read("bias", self._kernels.dtype) if has_bias else None
            return self._kernels.pack(read("weight", self._dtype), bias, quantize=self._quantize)

        if self._packed:
            rows = sum(sum(segments) for _, segments in stacked.parts)
            name = f"{layer}{stacked.parts[0][0]}"
            return self._packed.linear(name, self._quantize, (rows, stacked.columns), has_bias, pack)
        return RowParallel(pack()) if is_row_parallel else pack()

    def _table(self, name: str) -> Linear:
        shard, whole = self._shard, self._whole
        quantize = "int8" if self._quantize == "int4" else self._quantize
        if shard.size == 1:
            def pack() -> Linear:
                return self._kernels.pack(self._files.stack((name,), self._dtype), quantize=quantize)

            shape = (whole.vocab_size, whole.hidden_size)
            return self._packed.linear(name, quantize, shape, False, pack) if self._packed else pack()
        own = shard.vocabulary(whole.vocab_size)
        rows = self._files.stack((name,), self._dtype, [lambda rows: rows[own]])
        return ColumnParallel(self._kernels.pack(rows, quantize=quantize), own.start, whole.vocab_size)

    def _norm(self, name: str) -> Tensor:
        return self._files.read(name).to(self._kernels.device, self._kernels.dtype, copy=True)


def _check(files: TensorFiles, config: ModelConfig) -> None:
    if config.num_layers > len(files.names()):  # checked before the names of all expected tensors are built
        raise ModelError(f"config.json says {config.num_layers} layers, but {files.folder} has only "
                         f"{len(files.names())} tensors")
    expected = expected_shapes(config)
    present = {name for name in files.names()
               if not name.startswith(HEADS_PREFIX) and not name.endswith("rotary_emb.inv_freq")}
    if config.is_tied:
        present.discard("lm_head.weight")  # some files have it although it is tied
    files.check(expected, present, "its config.json")
    _check_rope(config)


def _check_rope(config: ModelConfig) -> None:
    try:
        lengths = (1, config.max_positions)
        found = [rope.frequencies(config.rope, config.trained_positions, length) for length in lengths]
        is_sound = all(bool(inverse.isfinite().all()) and math.isfinite(factor) for inverse, factor in found)
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # the possible results of nonsensical settings
        is_sound = False
    if not is_sound:
        raise ModelError(f"config.json: rope type {config.rope.kind!r} with base {config.rope.theta} and "
                         f"{dict(config.rope.settings)} gives no finite angles")


def dump_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
