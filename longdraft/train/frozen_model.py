"""The frozen target model of a training, and losses that never hold [tokens, vocabulary] logits at a time.

The logits of a row depend on its hidden state only. A long sequence is therefore cut into chunks of rows, and the
logits of one chunk at a time are computed, differentiated and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.checkpoint.config_file import read_config
from longdraft.checkpoint.tensor_files import TensorFiles, dump_json
from longdraft.errors import ModelError, missing_extra
from longdraft.model.config import ModelConfig
from longdraft.system import processor
from longdraft.train.checkpoint import write_tensors
from longdraft.train.data_files import Tokens
from longdraft.train.delta import use_chunks

CPU_CHUNK_ELEMENTS = 2**21  # logits of a chunk; 8 MiB of float32, about the L2 cache of a server's core
GPU_CHUNK_ELEMENTS = 2**28
IGNORED = -100
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FrozenOutputs(NamedTuple):
    """The frozen model's outputs: hidden states before the final norm, and the keys and values of the last layer
    that has some."""

    hidden: Tensor  # [B, L, hidden] float32
    keys: Tensor  # [B, Hkv, L, D], rotated
    values: Tensor  # [B, Hkv, L, D]


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model: token ids in, hidden states and logits out."""

    architectures: tuple[str, ...]  # names of the class of `transformers`
    config: ModelConfig
    fingerprint: str
    initializer_range: float
    body: nn.Module  # without its final norm
    final_norm: Tensor  # [hidden]
    head_weight: Tensor  # [V, hidden]
    saved_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @torch.no_grad()
    def outputs(self, ids: Tensor, positions: Tensor | None = None) -> FrozenOutputs:
        """One forward of ids [B, L] int64 at positions [B, L] (default: 0, 1, 2, ...)."""
        cache = _last_keys(self.config.kv_layers[-1])
        hidden = self._read(ids, positions, past_key_values=cache).last_hidden_state
        keys, values = cache.stored
        return FrozenOutputs(hidden.float().to(self.device), keys.to(self.device), values.to(self.device))

    def _read(self, ids: Tensor, positions: Tensor | None, **more: Any) -> Any:
        """One forward. A cache keeps `transformers` from taking a jump of the positions for the start of another
        text."""
        options = {"past_key_values": _last_keys(self.config.kv_layers[-1]), "use_cache": False} | more
        return self.body(input_ids=ids, position_ids=positions, **options)

    @torch.no_grad()
    def states(self, ids: Tensor, positions: Tensor, layers: Sequence[int]) -> Tensor:
        """The rows that enter these layers, [len(layers), B, L, hidden] float32, of ids and positions [B, L].

        The number of layers stands for the rows that leave the last one, before the final norm.
        """
        states = self._read(ids, positions, output_hidden_states=True).hidden_states
        return torch.stack([states[layer].float().to(self.device) for layer in layers])

    @torch.no_grad()
    def hidden(self, ids: Tensor, window: int = 0, sinks: int = 0) -> Tensor:
        """Rows of the last layer before the final norm, [B * L, hidden] float32, of ids [B, L].

        window  each row attends to the first `sinks` positions and this many latest ones, as with a partial KV cache;
                0: to all. The states of a hybrid's delta layers have seen all
        """
        mask: Any = None
        if window:
            column = torch.arange(ids.shape[1], device=ids.device)
            row = column[:, None]
            mask = ((column <= row) & ((column < sinks) | (row - column < window)))[None, None]
            mask = {"full_attention": mask, "linear_attention": None} if self.config.hybrid else mask
        hidden: Tensor = self.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).float().to(self.device)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [B, L, hidden] float32 of ids [B, L], as they enter the first layer."""
        body: Any = self.body
        rows = functional.embedding(ids, body.embed_tokens.weight)  # a sharded model has its table on another device
        return rows.to(self.device).float() * self.config.embedding_factor

    @torch.no_grad()
    def last_rotations(self, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, L, rotated dimensions] of the last layer's keys at positions [B, L]."""
        body: Any = self.body
        kind = "sliding_attention" if self.config.kv_attention[-1].window else "full_attention"
        cos, sin = body.rotary_emb(keys, positions, *((kind,) if self.config.window_rope else ()))
        return cos.to(self.device), sin.to(self.device)

    def normed(self, hidden: Tensor) -> Tensor:
        """RMSNorm with the model's final weights, of rows [..., hidden] float32."""
        return functional.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.config.rms_norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [R, V] float32 of normalised rows [R, hidden]; differentiable in the rows."""
        logits = functional.linear(normed.to(self.head_weight.dtype), self.head_weight).float()
        logits = logits if self.config.logits_divisor == 1 else logits / self.config.logits_divisor
        cap = self.config.logits_cap
        return (logits / cap).tanh() * cap if cap else logits

    @torch.no_grad()
    def probabilities(self, hidden: Tensor) -> Callable[[slice], Tensor]:
        """A teacher for `backward_in_chunks`: the distributions after hidden states [B, L, hidden], of some rows."""
        rows = self.normed(hidden).flatten(0, 1)
        return lambda run: self.logits(rows[run]).softmax(-1)

    def row_chunks(self, count: int) -> Iterator[slice]:
        return row_chunks(self.device, self.config.vocab_size, count)


def _last_keys(layer: int) -> Any:
    """A cache for one forward of `transformers` that stores the keys and values of one layer only, and no states."""
    from transformers import DynamicCache

    class LastKeys(DynamicCache):  # type: ignore[misc]
        stored: tuple[Tensor, Tensor]

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
                   **options: Any) -> tuple[Tensor, Tensor]:
            if layer_idx == layer:
                self.stored = key_states, value_states
            return key_states, value_states

        def get_conv_state(self, *args: Any, **options: Any) -> None:
            """There is none, so a delta layer begins a text."""

        get_recurrent_state = update_recurrent_state = get_conv_state

        def update_conv_state(self, mixed: Tensor, *args: Any, **options: Any) -> Tensor:
            return mixed

    return LastKeys()


def row_chunks(device: torch.device, vocab_size: int, count: int) -> Iterator[slice]:
    """Slices of rows 0 .. count, small enough for their logits."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS
    rows = max(64, elements // vocab_size)
    return (slice(start, start + rows) for start in range(0, count, rows))


def load_frozen_model(folder: Path, dtype: str, device: torch.device, *, shard: bool = False) -> FrozenModel:
    """The frozen model of a folder. Raises ModelError if a file or tensor is missing or not supported.

    shard  distribute the layers over all GPUs that this process sees
    """
    config = read_config(folder)
    fingerprint = TensorFiles(folder).fingerprint()
    saved = TORCH_DTYPES[config.dtype]
    computed = _computed(saved, device) if dtype == "auto" else TORCH_DTYPES[dtype]
    model = pretrained(folder, computed, device, shard=shard)
    model.requires_grad_(False).eval()
    body = model.model
    norm = body.norm.weight.detach().float() + config.norm_offset
    use_chunks(model)
    # With an identity in its place the body returns the hidden states before the final norm, which the heads read.
    body.norm = nn.Identity()
    spread = float(getattr(model.config, "initializer_range", 0.02))
    head_weight = model.get_output_embeddings().weight.detach()
    architectures = tuple(model.config.architectures or [type(model).__name__])
    return FrozenModel(architectures, config, fingerprint, spread, body, norm.to(head_weight.device), head_weight,
                       saved)


def _computed(saved: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a forward: that of the checkpoint, but float32 on a CPU without instructions for bfloat16, where its
    products take ten times as long."""
    return saved if device.type != "cpu" or "bf16" in processor.name() else torch.float32


def pretrained(folder: Path, dtype: torch.dtype, device: torch.device, *, shard: bool = False) -> Any:
    """A folder or GGUF file as a `transformers` model. Raises ModelError if it cannot be loaded completely."""
    options: dict[str, Any] = {"device_map": "auto"} if shard else {}
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
        if folder.is_file():
            options |= _gguf_options(folder)
            folder = folder.parent
    except ImportError as error:
        raise missing_extra("training", str(error.name), "train") from error

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load {folder}: {str(error).strip().splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ModelError(f"{folder} lacks the tensors {', '.join(sorted(report['missing_keys']))}")
    return model if shard else model.to(device)


def _gguf_options(file: Path) -> dict[str, Any]:
    """For `from_pretrained`: the floating-point numbers of a GGUF file. Raises ImportError without the package gguf."""
    import gguf  # noqa: F401 transformers reads the file with it
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name}
    if hasattr(transformers, "GgufConfig"):  # versions without it know no other way
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return options


def as_ids(sequences: Tokens, device: torch.device) -> Tensor:
    return torch.from_numpy(sequences.astype(np.int64)).to(device)  # a copy: the data may be a map of a file


def mixed_loss(logits: Tensor, wanted: Tensor, taught: Tensor | None, part: float) -> Tensor:
    """The distillation loss, summed over rows: (1 - part) CE(target token) + part CE(teacher's distribution).

    logits  [R, V] float32
    wanted  [R] int64 target tokens; rows that are IGNORED do not count
    taught  [R, V] float32 probabilities of the teacher; None: cross-entropy only
    """
    if taught is None or not part:
        return functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    loss: Tensor = _MixedLoss.apply(logits, wanted, taught, part)  # type: ignore[no-untyped-call]
    return loss


class _MixedLoss(torch.autograd.Function):
    """Cross-entropy against the mixture q = (1 - part) onehot + part taught: -q log p, with the gradient p - q.

    It reads [R, V] half as often as softmax, log_softmax and their separate derivatives do.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, taught: Tensor, part: float) -> Tensor:
        is_known = wanted != IGNORED
        tokens = wanted.clamp(min=0)[:, None]
        log_p = logits.log_softmax(-1)
        of_taught = torch.einsum("rv,rv->r", taught, log_p)
        loss = -(part * of_taught + (1 - part) * log_p.gather(1, tokens)[:, 0])
        gradient = log_p.exp_().sub_(taught, alpha=part)
        gradient.scatter_add_(1, tokens, gradient.new_full(tokens.shape, part - 1.0))
        ctx.save_for_backward(gradient.masked_fill_(~is_known[:, None], 0.0))
        return loss.masked_fill(~is_known, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, = ctx.saved_tensors
        return gradient * upstream, None, None, None


def backward_in_chunks(hidden: Tensor, wanted: Tensor, logits: Callable[[Tensor], Tensor],
                       teacher: Callable[[slice], Tensor] | None, runs: Iterable[slice], part: float,
                       scale: float) -> Tensor:
    """Add `scale` times the gradient of the mean `mixed_loss` of normalised rows; returns that mean.

    The gradient of the rows is computed a chunk at a time, and that of the layers in one backward.

    hidden   [R, hidden]
    wanted   [R] int64 target tokens
    logits   computes the logits of some rows
    teacher  computes the teacher's probabilities for a chunk of rows; None: cross-entropy only
    runs     the chunks of rows
    """
    rows = hidden.detach().requires_grad_()
    mean = torch.zeros((), device=hidden.device)
    for run in runs:
        with torch.no_grad():
            taught = teacher(run) if teacher else None
        loss = mixed_loss(logits(rows[run]), wanted[run], taught, part) / len(wanted)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        mean += loss.detach()
    assert rows.grad is not None
    hidden.backward(rows.grad)  # type: ignore[no-untyped-call]
    return mean


class Scores:
    """Sums the validation of several parts (heads, lags), a chunk of rows at a time."""

    def __init__(self, parts: int) -> None:
        self._sums = torch.zeros(parts, 4, dtype=torch.float64)  # loss, top 1, top 3, rows

    def add(self, part: int, logits: Tensor, target: Tensor) -> None:
        """Count rows with logits [R, V] and target tokens [R]."""
        own = logits.gather(1, target[:, None])
        rank = (logits > own).sum(1)
        loss = functional.cross_entropy(logits, target, reduction="sum")
        sums = [float(loss), int((rank < 1).sum()), int((rank < 3).sum()), len(target)]
        self._sums[part] += torch.tensor(sums, dtype=torch.float64)

    def metrics(self) -> list[dict[str, float]]:
        """Of each part: mean cross-entropy in nats; shares of targets that rank first, and among the first three."""
        return [dict(zip(("loss", "top1", "top3"), (row[:3] / row[3]).tolist(), strict=True)) for row in self._sums]


class StoredTensor(NamedTuple):
    """A tensor of a part's file: its name and parameter, and what the parameter is multiplied by in the file."""

    name: str
    parameter: nn.Parameter
    factor: float = 1.0

    def value(self, dtype: torch.dtype) -> Tensor:
        """For the file."""
        return (self.parameter.detach() * self.factor).to("cpu", dtype)


@torch.no_grad()
def read_part(files: TensorFiles, tensors: Iterable[StoredTensor], names: Mapping[str, str] | None = None) -> None:
    """Set the parameters of a part from the file of an earlier one. Raises ModelError if tensors are missing or have
    other shapes.

    names  our names of the file's tensors -> its own; None: the same ones
    """
    present = {name: name for name in files.names()} if names is None else names
    tensors = list(tensors)
    wanted = {present.get(each.name, each.name): tuple(each.parameter.shape) for each in tensors}
    files.check(wanted, files.names() & wanted.keys(), "the part to train; give --start a part of the same kind and "
                "sizes")
    for each in tensors:
        each.parameter.copy_(files.read(present[each.name]).float() / each.factor)


def write_part(path: Path, tensors: Iterable[StoredTensor], dtype: torch.dtype, config: Mapping[str, Any]) -> None:
    """Write the file of a part, and config.json beside it."""
    write_tensors(path, {each.name: each.value(dtype) for each in tensors}, {"format": "pt"})
    dump_json(path.with_name("config.json"), config)


class LayerModule(nn.Module):
    """Trained layers that draft for a frozen model, in float32, with the names of their file.

    shapes  of the tensors, by name. Vectors start as ones, output maps as zeros, other matrices are random by `seed`
    """

    def __init__(self, base: FrozenModel, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
        super().__init__()
        self._base = base
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for name, shape in shapes.items():
            tensor = torch.ones(shape)
            if len(shape) > 1:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                tensor = torch.zeros(shape) if is_output else torch.randn(shape, generator=generator) * shape[1] ** -0.5
            self.weights[name.replace(".", "/")] = nn.Parameter(tensor)
        with torch.no_grad():
            self._weight("norm").copy_(base.final_norm)

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[f"{name}.weight".replace(".", "/")]
        return weight

    def stored(self) -> list[StoredTensor]:
        return [StoredTensor(name.replace("/", "."), p) for name, p in self.weights.items()]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        dtype = self._base.head_weight.dtype
        return functional.linear(x.to(dtype), self._weight(name).to(dtype))

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """The heads [B, H, L, D] of a product of x [B, L, ...]."""
        return self._linear(x, name).view(*x.shape[:2], -1, self._base.config.head_dim).transpose(1, 2)

    def _merge(self, heads: Tensor, name: str) -> Tensor:
        """The product [B, L, hidden] float32 of heads [B, H, L, D]."""
        return self._linear(heads.transpose(1, 2).flatten(2), name).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weight(name)
        return functional.rms_norm(x, weight.shape, weight, self._base.config.rms_norm_eps)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        """The output [B, L, hidden] float32 of the MLP and the norm before it."""
        normed = self._norm(x, f"{prefix}post_attention_layernorm")
        inner = functional.silu(self._linear(normed, f"{prefix}mlp.gate_proj"))
        return self._linear(inner * self._linear(normed, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj").float()
