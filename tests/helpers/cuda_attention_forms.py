"""The forms of attention and of the keys' weights that `compile_cuda_kernels` compiles.

A form is (kernel, types of its arguments, constants, options), and for the forms that spill the bytes that they may.
"""

from __future__ import annotations

from longdraft.kernels.cuda import jit_attention, jit_key_weights
from longdraft.kernels.cuda.attention import AttentionPlan, Splits
from longdraft.kernels.cuda.launch import padded_size

BF16, F32, I32, I64, I8, U8 = "*bf16", "*fp32", "*i32", "*i64", "*i8", "*u8"
SPLITS = Splits.of_heads(8)
CUT = {name.upper(): size for name, size in SPLITS._asdict().items()}
UNFUSED = dict(enable_fp_fusion=False)
ATTEND = dict(q=BF16, k=BF16, v=BF16, k_scale=F32, v_scale=F32, where=I64, path=I32, depths=I32, max_scores=F32,
              weight_sums=F32, value_sums=F32, table=I64, end_splits="i32", num_rows="i32",
              capacity="i32", num_splits="i32", window="i32", factor="fp32", cap="fp32")


def attend(shared, dim=128, model=BF16, keys=None, values=None, stack=0, **constants):
    """Attention over 8 KV heads of `dim` with elements of the model and of its cache, in the tiles of its launch on a
    device of so much shared memory."""
    plan = AttentionPlan(32, 8, dim, SPLITS, model == F32, shared, 64 if shared > 200 << 10 else 16)
    keys = keys or model
    shape = dict(KV_HEADS=8, GROUP=4, DIM=dim, PADDED=padded_size(dim), LANES=plan.lanes, BLOCK=plan.block,
                 HAS_WINDOW=False, HAS_CAP=False, HAS_TABLE=False, STAGES=plan.stages)
    return (jit_attention.attend_split_kernel, ATTEND | dict(q=model, k=keys, v=values or keys),
            shape | CUT | constants, dict(num_warps=plan.warps, **UNFUSED), stack)


def attention(shared):
    """shared: bytes of shared memory that a program can have"""
    yield attend(shared)
    yield attend(shared, HAS_TABLE=True)
    for values in (I8, U8):
        for has_table in (False, True):
            yield attend(shared, keys=I8, values=values, HAS_TABLE=has_table)
    for dim in (64, 80, 96, 256, 512):
        yield attend(shared, dim, stack=24 if dim == 512 else 0)  # Triton 3.4
        yield attend(shared, dim, keys=I8)
        yield attend(shared, dim, keys=I8, values=U8, stack={80: 120, 96: 72}.get(dim, 0))
    yield attend(shared, 256, HAS_CAP=True, HAS_WINDOW=True)
    for values, stack, capped in ((I8, 8, 128), (U8, 88, 136)):
        yield attend(shared, 256, keys=I8, values=values, stack=stack, HAS_TABLE=True)
        yield attend(shared, 256, keys=I8, values=values, stack=capped, HAS_TABLE=True, HAS_CAP=True, HAS_WINDOW=True)
    for dim in (80, 96, 128, 256):
        yield attend(shared, dim, F32, stack=256 if dim == 256 else 0)
    for values in (I8, U8):
        yield attend(shared, 128, F32, I8, values)
    for dim, model, has_sinks in ((64, BF16, False), (80, BF16, False), (128, BF16, False), (256, BF16, False),
                                  (128, F32, False), (64, BF16, True)):
        yield (jit_attention.merge_splits_kernel,
               dict(max_scores=F32, weight_sums=F32, value_sums=F32, where=I64, depths=I32, remainder=F32,
                    out=model, lse=F32, num_splits="i32", text_rows="i32"),
               dict(HEADS=32, DIM=dim, PADDED=padded_size(dim), SPLITS_PER_STEP=32, HAS_REMAINDER=not has_sinks,
                    HAS_SINKS=has_sinks, **CUT),
               dict(num_warps=4, **UNFUSED))
    yield jit_attention.tree_paths_kernel, dict(parents=I32, path=I32, depths=I32, stride="i32"), {}, dict(num_warps=1)


def selections():
    """The weights of the keys, for 8 queries."""
    lanes = dict(num_lanes="i32", length="i32")
    sums = dict(best=F32, sums=F32, shares=F32, weights="*fp16", out=F32, num_blocks="i32")
    form = dict(KV_HEADS=8, GROUP=4, DIM=128, PADDED=128, LANES=64, BLOCK=64, HAS_CAP=False)
    keys = sums | lanes | dict(q=BF16, k=BF16, k_scale=F32, capacity="i32", factor="fp32", cap="fp32")
    yield jit_key_weights.score_keys_kernel, keys, form, UNFUSED
    yield jit_key_weights.score_keys_kernel, keys | dict(k=I8), form, UNFUSED
    yield (jit_key_weights.score_keys_kernel, keys, form | dict(DIM=256, PADDED=256, LANES=16, BLOCK=32, HAS_CAP=True),
           dict(num_warps=8))
    yield jit_key_weights.share_of_blocks_kernel, sums, dict(BLOCK=1024), UNFUSED
    yield jit_key_weights.sum_weights_kernel, sums | lanes, dict(LANES=64, BLOCK=64), UNFUSED
