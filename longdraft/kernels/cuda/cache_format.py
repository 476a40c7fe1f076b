"""The formats in which a device's cache keeps keys and values. Needs no Triton."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_SCALE_BYTES = 4  # float32


class CacheFormat(enum.Enum):
    """The value is the suffix of the kernels' names.

    EXACT  rows in the model's dtype
    KV8    8 bits: a number is a whole number of -127 to 127 times its row's scale
    K8V4   keys as in KV8; a value has 4 bits: a whole number of 0 to 15 times its row's scale, and
           the row's least number
    """

    EXACT = ""
    KV8 = "-kv8"
    K8V4 = "-k8v4"

    @property
    def is_scaled(self) -> bool:
        return self is not CacheFormat.EXACT

    @property
    def is_packed(self) -> bool:
        """Two numbers of a value are one byte."""
        return self is CacheFormat.K8V4

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Of one head's key and value at one position, scales included."""
        if not self.is_scaled:
            return 2 * dim * dtype.itemsize
        return dim + _SCALE_BYTES + (dim // 2 + 2 * _SCALE_BYTES if self.is_packed else dim + _SCALE_BYTES)

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """float32 rows [..., D] of keys and values as a cache of this format has them: the definition of the formats,
        which the kernels of `jit_cache_rows` implement."""
        if not self.is_scaled:
            return keys, values
        return _of_8_bits(keys), _of_4_bits(values) if self.is_packed else _of_8_bits(values)


def _of_8_bits(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale.masked_fill(scale == 0, 1)).round() * scale


def _of_4_bits(rows: Tensor) -> Tensor:
    """Sixteen numbers at equal distances, from a row's least number to its largest."""
    least, largest = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale = (largest - least) / 15
    codes = ((rows - least) / scale.masked_fill(scale == 0, 1)).round()
    return codes * scale + least
