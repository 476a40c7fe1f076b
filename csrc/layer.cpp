#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace longdraft {
void decoder_layer(const Kernels& kernels, const Layer& l, const LayerRows& r, Store& store, long length) {
    const bool bf16 = store.is_bf16;
    const long size = bf16 ? 2 : 4, rows = r.rows, hidden = l.out->n, inner = l.down->k;
    const long q_width = l.heads * l.dim, kv_width = l.kv_heads * l.dim, wide = q_width + 2 * kv_width;
    const long width = std::max({hidden, wide, 2 * inner});
    char* first = static_cast<char*>(workspace<2>(static_cast<size_t>(3 * round_up(rows * width * size, 64))));
    char* second = first + round_up(rows * width * size, 64);
    char* third = second + round_up(rows * width * size, 64);

    kernels.rms_norm(bf16, r.x, l.attention_norm, rows, hidden, l.eps, first);
    kernels.linear(*l.qkv, first, rows, second, false);
    kernels.rope(bf16, {second, wide, l.dim}, r.cos, r.sin, rows, l.heads, l.dim, r.q);
    kernels.rope(bf16, {second + q_width * size, wide, l.dim}, r.cos, r.sin, rows, l.kv_heads, l.dim, r.k);
    for (long i = 0; i < rows; i++)
        std::memcpy(static_cast<char*>(r.v) + i * kv_width * size, second + (i * wide + q_width + kv_width) * size,
                    static_cast<size_t>(kv_width * size));
    store.reserve(length + rows);
    kernels.attention({&store, length, rows, l.heads, r.q, {r.k, kv_width, l.dim}, {r.v, kv_width, l.dim}, r.parent,
                       1.0f / std::sqrt(static_cast<float>(l.dim)), l.window, r.rest, r.attended, r.lse});
    kernels.linear(*l.out, r.attended, rows, second, false);
    kernels.add(bf16, r.x, second, rows * hidden, r.out);
    kernels.rms_norm(bf16, r.out, l.mlp_norm, rows, hidden, l.eps, first);
    kernels.linear(*l.gate_up, first, rows, second, false);
    kernels.swiglu(bf16, second, rows, inner, third);
    kernels.linear(*l.down, third, rows, second, false);
    kernels.add(bf16, r.out, second, rows * hidden, r.out);
}

}  // namespace longdraft
