"""Weights from a Hugging Face folder: one safetensors file or shards, strict both ways."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels import Kernels, LayerWeights
from longdraft.model.config import ModelConfig, read_json
from longdraft.model.transformer import Transformer, Weights

QUANTIZE = ("none", "int8")
HEADS_PREFIX = "model.medusa_layers."  # TokenSwift's heads inside a whole-model checkpoint


class TensorFiles:
    """The tensors of a folder by name, read when asked for. `single` is the file where there are no shards."""

    def __init__(self, folder: Path, single: str = "model.safetensors") -> None:
        self.folder = folder
        self._where: dict[str, Path] = {}
        for path in _files(folder, single):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if name in self._where:
                        raise ModelError(f"{name} stands in {self._where[name]} and in {path}")
                    self._where[name] = path

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str) -> Tensor:
        try:
            with _open(self._where[name]) as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except SafetensorError as error:
            raise ModelError(f"cannot read {name} from {self._where[name]}: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        with _open(self._where[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def check(self, expected: Mapping[str, tuple[int, ...]], present: Set[str], what: str) -> None:
        """ModelError naming every tensor of `present` that is missing, surplus or misshapen beside `expected`."""
        problems = [f"missing {name}" for name in sorted(expected.keys() - present)]
        problems += [f"surplus {name}" for name in sorted(present - expected.keys())]
        problems += [f"{name} is {list(self.shape(name))}, not {list(expected[name])}"
                     for name in sorted(expected.keys() & present) if self.shape(name) != expected[name]]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ModelError(f"{self.folder} does not match {what}: {shown}")

    def fingerprint(self) -> str:
        """sha256 over names, shapes, dtypes and the bytes of every tensor but heads'."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            if not name.startswith(HEADS_PREFIX):
                tensor = self.read(name)
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _files(folder: Path, single: str) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise ModelError(f"{index} has no weight_map of names to files")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard:
                raise ModelError(f"{index} names {shard!r}, which is not a file of the folder")
            yield folder / shard
    else:
        yield folder / single


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; a model folder holds config.json, tokenizer.json and "
                         "model.safetensors (or shards with their index)") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a Llama checkpoint of this configuration must hold, by its Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", q, hidden, config.attention_bias),
            ("self_attn.k_proj", kv, hidden, config.attention_bias),
            ("self_attn.v_proj", kv, hidden, config.attention_bias),
            ("self_attn.o_proj", hidden, q, config.attention_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
    return shapes


def load(files: TensorFiles, config: ModelConfig, kernels: Kernels, quantize: str = "none") -> Transformer:
    """The transformer of a folder; ModelError names every missing, surplus or misshapen tensor.

    quantize  none | int8: each weight is quantised when it is packed, one after the other
    """
    _check(files, config)
    pack = partial(kernels.pack, is_int8=quantize == "int8")

    def stacked(layer: str, names: tuple[str, ...], has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([files.read(f"{layer}{name}.weight") for name in names])
        return weight, torch.cat([files.read(f"{layer}{name}.bias") for name in names]) if has_bias else None

    def norm(name: str) -> Tensor:
        return files.read(name).to(kernels.device).to(kernels.dtype)

    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        attention = (layer + "self_attn.", config.attention_bias)
        layers.append(LayerWeights(
            attention_norm=norm(layer + "input_layernorm.weight"),
            qkv=pack(*stacked(attention[0], ("q_proj", "k_proj", "v_proj"), attention[1])),
            out=pack(*stacked(attention[0], ("o_proj",), attention[1])),
            mlp_norm=norm(layer + "post_attention_layernorm.weight"),
            gate_up=pack(*stacked(layer + "mlp.", ("gate_proj", "up_proj"), config.mlp_bias)),
            down=pack(*stacked(layer + "mlp.", ("down_proj",), config.mlp_bias)),
        ))
    embedding = pack(files.read("model.embed_tokens.weight"))
    head = embedding if config.is_tied else pack(files.read("lm_head.weight"))
    weights = Weights(embedding, tuple(layers), norm("model.norm.weight"), head, quantize)
    return Transformer(config, weights, kernels)


def _check(files: TensorFiles, config: ModelConfig) -> None:
    expected = expected_shapes(config)
    present = {name for name in files.names()
               if not name.startswith(HEADS_PREFIX) and not name.endswith("rotary_emb.inv_freq")}
    if config.is_tied:
        present.discard("lm_head.weight")  # some files repeat the tied table
    files.check(expected, present, "its config.json")


def dump_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
