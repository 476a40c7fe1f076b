"""Compile every Triton kernel for a compute capability with the options of its launch. Needs no device.

    python tests/helpers/compile_cuda_kernels.py 90                              # all forms of all kernels
    python tests/helpers/compile_cuda_kernels.py 80 90 120 few_rows_kernel       # the first form of some

It prints an object of JSON for each form of a kernel: its name and form, bytes of shared memory, fused multiply-adds,
bytes of stack and how many the form may have, registers, whether products and reductions come in pairs, a checksum of
these. The bytes of stack are those that the assembler spills.
PTX does not show them, so they are read from the machine code. Pairs are for attention, whose two loops must compute a
block alike; checksums for its two forms, for one text and for several.

The sizes are those of Llama-3.1-8B (4 query heads per KV head), with 64 rows per tile.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib

import triton
import triton.language as tl
from cuda_attention_forms import BF16, F32, I8, I32, I64, U8, UNFUSED, attention, selections
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longdraft.kernels.cuda import (
    jit_activations,
    jit_choice,
    jit_delta,
    jit_drafting,
    jit_experts,
    jit_few_bits,
    jit_kv_store,
    jit_linear,
    jit_remainder,
    jit_rows,
    jit_support,
)
from longdraft.kernels.cuda.few_bits import Form

F64 = "*fp64"
# Bytes of shared memory that a program can have, by compute capability: A100; RTX 30, 40; H100; RTX 50.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
PARTS = dict(PARTS=4, HAS_SCALE=True, HAS_BIAS=True)
SUMS = dict(parts=F32, scale=F32, bias=F32, num_rows="i32")
VOCABULARY = dict(vocabulary="i32")
LIMITS = dict(settings=F64, cuts=I64, floors=I64, leasts=F64, bests=F32, num_blocks="i32")
PLAIN = dict(BITS=0, FORM=0, OFFSET=0)  # of an embedding table
# Weights of few bits: Int4Weight, with zero points and without, then the kinds of GroupedWeight with MXFP4; last Q6_K.
FORMS = [dict(BITS=bits, FORM=form, OFFSET=offset) for bits, form, offset in (
    (4, 3, 0), (4, 6, 0), (4, 0, 8), (4, 4, 0), (5, 0, 16), (8, 0, 128), (8, 5, 128), (4, 1, 0), (5, 1, 0), (4, 7, 0),
    (6, 2, 32))]
FILTERS = dict(HAS_CUT=True, HAS_MIN_P=True, HAS_ETA=True, HAS_FLOOR=True)
IN_BLOCKS = dict(BLOCK=1024, BLOCKS=128)


def kernels(shared):
    """(kernel, types of its arguments, constants, options). The usual form of a kernel comes first."""
    yield from attention(shared)
    linear = dict(x=BF16, weight=BF16, parts=F32, num_rows="i32")
    tile = dict(OUT=4096, INNER=4096, ROWS=64, COLUMNS=64, BLOCK=128, SPLITS=4, PREFETCHED=256)
    yield jit_linear.few_rows_kernel, linear, tile, dict(num_warps=4, num_stages=3)
    yield jit_linear.few_rows_kernel, linear | dict(weight="*i8"), tile, dict(num_warps=4, num_stages=3)
    yield (jit_linear.few_rows_kernel, linear, tile | dict(OUT=128256, COLUMNS=128, BLOCK=64, SPLITS=1),
           dict(num_warps=4, num_stages=4))
    clamp = dict(alpha="fp32", limit="fp32")
    yield (jit_linear.gated_rows_kernel, dict(x=BF16, weight=BF16, bias=F32, out=BF16, num_rows="i32") | clamp,
           dict(WIDTH=14336, INNER=4096, ROWS=16, COLUMNS=64, BLOCK=128, HAS_BIAS=True, PREFETCHED=256, ACTIVATION=0),
           dict(num_warps=4, num_stages=3 if shared > 110 << 10 else 2))
    sizes = dict(OUT=4096, INNER=4096, BLOCKS=32, COLUMNS=128)
    for form in FORMS:
        yield (jit_few_bits.few_bits_kernel, dict(x=BF16, weight=I32, parts=F32, num_rows="i32"),
               form | sizes | dict(ROWS=16, SPLITS=8, STAGES=3, STRIDE=4096),
               dict(num_warps=4, **Form(*form.values()).registers(), **UNFUSED))
        yield jit_few_bits.dequantise_kernel, dict(weight=I32, out=BF16), form | sizes | dict(ROWS=8), UNFUSED
    yield (jit_few_bits.table_rows_kernel, dict(ids=I64, weight=I32, out=BF16),
           FORMS[-1] | dict(INNER=4096, BLOCKS=32, COLUMNS=128, BLOCK=1024), UNFUSED)
    embed = dict(tokens=I32, table="*i8", scale=F32, x=BF16, factor="fp32")
    yield (jit_rows.embed_rows_kernel, embed,
           dict(HIDDEN=4096, BLOCK=1024, HAS_SCALE=True, HAS_FACTOR=True, **PLAIN), UNFUSED)
    yield (jit_rows.embed_rows_kernel, embed | dict(table=I32),
           dict(HIDDEN=4096, BLOCK=1024, HAS_SCALE=False, HAS_FACTOR=True, **FORMS[-1]), UNFUSED)
    for cut in (4096, 3000):
        yield (jit_rows.sum_parts_kernel, SUMS | dict(out=F32, rest=F32),
               dict(WIDTH=4096, CUT=cut, BLOCK=1024, **PARTS), {})
    yield (jit_rows.rms_norm_kernel, dict(x=BF16, weight=BF16, out=BF16, eps="fp32"),
           dict(WIDTH=4096, PADDED=4096, ROUNDS_ONCE=False), dict(num_warps=8))
    added = SUMS | dict(x=BF16, own_norm=BF16, next_norm=BF16, x_out=BF16, out=BF16, factor="fp32", scalar="fp32",
                        eps="fp32")
    form = dict(WIDTH=4096, PADDED=4096, HAS_FACTOR=True, HAS_SCALAR=True, NORMS_OWN=True, NORMS_NEXT=True,
                ROUNDS_ONCE=False) | PARTS
    yield jit_rows.add_and_norm_kernel, added, form, dict(num_warps=8, **UNFUSED)
    yield (jit_rows.add_and_norm_kernel, added | dict(parts=BF16),
           form | dict(PARTS=1, HAS_SCALE=False, HAS_BIAS=False), dict(num_warps=8, **UNFUSED))
    for activation in range(3):
        form = dict(WIDTH=14336, BLOCK=1024, ACTIVATION=activation)
        yield jit_activations.gated_parts_kernel, SUMS | dict(out=BF16) | clamp, form | PARTS, {}
        yield jit_activations.gated_halves_kernel, dict(gate_up=BF16, out=BF16) | clamp, form, {}
    yield (jit_activations.sigmoid_gate_kernel, dict(x=BF16, gates=BF16, out=BF16, stride="i32"),
           dict(WIDTH=4096, BLOCK=1024), {})
    yield (jit_activations.squash_kernel, dict(x=F32, out=F32, num="i32", cap="fp32"), dict(BLOCK=1024, HAS_CAP=True),
           {})
    yield (jit_rows.rope_kernel, dict(x=BF16, cos=F32, sin=F32, out=BF16), dict(HEADS=32, HALF=64, PADDED=64),
           dict(num_warps=1))
    rotate = SUMS | dict(q_norm=BF16, k_norm=BF16, v_norm=BF16, cos=F32, sin=F32, where=I64, content=BF16, q=BF16,
                         k=BF16, v=BF16, gate=BF16, k_store=BF16, v_store=BF16, k_scale=F32, v_scale=F32, table=I64,
                         capacity="i32", text_rows="i32", eps="fp32", factor="fp32")
    form = dict(HEADS=32, KV_HEADS=8, GATES=0, HALF=64, PADDED=64, ALL_PADDED=4096, NORMS=0, HAS_V_NORM=False,
                ROTATES=True, TURNS=64, Q_TURN=0, K_TURN=0, KV_ROW=1024, KV_HEAD=128, ROUNDS_ONCE=False,
                HAS_TABLE=False) | PARTS
    yield jit_rows.finish_qkv_kernel, rotate, form, dict(num_warps=1)
    for values in (I8, U8):
        yield (jit_rows.finish_qkv_kernel, rotate | dict(k_store=I8, v_store=values),
               form | dict(NORMS=1, HAS_TABLE=True), dict(num_warps=1))
    # Gates and heads of 256; two rotations, norms of the values and heads of 512; keys of another layer; whole norms
    for changes in (dict(HEADS=16, KV_HEADS=2, GATES=16, HALF=128, PADDED=128, NORMS=1),
                    dict(HEADS=16, KV_HEADS=4, HALF=256, PADDED=256, NORMS=1, HAS_V_NORM=True, TURNS=512, K_TURN=256),
                    dict(KV_HEADS=0, NORMS=1), dict(NORMS=2)):
        yield jit_rows.finish_qkv_kernel, rotate, form | changes, dict(num_warps=1)
    yield (jit_rows.map_remainder_kernel, dict(content=BF16, table=I64, remainder=F32, text_rows="i32"),
           dict(HEADS=32, DIM=128, COLUMNS=32, BLOCK=128), {})
    numbers = dict.fromkeys(("num_texts", "k_stride", "v_stride", "k_row_stride", "v_row_stride", "k_head_stride",
                             "v_head_stride"), "i32")
    for key, value in ((tl.bfloat16, tl.bfloat16), (tl.int8, tl.int8), (tl.int8, tl.uint8)):
        elements = dict(KEY=key, VALUE=value)
        scatter = dict(k=BF16, v=BF16, table=I64, rows=I64, targets=I64, texts=I32) | numbers
        for has_texts in (False, True):
            yield (jit_kv_store.scatter_rows_kernel, scatter,
                   dict(HALF=64, PADDED=64, HAS_TEXTS=has_texts, TARGET_STRIDE=1, **elements), dict(num_warps=1))
        yield (jit_kv_store.move_rows_kernel, dict(table=I64, moves=I64, turns=F32),
               dict(HALF=64, PADDED=64, DTYPE=tl.bfloat16, TEXTS=1, **elements), dict(num_warps=1))
        for is_run in (False, True):
            yield (jit_kv_store.copy_rows_kernel,
                   dict(sources=I64, targets=I64, positions=I64, count="i32", start="i32", run_start="i32"),
                   dict(KV_HEADS=8, DIM=128, PADDED=128, BLOCK=32, IS_RUN=is_run, **elements), dict(num_warps=8))

def choices_of_texts():
    rows = dict(logits=F32, entries=I64, numbers=F64, texts=I32, depths=I32)
    window = rows | dict(found=I32, values=F32, window="i32", tokens=I32, path=I32, path_stride="i32") | VOCABULARY
    blocks = rows | dict(bests=F32, scores=F64, ids=I32, num_blocks="i32") | VOCABULARY
    yield jit_choice.append_tokens_kernel, dict(entries=I64, fresh=I32), dict(BLOCK=16), dict(num_warps=1)
    yield jit_choice.read_window_kernel, window, dict(BLOCK=1024), UNFUSED
    yield jit_choice.penalise_kernel, window, dict(BLOCK=1024), UNFUSED
    yield jit_choice.ban_kernel, rows | VOCABULARY, dict(BLOCK=16), UNFUSED
    yield jit_choice.add_bias_kernel, rows | VOCABULARY, dict(BLOCK=1024), UNFUSED
    yield jit_choice.read_filters_kernel, rows | dict(settings=F64, most=I64, fewest=I64), {}, dict(num_warps=1)
    yield jit_choice.block_maxima_kernel, blocks, dict(BLOCK=1024), {}
    for filters in (FILTERS, dict.fromkeys(FILTERS, False) | dict(HAS_MIN_P=True)):
        for width in (1, 2):
            yield (jit_choice.best_in_blocks_kernel, blocks | LIMITS | dict(ahead="i32"),
                   IN_BLOCKS | filters | dict(WIDTH=width, HAS_NOISE=True), UNFUSED, 8)  # with Triton 3.7
    yield jit_choice.choose_tokens_kernel, blocks | dict(choices=I32), dict(BLOCKS=128), {}
    yield (jit_choice.walk_trees_kernel, dict(choices=I32, tokens=I32, parents=I32, entries=I64, path=I32, targets=I64,
                                              outcome=I32, num_rows="i32"),
           dict(BLOCK=64), dict(num_warps=1))


def drafting():
    texts = dict(entries=I64, numbers=F64, scores=F64, ids=I32)
    yield (jit_drafting.rank_kernel, dict(bests=F32, outcome=I64, num_blocks="i32") | texts,
           dict(BLOCKS=128, CANDIDATES=256, WIDTH=2), UNFUSED)
    yield (jit_drafting.begin_place_kernel,
           dict(entries=I64, table="*i8", scale=F32, rotations=F32, x=BF16, cos=F32, sin=F32, factor="fp32"),
           dict(HIDDEN=4096, HALF=64, PADDED=64, BLOCK=1024, HAS_SCALE=True, HAS_FACTOR=True, **PLAIN), UNFUSED)
    yield jit_drafting.end_place_kernel, dict(entries=I64, where=I64, outcome=I64), {}, dict(num_warps=1)


def support():
    rows = dict(logits=F32, goals=I64, keys=I64, before=I64, sums=I64) | LIMITS | VOCABULARY
    search, filters = IN_BLOCKS | dict(BY_MASS=True, HAS_CUT=True), IN_BLOCKS | FILTERS
    yield jit_support.search_level_kernel, rows, search | dict(LEVEL=3), UNFUSED
    yield jit_support.end_search_kernel, rows | dict(found=I64), search, UNFUSED
    yield jit_support.support_sums_kernel, rows, filters | dict(DIVISOR=2), UNFUSED
    yield jit_support.top_p_goal_kernel, rows, dict(BLOCKS=128), UNFUSED
    yield jit_support.eta_kernel, rows, dict(BLOCKS=128), UNFUSED
    yield jit_support.support_orders_kernel, rows | dict(orders=I64), filters, UNFUSED


def hybrid():
    """Of a Qwen3-Next: 16 key heads and 32 value heads of 128."""
    heads = dict(KEY_HEADS=16, VALUE_HEADS=32, KEY_DIM=128, VALUE_DIM=128)
    tree = dict(path=I32, depths=I32, table=I64, count=I64, num_rows="i32", texts="i32", stride="i32")
    convolve = dict(mixed=BF16, history=BF16, conv=F32, out=F32, new_history=BF16, mixed_stride="i32", out_stride="i32")
    rule = dict(values=F32, gates=F32, decay=F32, bias=F32, state=F32, new_state=F32, out=BF16, values_stride="i32",
                gates_stride="i32")
    for has_table, has_output in ((False, True), (True, True), (True, False)):
        form = heads | dict(HAS_TABLE=has_table)
        yield jit_delta.convolve_kernel, convolve | tree, form | dict(PADDED=128, WIDTH=4), dict(num_warps=1)
        yield (jit_delta.delta_rule_kernel, rule | tree,
               form | dict(ROWS=128, COLUMNS=32, BLOCKS=4, HAS_OUTPUT=has_output), dict(num_warps=4))
    yield (jit_delta.gated_norm_kernel, dict(x=BF16, weight=F32, z=BF16, out=BF16, z_stride="i32", eps="fp32"),
           dict(HEADS=32, DIM=128, PADDED=128), dict(num_warps=1))


def remainders():
    """Of the upkeep of a partial cache."""
    held, rows = dict(x=F32, y=F32), dict(numbers=I64, rows=I32)
    sums = dict(gram=F32, cross=F32, inverse=F32, maps=F32, base=F32)
    for dim in (64, 128):
        form = dict(DIM=dim, PADDED=dim)
        yield (jit_remainder.gather_queries_kernel, rows | dict(queries=BF16, num_rows="i32"),
               dict(WIDTH=32 * dim, BLOCK=1024), UNFUSED)
        for count in (1, 32):
            yield (jit_remainder.hold_rows_kernel,
                   rows | held | dict(part_output=BF16, part_lse=F32, negligible="fp32"),
                   form | dict(HEADS=32, ROWS=count, ROOM=64), UNFUSED)
        yield (jit_remainder.correct_base_kernel, rows | held | dict(base=F32, maps=F32, last_error="fp32"),
               form | dict(COLUMNS=32, ROOM=64), UNFUSED)
        yield (jit_remainder.add_held_rows_kernel, held | sums | dict(num_held="i32", decay_rows="fp32"),
               dict(N=dim + 1, ROOM=64, TILE=32, BLOCK=16), UNFUSED)
        yield (jit_remainder.invert_gram_kernel,
               sums | dict.fromkeys(("ridge_share", "ridge_rows", "least_spread"), "fp32"), form,
               dict(num_warps=8 if dim > 64 else 4))
        yield (jit_remainder.solve_maps_kernel, sums | dict(log_zero="fp32"), form | dict(COLUMNS=32, BLOCK=16),
               UNFUSED)


def mixtures():
    """Of a Qwen3-30B-A3B: 8 of 128 experts of 768."""
    yield (jit_experts.route_kernel, SUMS | dict(like=BF16, scales=F32, experts=I64, weights=F32), PARTS |
           dict(NUM=128, PADDED=128, CHOSEN=8, PADDED_CHOSEN=16, NORMALISES=True, HAS_SCALES=True, ROUNDS=True),
           dict(num_warps=1))
    tiles = dict(members=I32, tile_experts=I32, first_tile=I32, counts=I32, num_tiles=I32)
    yield (jit_experts.group_kernel, dict(experts=I64, num_pairs="i32") | tiles,
           dict(NUM=128, PADDED=128, ROWS=16, BLOCK=64), dict(num_warps=8))
    products = dict(x=BF16, table=I64, out=BF16, alpha="fp32", limit="fp32") | tiles
    form = dict(WIDTH=768, INNER=2048, CHOSEN=8, ROWS=16, COLUMNS=64, BLOCK=64, ELEMENT=tl.bfloat16, HAS_SCALE=False,
                HAS_BIAS=True, HAS_GATE=True, ACTIVATION=0)
    for element in (tl.bfloat16, tl.int8):
        packed = form | dict(ELEMENT=element, HAS_SCALE=element == tl.int8)
        yield jit_experts.grouped_kernel, products, packed, dict(num_warps=4, num_stages=3)
        yield (jit_experts.grouped_kernel, products | dict(out=F32),
               packed | dict(WIDTH=2048, INNER=768, CHOSEN=1, HAS_GATE=False), dict(num_warps=4, num_stages=3))
    few = dict(x=BF16, table=I64, parts=F32, num_pairs="i32") | tiles
    for out, inner, splits in ((1536, 2048, 8), (2048, 768, 2), (5760, 2880, 8)):  # the last one of gpt-oss
        yield (jit_experts.grouped_few_bits_kernel, few, FORMS[0] |
               dict(OUT=out, INNER=inner, BLOCKS=-(-inner // 128), CHOSEN=1 if splits == 2 else 8, ROWS=16,
                    COLUMNS=128, SPLITS=splits, STAGES=3), dict(num_warps=4))
    yield (jit_experts.gated_pairs_kernel, dict(parts=F32, table=I64, experts=I64, out=BF16, num_pairs="i32",
                                                alpha="fp32", limit="fp32"),
           dict(WIDTH=2880, BLOCK=1024, ACTIVATION=2, PARTS=8, HAS_BIAS=True), {})
    products = dict.fromkeys(("shared", "shared_scale", "shared_bias", "gate", "gate_scale", "gate_bias"), F32)
    combined = products | dict(given=F32, table=I64, experts=I64, weights=F32, out=BF16, num_rows="i32")
    form = dict(WIDTH=2048, CHOSEN=10, PADDED_CHOSEN=16, SHARED_SCALE=True, SHARED_BIAS=True, GATE_PARTS=2,
                GATE_SCALE=True, GATE_BIAS=True)
    for parts, block, shared in ((1, 1024, 2), (8, 128, 8), (8, 128, 0)):
        yield (jit_experts.combine_kernel, combined,
               form | dict(BLOCK=block, PARTS=parts, HAS_BIAS=parts > 1, SHARED_PARTS=shared), {})


_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes of .nv.info


def resources(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack and number of registers of the kernel in an ELF file of machine code."""
    table, entry, count, names = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + place * entry) for place in range(count)]
    first_name = headers[names][4]
    stack = registers = 0
    for name, _, _, _, start, size, *_ in headers:
        begin = first_name + name
        if cubin[begin : cubin.index(b"\0", begin)] != b".nv.info":
            continue
        place = start
        while place < start + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if form != 4:
                continue  # the value is `length` itself
            if attribute in (_FRAME_SIZE, _REGISTERS):
                value = struct.unpack_from("<I", cubin, place + 4)[0]
                stack, registers = (value, registers) if attribute == _FRAME_SIZE else (stack, value)
            place += length
    return stack, registers


def products_and_reductions(code: str) -> list[str]:
    """Of Triton's own code, layouts included, in any order."""
    found = re.findall(r"(?:warp_group_dot|tt\.dot) [^\n]*?(-> tensor<[^>]*>)", code)
    found += re.findall(r"\}\) : (\(tensor<[^\n]*) loc", code)
    layouts = dict(re.findall(r"^(#\w+) = (#[^\n]*)$", code, re.MULTILINE))  # their names are numbers
    return sorted(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), each) for each in found)


def main() -> None:
    architectures = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    for architecture in architectures:
        compile_for(architecture, sys.argv[1 + len(architectures) :])


def compile_for(architecture: int, only: list[str]) -> None:
    """Compile all forms, or the first form of each kernel of these names."""
    forms = (*kernels(SHARED[architecture]), *choices_of_texts(), *drafting(), *support(), *hybrid(), *mixtures(),
             *remainders(), *selections())
    if only:
        forms = [next(form for form in forms if form[0].__name__ == name) for name in only]
    for kernel, types, constants, options, *allowed in forms:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
                   if signature[name].startswith("*")}
        has_chain = "IS_CHAINED" in kernel.arg_names
        is_chained = has_chain and architecture >= 90
        chain = {"IS_CHAINED": is_chained} if has_chain else {}
        source = ASTSource(kernel, signature, constexprs=constants | chain, attrs=aligned)
        done = triton_compile(source, target=GPUTarget("cuda", architecture, 32),
                              options=UNFUSED | options | ({"launch_pdl": True} if is_chained else {}))
        code = done.asm["ptx"]
        fused = code.count("fma.rn.f32") + code.count("fma.rn.f64")
        computed = products_and_reductions(done.asm["ttgir"])
        is_paired = all(computed.count(each) % 2 == 0 for each in computed)
        stack, registers = resources(done.asm["cubin"])
        form = f"{types.get('q', types.get('out'))} {types.get('k')} {types.get('v')} {constants.get('DIM')}"
        print(json.dumps(dict(
            triton=triton.__version__, architecture=architecture, kernel=kernel.__name__, form=form,
            shared=done.metadata.shared, fused=fused, stack=stack, allowed=sum(allowed), registers=registers,
            is_paired=is_paired, limit=SHARED[architecture],
            computed=zlib.crc32("\n".join(computed).encode()))), flush=True)


if __name__ == "__main__":
    main()
