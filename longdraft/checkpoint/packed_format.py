"""How a quantised checkpoint packs its numbers, as `quantization_config` of its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.errors import ModelError
from longdraft.kernels.formats.int4 import GROUP

COMPRESSED = "compressed-tensors"
METHODS = ("awq", "gptq", COMPRESSED)
_LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors; more bits to a word or not
_SUPPORTED = "awq and gptq with 4 bits, compressed-tensors with integers of 4 or 8 bits"
_CURE = "load the original model, with --quantize to save memory"


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint packs its numbers.

    method     awq, gptq or compressed-tensors
    group      inputs that share a scale; -1: all. Not used with compressed-tensors, whose tensors say it
    zero_step  what is added to stored zero points: 1 in GPTQ's first format
    """

    method: str
    group: int = -1
    zero_step: int = 0

    @property
    def in_fingerprints(self) -> str:
        """The name that fingerprints of weights have for it, which journals keep: it never changes."""
        return f"FourBitFormat(method={self.method!r}, group={self.group}, zero_step={self.zero_step})"

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> PackedFormat:
        """Raises ModelError for formats that longdraft does not have."""
        method = settings.get("quant_method")
        bits = settings.get("bits", settings.get("w_bit"))
        if method == COMPRESSED:
            _require_integers(settings)
            return cls(COMPRESSED)
        group = settings.get("group_size", settings.get("q_group_size", 128))
        if method not in METHODS or bits != 4:
            raise ModelError(f"the checkpoint is quantised ({method!r}, {bits!r} bits); supported: {_SUPPORTED}; "
                             f"{_CURE}")
        if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 1 or group % GROUP)):
            raise ModelError(f"group_size is {group!r} in quantization_config; allowed: -1 or a multiple of {GROUP}")
        version = str(settings.get("version", "gemm")).lower()
        if method == "awq" and (version != "gemm" or not settings.get("zero_point", True)):
            raise ModelError(f"the AWQ checkpoint has version {version!r}; supported: gemm with zero points")
        packed = settings.get("checkpoint_format", "gptq")
        if method == "gptq" and packed not in ("gptq", "gptq_v2"):
            raise ModelError(f"checkpoint_format is {packed!r} in quantization_config; supported: gptq, gptq_v2")
        return cls(method, group, int(method == "gptq" and packed == "gptq"))


def _require_integers(settings: Mapping[str, Any]) -> None:
    """Raise ModelError unless compressed-tensors has integers of 4 or 8 bits."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError("quantization_config has no config_groups, which say how compressed-tensors packs its numbers")
    for group in groups.values():
        layout = group.get("format") or settings.get("format")
        if layout not in _LAYOUTS:
            raise ModelError(f"the checkpoint has compressed-tensors in the format {layout!r}; supported: "
                             f"{', '.join(_LAYOUTS)}; {_CURE}")
        weights = group.get("weights")
        weights = weights if isinstance(weights, dict) else {}
        kind = weights.get("type", "int")
        bits = weights.get("num_bits")
        if kind != "int" or bits not in (4, 8):
            raise ModelError(f"the checkpoint has weights of type {kind!r} with {bits!r} bits in compressed-tensors; "
                             f"supported: int with 4 or 8 bits; {_CURE}")
    for key in ("kv_cache_scheme", "transform_config"):
        if settings.get(key):
            raise ModelError(f"quantization_config has a {key}, which longdraft does not have; {_CURE}")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ModelError(f"the checkpoint is stored in the sparse format {sparsity['format']!r}; supported: dense; "
                         f"{_CURE}")
