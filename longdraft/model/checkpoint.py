"""ModelWeights from a Hugging Face folder: one safetensors file or shards, strict both ways."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.model import rope
from longdraft.model.config import ModelConfig, read_json
from longdraft.model.sharding import shard_config
from longdraft.model.tensor_file import FLOATS, TensorFile
from longdraft.model.transformer import ModelWeights, Transformer
from longdraft.parallel import ColumnParallel, Pick, RowParallel, Shard, part_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZE = ("none", "int8")
HEADS_PREFIX = "model.medusa_layers."  # TokenSwift's heads inside a whole-model checkpoint

ReadCallback = Callable[[int, int], None]  # bytes done, bytes in all


class TensorFiles:
    """The tensors of a folder by name, read when asked for.

    single   the file where there are no shards
    on_read  called with (bytes read, bytes in all) after each tensor
    """

    def __init__(self, folder: Path, single: str = WEIGHTS, on_read: ReadCallback | None = None) -> None:
        self.folder = folder
        self.files = [TensorFile(path) for path in _files(folder, single)]
        self._where: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.entries:
                if name in self._where:
                    raise ModelError(f"{name} stands in {self._where[name].path} and in {file.path}")
                self._where[name] = file
        self._on_read = on_read
        self._read: set[str] = set()
        self._last = ""  # of which pages may be in memory

    def names(self) -> set[str]:
        return set(self._where)

    @property
    def nbytes(self) -> int:
        return sum(self._size(name) for name in self._where)

    def read(self, name: str, pick: Pick | None = None) -> Tensor:
        """A floating-point tensor, or a part of it, without NaN or infinity: a view of the file, not to be kept or
        written into. Of what is not picked nothing is read."""
        file = self._where[name]
        if problem := self._wrong_type(name):
            raise ModelError(f"{file.path}: {problem}")
        tensor = self._view(name) if pick is None else pick(self._view(name))
        # A sum with a NaN or an infinity in it is none, and takes a fraction of the time that reading does.
        # One that overflows by itself is looked into.
        if not tensor.sum().isfinite() and (bad := int((~tensor.isfinite()).sum())):
            raise ModelError(f"{file.path}: {name} has {bad} values that are NaN or infinite; the file is damaged, or "
                             "its training failed; get it again")
        if self._on_read:
            self._read.add(name)
            self._on_read(sum(map(self._size, self._read)), self.nbytes)
        return tensor

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        """Tensors (or what `picks` take of each) as one of this dtype (None: the first one's own), one below the other:
        no more in memory than that and the part being read."""
        own = FLOATS[self._where[names[0]].entries[names[0]].dtype]
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
        self._forget()
        return stacked

    def _view(self, name: str) -> Tensor:
        """A tensor as it is stored; lets go of the one before."""
        self._forget()
        self._last = name
        return self._where[name].view(name)

    def _forget(self) -> None:
        if self._last:
            self._where[self._last].forget(self._last)

    def _size(self, name: str) -> int:
        entry = self._where[name].entries[name]
        return entry.stop - entry.start

    def _wrong_type(self, name: str) -> str:
        dtype = self._where[name].entries[name].dtype
        return "" if dtype in FLOATS else f"{name} holds {dtype}, allowed: {', '.join(FLOATS)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].entries[name].shape

    def check(self, expected: Mapping[str, tuple[int, ...]], present: Set[str], what: str) -> None:
        """ModelError naming every tensor of `present` that is missing, surplus or misshapen beside `expected`."""
        both = sorted(expected.keys() & present)
        problems = [f"missing {name}" for name in sorted(expected.keys() - present)]
        problems += [f"surplus {name}" for name in sorted(present - expected.keys())]
        problems += [f"{name} is {list(self.shape(name))}, not {list(expected[name])}"
                     for name in both if self.shape(name) != expected[name]]
        problems += [problem for name in both if (problem := self._wrong_type(name))]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ModelError(f"{self.folder} does not match {what}: {shown}")

    def fingerprint(self) -> str:
        """sha256 over names, shapes, dtypes and the bytes of every tensor but heads'."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            if not name.startswith(HEADS_PREFIX):
                tensor = self._view(name)
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._forget()
        return digest.hexdigest()


def _picked(shape: tuple[int, ...], pick: Pick | None) -> tuple[int, ...]:
    return shape if pick is None else tuple(pick(torch.empty(shape, device="meta")).shape)


def _temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of its own, which the system has back as soon as nobody needs it.

    The allocator's would lie between the weights, and what is packed next would not fit where it lay: 1.25 times
    the memory for a model of 80 MB.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=dtype, count=math.prod(shape)).view(shape)


def _files(folder: Path, single: str) -> list[Path]:
    index = folder / INDEX
    names = shard_names(index) if single == WEIGHTS and index.exists() else [single]
    return [folder / name for name in names]


def shard_names(index: Path) -> list[str]:
    """The files that an index names: plain names, so that no index leads out of its folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise ModelError(f"{index} has no weight_map of names to files")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name[:200]!r}, which is not a safetensors file of the folder")
    return names


class _Stacked(NamedTuple):
    """A weight of ours: the tensors of a file, by name and segments of rows, that lie in it one below the other.

    is_summed  ranks have some of its columns each, not of its rows
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    columns: int
    has_bias: bool
    is_summed: bool = False

    def picks(self, part: Shard) -> list[Pick | None]:
        return [part.columns() if self.is_summed else part.rows(segments) for _, segments in self.parts]


def _linears(config: ModelConfig) -> dict[str, _Stacked]:
    """The weights of a layer by their names in LayerWeights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("self_attn.q_proj", (q,)), ("self_attn.k_proj", (kv,)), ("self_attn.v_proj", (kv,)))
    gate_up: tuple[tuple[str, tuple[int, ...]], ...] = (("mlp.gate_proj", (inner,)), ("mlp.up_proj", (inner,)))
    if config.is_fused:
        qkv, gate_up = (("self_attn.qkv_proj", (q, kv, kv)),), (("mlp.gate_up_proj", (inner, inner)),)
    return {
        "qkv": _Stacked(qkv, hidden, config.qkv_bias),
        "out": _Stacked((("self_attn.o_proj", (hidden,)),), q, config.out_bias, is_summed=True),
        "gate_up": _Stacked(gate_up, hidden, config.mlp_bias),
        "down": _Stacked((("mlp.down_proj", (hidden,)),), inner, config.mlp_bias, is_summed=True),
    }


def _norms(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """The norms of a layer by their names in LayerWeights: name in the file, and width."""
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
    """Every tensor a checkpoint of this configuration must hold, by its Hugging Face name."""
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
    """Rows of qkv so that the pairs which are rotated lie half a head apart, as the kernels rotate them.

    Of a head of which only the first `dims` dimensions are rotated (a with b), the others are halved:

        [ a | b | c | d ]  ->  [ a | c | b | d ]

    Queries and keys alike, so that their products stay what they were. None: the file's order will do.
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


def load_transformer(files: TensorFiles, config: ModelConfig, kernels: Kernels, quantize: str = "none") -> Transformer:
    """The transformer of a folder, or this rank's part of it; ModelError names every missing, surplus or misshapen
    tensor.

    kernels   parallel ones share the weights out: of each only this rank's part is read
    quantize  none | int8: each weight is quantised when it is packed, one after the other
    """
    whole, shares = config, part_of(kernels)
    _check(files, whole)
    config = shard_config(whole, shares, quantize)
    order = _rotated_order(config)
    is_int8 = quantize == "int8"
    pack, dtype = partial(kernels.pack, is_int8=is_int8), None if is_int8 else kernels.dtype

    def linear(layer: str, stacked: _Stacked, order: Tensor | None = None) -> Linear:
        def part(kind: str, dtype: torch.dtype | None) -> Tensor:
            names = [f"{layer}{name}.{kind}" for name, _ in stacked.parts]
            taken = files.stack(names, dtype, () if is_added and kind == "bias" else stacked.picks(shares))
            return taken if order is None else taken[order]

        is_added = stacked.is_summed and shares.size > 1
        has_bias = stacked.has_bias and not (is_added and shares.rank)  # added once
        packed = pack(part("weight", dtype), part("bias", kernels.dtype) if has_bias else None)
        return RowParallel(packed) if is_added else packed

    def table(name: str) -> Linear:
        if shares.size == 1:
            return pack(files.stack((name,), dtype))
        own = shares.vocabulary(whole.vocab_size)
        packed = pack(files.stack((name,), dtype, [lambda rows: rows[own]]))
        return ColumnParallel(packed, own.start, whole.vocab_size)

    def norm(name: str) -> Tensor:
        return files.read(name).to(kernels.device, kernels.dtype, copy=True)

    # The largest first, while nothing else is in memory: packing one takes room for it twice.
    embedding = table("model.embed_tokens.weight")
    head = embedding if config.is_tied else table("lm_head.weight")
    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        norms = {ours: norm(f"{layer}{name}.weight") for ours, (name, _) in _norms(config).items()}
        linears = _linears(whole)
        layers.append(LayerWeights(
            attention_norm=norms["attention_norm"],
            qkv=linear(layer, linears["qkv"], order),
            out=linear(layer, linears["out"]),
            mlp_norm=norms["mlp_norm"],
            gate_up=linear(layer, linears["gate_up"]),
            down=linear(layer, linears["down"]),
            window=config.window_of(index),
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            rotates=config.rotates(index),
        ))
    weights = ModelWeights(embedding, tuple(layers), norm("model.norm.weight"), head, quantize)
    return Transformer(config, weights, kernels, whole)


def _check(files: TensorFiles, config: ModelConfig) -> None:
    if config.num_layers > len(files.names()):  # before all their names are written down
        raise ModelError(f"config.json has {config.num_layers} layers, {files.folder} {len(files.names())} tensors")
    expected = expected_shapes(config)
    present = {name for name in files.names()
               if not name.startswith(HEADS_PREFIX) and not name.endswith("rotary_emb.inv_freq")}
    if config.is_tied:
        present.discard("lm_head.weight")  # some files repeat the tied table
    files.check(expected, present, "its config.json")
    _check_rope(config)


def _check_rope(config: ModelConfig) -> None:
    try:
        lengths = (1, config.max_positions)
        found = [rope.frequencies(config.rope, config.trained_positions, length) for length in lengths]
        is_sound = all(bool(inverse.isfinite().all()) and math.isfinite(factor) for inverse, factor in found)
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # whatever numbers that make no sense lead to
        is_sound = False
    if not is_sound:
        raise ModelError(f"config.json: rope type {config.rope.kind!r} with base {config.rope.theta} and "
                         f"{dict(config.rope.settings)} gives no angles")


def dump_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
