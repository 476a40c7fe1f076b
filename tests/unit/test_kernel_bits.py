"""Kernels of different processors that give the same bits: what AVX2 and ARM compute from one set of inputs.

The hashes in golden/kernel_bits.json are those of `avx2`. `avxvnni`, `avx512vnni`, `armv8` and `neon` must give them
too, and so must `neon_bf16` where no products of bfloat16 are added up: its instructions round these sums to odd.
Inputs are made from whole numbers, because PyTorch's random numbers may differ between processors. Where the C library
computes a number (logarithms, delta layers), bits are not compared.

    python tests/unit/test_kernel_bits.py avx2 neon_bf16    prints the hashes of these variants
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longdraft import kernels
from longdraft.kernels import KV, Kernels
from longdraft.kernels.formats.groups import GroupedWeight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight

GOLDEN = Path(__file__).parent / "golden" / "kernel_bits.json"
SAME_BITS = ("avx2", "avxvnni", "avx512vnni", "armv8", "neon")
TO_ODD = "neon_bf16"
DTYPES = ("float32", "bfloat16")

# bits, halves, least values, common scales: the kinds of weights in groups (longdraft/kernels/formats/groups.py)
KINDS = {"4 bits": (4, False, True, False), "5 bits": (5, False, False, False), "8 bits": (8, False, False, False),
         "8 bits, halves": (8, True, True, False), "4 bits, common": (4, False, True, True),
         "5 bits, common": (5, False, True, True), "6 bits, common": (6, True, False, True)}
ROWS, OUTPUTS, WIDTH = 19, 70, 256


class Inputs:
    """Numbers that are the same on every machine."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._draw, self._dtype = np.random.default_rng(5), dtype

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers from `low` to below `high`, int32."""
        return torch.from_numpy(self._draw.integers(low, high, shape).astype(np.int32))

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers of 2^-6 to 2^2 and both signs."""
        bits = self.whole(0, 2, *shape) << 31 | self.whole(121, 129, *shape) << 23 | self.whole(0, 1 << 23, *shape)
        return bits.view(torch.float32).to(dtype or self._dtype)

    def groups(self, kind: str) -> GroupedWeight:
        bits, has_halves, has_least, is_common = KINDS[kind]
        values = self.whole(0, 1 << bits, OUTPUTS, WIDTH).to(torch.uint8)
        number = (lambda *shape: self.whole(-128, 128, *shape).to(torch.int8)) if is_common else (
            lambda *shape: self.floats(*shape, dtype=torch.float16))
        shape = (OUTPUTS, WIDTH // 32)
        scale, least = number(*shape, *((2,) if has_halves else ())), number(*shape) if has_least else None
        common = self.floats(OUTPUTS, WIDTH // 256, 2 if has_least else 1, dtype=torch.float16) if is_common else None
        return GroupedWeight(values, scale, least, bits, common)

    def mxfp4(self) -> Mxfp4Weight:
        return Mxfp4Weight(self.whole(0, 256, OUTPUTS, WIDTH // 2).to(torch.uint8),
                           self.whole(120, 130, OUTPUTS, WIDTH // 32).to(torch.uint8))


def results(ops: Kernels) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """What is computed: its name, and the computation."""
    draw = Inputs(ops.dtype)
    x, narrow = draw.floats(ROWS, WIDTH), draw.floats(ROWS, 130)
    for name, rows, width in (("", x, WIDTH), (" of 130 inputs", narrow, 130)):
        weight, bias = draw.floats(OUTPUTS, width), draw.floats(OUTPUTS)
        for quantize in ("none", "int8", "int4"):
            packed = ops.pack(weight, bias, quantize=quantize)
            yield f"linear {quantize}{name}", lambda rows=rows, packed=packed: ops.linear(rows, packed, keep_float=True)
    for kind in KINDS:
        weight = ops.pack(draw.groups(kind))
        yield f"linear {kind}", lambda weight=weight: ops.linear(x, weight, keep_float=True)
    mxfp4 = ops.pack_mxfp4(draw.mxfp4())
    yield "linear mxfp4", lambda: ops.linear(x, mxfp4, keep_float=True)
    yield "rounded", lambda: ops.linear(x, mxfp4)
    norm, pairs, heads = draw.floats(WIDTH), draw.floats(ROWS, 192), draw.floats(ROWS, 4, 64)
    turns = draw.floats(ROWS, 32, dtype=torch.float32), draw.floats(ROWS, 32, dtype=torch.float32)
    yield "norm", lambda: ops.rms_norm(x, norm, 1e-5)
    yield "swiglu", lambda: ops.swiglu(pairs)
    yield "geglu", lambda: ops.geglu(pairs)
    yield "clamped swiglu", lambda: ops.clamped_swiglu(pairs, 1.75, 3.5)
    yield "rope", lambda: ops.rope(heads, *turns)
    for dim, cap in ((64, 0.0), (80, 0.0), (64, 30.0)):
        cache = [draw.floats(700, 2, dim) for _ in range(2)]
        rows, q = [draw.floats(ROWS, 2, dim) for _ in range(2)], draw.floats(ROWS, 8, dim)

        def attention(dim=dim, cap=cap, cache=cache, rows=rows, q=q) -> torch.Tensor:
            store = ops.new_store(2, dim, cap)
            store.reserve(700 + ROWS)
            store.write(0, *cache)
            parents = torch.tensor([row // 2 - 1 if row % 3 else row - 1 for row in range(ROWS)], dtype=torch.int32)
            return ops.attention(q, KV(store, 700, *rows), parents, 0).output

        yield f"attention {dim}{' capped' if cap else ''}", attention


def sha256(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def hashes(variant: str, dtype: str) -> dict[str, str]:
    return {name: sha256(compute()) for name, compute in results(kernels.choose("cpu", dtype, variant))}


def recorded(section: str, dtype: str) -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())[section].get(dtype, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [*SAME_BITS, TO_ODD])
def test_avx2_and_arm_give_the_same_bits(variant, dtype):
    if variant not in kernels.available():
        pytest.skip(f"this processor cannot run {variant}")
    expected = recorded("avx2", dtype) | (recorded(TO_ODD, dtype) if variant == TO_ODD else {})
    assert hashes(variant, dtype) == expected


def test_only_sums_of_products_of_bfloat16_round_to_odd():
    own = recorded(TO_ODD, "bfloat16")
    assert not recorded(TO_ODD, "float32")
    assert own and all(name.startswith(("linear none", "linear int8", "linear mxfp4", "attention")) for name in own)


if __name__ == "__main__":
    print(json.dumps({name: {dtype: hashes(name, dtype) for dtype in DTYPES} for name in sys.argv[1:]}, indent=1))
