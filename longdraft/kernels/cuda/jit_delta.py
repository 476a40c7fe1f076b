"""Triton kernels for the rows of a gated delta net (longdraft/kernels/delta.py), in a tree or a chain.

    convolve_kernel    q, k and v of each row, from its inputs and those of the rows before it on its path
    delta_rule_kernel  the states along the path, and the outputs
    gated_norm_kernel  the norm of each head, times silu(z)

A program of the rule follows the path of one row from the committed state on, row after row, with its part of the state
in registers. So a row of a tree passes the same operations as in plain decoding, and no state is kept for a row. The
programs of rows that the next row continues end at once: the program after them computes their outputs. A chain is
therefore read once, and a prompt too is computed row after row.

    path    [R, stride] int32: the row at each depth of a row's path; of a chain one row, and the stride is 0
    depths  [R] int32
    sizes   channels C = 2 Hk Dk + Hv Dv: the heads of q, of k, of v

Where HAS_TABLE, what belongs to a layer or to a text is in device memory, so that a CUDA graph serves the states of all
texts. `texts` texts have `num_rows` rows each, and a tree of their own; a launch computes as many layers as its grid
has, whose rows are `..._stride` elements apart.

    count   int64 [texts]: rows of each text, which its padding rows follow; 0 of a padding text, which reads the states
            of another one
    table   int64 [L, texts, ENTRY], the addresses of each layer and text: history and matrix before the rows, history
            and matrix after them, conv, decay, bias; of a chain, history and matrix that its next row writes
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_activations import sigmoid, silu
from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_rows import rounded

_L2_EPS = tl.constexpr(1e-6)  # as in longdraft/kernels/delta.py
ENTRY = tl.constexpr(9)


@triton.jit
def _address(entry, place: tl.constexpr, like):
    """A pointer that an entry of the table holds, of the dtype of `like`. Allocations are aligned to 16 bytes."""
    return tl.multiple_of(tl.load(entry + place).to(like.dtype), 16)


@triton.jit
def _of_text(table, count, num_rows, texts, layer):
    """Where the table is used: the first row of this program's text, the text's entry, and its last row."""
    text = tl.program_id(0) // num_rows
    entry = table + (layer * texts + text) * ENTRY
    return (text * num_rows).to(tl.int64), entry, tl.load(count + text).to(tl.int32) - 1


@triton.jit(do_not_specialize=["num_rows", "texts", "stride"])
def convolve_kernel(mixed, history, path, depths, conv, out, new_history, table, count, num_rows, texts, stride,
                    mixed_stride, out_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
                    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
                    HAS_TABLE: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Convolution and SiLU of mixed [R, C]: out [R, C] float32, in which q and k of each head have length 1.

    history, new_history  [WIDTH - 1, C]: the inputs before the rows; those before whatever follows the last row
    conv                  [WIDTH, C] float32

    Grid (R, 2 Hk + Hv, L): a program computes one head of one row. R is num_rows, of each text.
    """
    wait_for_inputs(IS_CHAINED)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    last = num_rows - 1
    if HAS_TABLE:
        first, entry, last = _of_text(table, count, num_rows, texts, layer)
        history, new_history, conv = _address(entry, 0, mixed), _address(entry, 2, mixed), _address(entry, 4, out)
        row -= first.to(tl.int32)
        mixed += first * CHANNELS
        out += first * CHANNELS
        path += first * stride
        depths += first
    mixed += layer * mixed_stride
    out += layer * out_stride
    is_value = head >= 2 * KEY_HEADS
    place = tl.arange(0, PADDED)
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    mask = place < size
    column = place + tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
    depth = tl.load(depths + row)
    total = tl.zeros([PADDED], tl.float32)
    for step in tl.static_range(WIDTH):
        at = depth - (WIDTH - 1 - step)
        node = tl.load(path + row * stride + at, mask=at >= 0, other=0).to(tl.int64)
        of_rows = tl.load(mixed + node * CHANNELS + column, mask=place < tl.where(at >= 0, size, 0), other=0.0)
        before = tl.load(history + (WIDTH - 1 + at) * CHANNELS + column, mask=place < tl.where(at < 0, size, 0),
                         other=0.0)
        value = tl.where(at >= 0, of_rows, before)
        if step > 0:
            tl.store(new_history + (step - 1) * CHANNELS + column, value,
                     mask=place < tl.where(row == last, size, 0))
        total += tl.load(conv + step * CHANNELS + column, mask=mask, other=0.0) * value.to(tl.float32)
    active = rounded(silu(rounded(total, mixed)), mixed)
    if head < 2 * KEY_HEADS:
        active = active * tl.rsqrt(tl.sum(active * active, 0) + _L2_EPS)
        active = tl.div_rn(active, tl.where(head < KEY_HEADS, tl.sqrt_rn(KEY_DIM * 1.0), 1.0))
    tl.store(out + node * CHANNELS + column, active, mask=mask)  # the last node of a row's path is the row itself


@triton.jit(do_not_specialize=["num_rows", "texts", "stride"])
def delta_rule_kernel(values, gates, decay, bias, path, depths, state, new_state, out, table, count, num_rows, texts,
                      stride, values_stride, gates_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
                      KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                      BLOCKS: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_OUTPUT: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """Some columns of a value head's states along the path of one row.

    values            [R, C] float32, from `convolve_kernel`
    gates             [R, 2 Hv] float32: b and a
    decay, bias       [Hv] float32
    state, new_state  [Hv, Dk, Dv] float32: before the rows, and after the last one
    out               [R, Hv Dv]; not written unless HAS_OUTPUT

    ROWS is KEY_DIM, padded; BLOCKS is VALUE_DIM / COLUMNS. Grid (R, Hv, L BLOCKS).
    """
    wait_for_inputs(IS_CHAINED)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row, head, layer = tl.program_id(0), tl.program_id(1), (tl.program_id(2) // BLOCKS).to(tl.int64)
    last = num_rows - 1
    if HAS_TABLE:
        first, entry, last = _of_text(table, count, num_rows, texts, layer)
        state, new_state = _address(entry, 1, values), _address(entry, 3, values)
        decay, bias = _address(entry, 5, values), _address(entry, 6, values)
        row -= first.to(tl.int32)
        values += first * CHANNELS
        gates += first * (2 * VALUE_HEADS)
        path += first * stride
        depths += first
        if HAS_OUTPUT:
            out += first * (VALUE_HEADS * VALUE_DIM)
    depth = tl.load(depths + row)
    values += layer * values_stride
    gates += layer * gates_stride
    is_last = row == last
    next_row = tl.where(is_last | (row + 1 == num_rows), row, row + 1)
    follows = tl.load(depths + next_row) == depth + 1
    follows = follows & (tl.load(path + next_row * stride + depth, mask=follows, other=-1) == row)
    if HAS_OUTPUT:  # a padding row has an output that is finite: experts are chosen for it
        value = tl.program_id(2) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        zeros = tl.zeros([COLUMNS], tl.float32).to(out.dtype.element_ty)
        tl.store(out + (row.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + value, zeros,
                 mask=value < tl.where(row > last, VALUE_DIM, 0))
    if (is_last | (follows == 0)) & (row <= last):
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        dim = tl.arange(0, ROWS)
        is_dim = dim < KEY_DIM
        column = tl.program_id(2) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < VALUE_DIM
        at = (head * KEY_DIM + dim)[:, None] * VALUE_DIM + column[None, :]
        is_inside = is_dim[:, None] & is_column[None, :]
        matrix = tl.load(state + at, mask=is_inside, other=0.0)
        rate, shift = tl.load(decay + head), tl.load(bias + head)
        for place in range(depth + 1):
            node = tl.load(path + row * stride + place).to(tl.int64)
            of_row = values + node * CHANNELS
            q = tl.load(of_row + key_head * KEY_DIM + dim, mask=is_dim, other=0.0)
            k = tl.load(of_row + (KEY_HEADS + key_head) * KEY_DIM + dim, mask=is_dim, other=0.0)
            v = tl.load(of_row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column, mask=is_column, other=0.0)
            beta = sigmoid(tl.load(gates + node * (2 * VALUE_HEADS) + head))
            a = tl.load(gates + node * (2 * VALUE_HEADS) + VALUE_HEADS + head) + shift
            softplus = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(a)))
            matrix = matrix * tl.exp(rate * softplus)
            change = (v - tl.sum(matrix * k[:, None], 0)) * beta
            matrix = matrix + k[:, None] * change[None, :]
            if HAS_OUTPUT:
                output = tl.sum(matrix * q[:, None], 0)
                is_own = node == row - (depth - place)  # rows that lead to this one without a gap
                tl.store(out + (node * VALUE_HEADS + head) * VALUE_DIM + column, output.to(out.dtype.element_ty),
                         mask=column < tl.where(is_own, VALUE_DIM, 0))
        if is_last:
            tl.store(new_state + at, matrix, mask=is_inside)


@triton.jit(do_not_specialize=["z_stride"])
def gated_norm_kernel(x, weight, z, out, z_stride, eps, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """The RMS norm of each head of x [R, HEADS DIM], times silu(z): out, of the same shape. Grid (R, HEADS).

    weight  [DIM] float32; z: rows that are z_stride elements apart
    """
    wait_for_inputs(IS_CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PADDED)
    mask = place < DIM
    at = row * (HEADS * DIM) + head * DIM + place
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.div_rn(tl.sum(value * value, 0), DIM * 1.0) + eps)
    value = rounded(tl.load(weight + place, mask=mask, other=0.0) * rounded(value, x), x)
    gate = tl.load(z + row * z_stride + head * DIM + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (value * silu(gate)).to(out.dtype.element_ty), mask=mask)
