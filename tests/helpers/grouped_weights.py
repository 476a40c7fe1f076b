"""Weights in groups of every kind that kernels have (longdraft/kernels/formats/groups.py), with any numbers."""

from __future__ import annotations

import torch

from longdraft.kernels.formats.groups import GroupedWeight

WIDTH = 512  # inputs of most weights: two common scales

# bits, halves, least values, common scales; and bits of a number, for the document
KINDS = {"4 bits": (4, False, True, False, 5), "5 bits": (5, False, False, False, 5.5),
         "8 bits": (8, False, False, False, 8.5), "halves": (8, True, True, False, 9.5),
         "4 bits, common": (4, False, True, True, 4.625), "5 bits, common": (5, False, True, True, 5.625),
         "6 bits, common": (6, True, False, True, 6.5625)}


def numbers(kind: str, rows: int = 70, columns: int = WIDTH) -> GroupedWeight:
    """Any numbers of a kind, the greatest and the least among them."""
    generator = torch.Generator().manual_seed(rows + columns)
    bits, has_halves, has_least, is_common, _ = KINDS[kind]
    values = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.int32).to(torch.uint8)
    values[1], values[2] = 0, (1 << bits) - 1
    shape = (rows, columns // 32)
    scale = torch.randn(*shape, *((2,) if has_halves else ()), generator=generator) * 0.01
    least = torch.randn(shape, generator=generator).half() if has_least else None
    if not is_common:
        return GroupedWeight(values, scale.half(), least, bits)
    common = torch.randn(rows, columns // 256, 2 if has_least else 1, generator=generator) * 0.001
    whole = (scale * 3000).clamp(-128, 127).to(torch.int8)
    return GroupedWeight(values, whole, None if least is None else (least * 20).clamp(0, 63).to(torch.int8), bits,
                         common.half())
