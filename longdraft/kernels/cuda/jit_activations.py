"""Triton kernels for activations and gates.

    ACTIVATION  0: SiLU; 1: GELU, by its tanh formula; 2: the clamped SwiGLU of gpt-oss, with alpha and limit
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_rows import rounded, sum_of_parts


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)). Where exp overflows to infinity, the result is 0, which is correct."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate))."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate))


@triton.jit
def gated(gate, up, like, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation of gate, times up, before its last rounding; both rounded to the type of the pointer `like`."""
    if ACTIVATION == 2:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit,
                        propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * (gate * sigmoid(gate * alpha))
    elif ACTIVATION == 1:  # x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u))
        cubic = gate + 0.044715 * (gate * gate * gate)
        return rounded(tl.div_rn(gate, 1.0 + tl.exp(-1.5957691216057308 * cubic)), like) * up
    else:
        return rounded(silu(gate), like) * up


@triton.jit
def gated_sums(parts, row, column, scale, bias, out, num_rows, alpha, limit, WIDTH: tl.constexpr,
               ACTIVATION: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """`gated`, from the partial sums of a product [R, 2 WIDTH]: writes these columns of a row of out [R, WIDTH]."""
    mask = column < WIDTH
    num = num_rows.to(tl.int64) * (2 * WIDTH)
    at = row * (2 * WIDTH) + column
    gate = rounded(sum_of_parts(parts, at, column, mask, scale, bias, num, PARTS, HAS_SCALE, HAS_BIAS), out)
    up = rounded(sum_of_parts(parts, at + WIDTH, column + WIDTH, mask, scale, bias, num, PARTS, HAS_SCALE, HAS_BIAS),
                 out)
    tl.store(out + row * WIDTH + column, gated(gate, up, out, alpha, limit, ACTIVATION).to(out.dtype.element_ty),
             mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gated_parts_kernel(parts, scale, bias, out, num_rows, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                       ACTIVATION: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
                       HAS_BIAS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """`gated`, from the partial sums of a product [R, 2 WIDTH]: out [R, WIDTH]. Grid (R, WIDTH / BLOCK)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gated_sums(parts, row, column, scale, bias, out, num_rows, alpha, limit, WIDTH, ACTIVATION, PARTS, HAS_SCALE,
               HAS_BIAS)


@triton.jit
def gated_halves_kernel(gate_up, out, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                        ACTIVATION: tl.constexpr):
    """`gated`, from rows [R, 2 WIDTH] in the model's dtype: out [R, WIDTH]. Grid (R, WIDTH / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row * (2 * WIDTH) + column
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, gated(gate, up, out, alpha, limit, ACTIVATION).to(out.dtype.element_ty),
             mask=mask)


@triton.jit(do_not_specialize=["stride"])
def sigmoid_gate_kernel(x, gates, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """x * sigmoid(gates) for x [R, WIDTH] and gates whose rows are `stride` apart. Grid (R, WIDTH / BLOCK)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (value * sigmoid(gate)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num"])
def squash_kernel(x, out, num, cap, BLOCK: tl.constexpr, HAS_CAP: tl.constexpr):
    """Of each of `num` elements float32: cap tanh(x / cap) where HAS_CAP, else the sigmoid. Grid (num / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    value = tl.load(x + at, mask=mask, other=0.0)
    if HAS_CAP:
        value = cap * (2.0 * sigmoid(2.0 * tl.div_rn(value, cap)) - 1.0)
    else:
        value = sigmoid(value)
    tl.store(out + at, value, mask=mask)
