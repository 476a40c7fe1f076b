"""The parts of the header of a GGUF file: arrays, entries of tensors, and types with the sizes of their blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch


class BlockType(NamedTuple):
    """A type whose blocks of `block` numbers take `nbytes` bytes. dtype: PyTorch's, if it is not quantised."""

    name: str
    block: int
    nbytes: int
    dtype: torch.dtype | None = None


class Array(NamedTuple):
    """An array of the metadata: `size` values of type `kind` from byte `start` on. Decoded on use."""

    kind: int
    size: int
    start: int


class TensorEntry(NamedTuple):
    """A tensor in bytes [start, stop) of the file. The shape is PyTorch's: the last axis is contiguous."""

    type: BlockType
    shape: tuple[int, ...]
    start: int
    stop: int


TYPES = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    8: BlockType("Q8_0", 32, 34),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    39: BlockType("MXFP4", 32, 17),
    26: BlockType("I32", 1, 4, torch.int32),  # of tables, not of weights
    27: BlockType("I64", 1, 8, torch.int64),
}
# Bytes of a number that compiled kernels keep as the file has it (encoding.h, mxfp4.h).
KEPT_BYTES = {name: bits / 8 for name, bits in {
    "Q4_0": 4.75, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 9.5, "Q8_0": 8.5, "Q3_K": 9.5, "Q4_K": 4.625, "Q5_K": 5.625,
    "Q6_K": 6.5625, "IQ4_NL": 8.5, "IQ4_XS": 8.5, "MXFP4": 4.25}.items()}
# Those that differ on a device (kernels/cuda/few_bits.py).
DEVICE_BYTES = {"Q4_0": 4.5 / 8, "Q6_K": 6.625 / 8}
# Types that are refused by name.
REFUSED = {9: "Q8_1", 10: "Q2_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
           22: "IQ2_S", 24: "I8", 25: "I16", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
           40: "NVFP4"}
