"""The frozen target model of a training, loaded with `transformers`: token ids in, states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.checkpoint.config_file import read_config
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError, missing_extra
from longdraft.model.config import ModelConfig
from longdraft.system import processor
from longdraft.train.delta import use_chunks
from longdraft.train.losses import row_chunks

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
