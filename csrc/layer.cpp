#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace longdraft {
namespace {

// One layer: x in place; the pointers of `r` are this layer's own.
void layer_forward(const Kernels& kernels, const Decoder& d, const Layer& l, const DecoderRows& r, Store& store, long length) {
    const bool bf16 = store.is_bf16;
    const long size = bf16 ? 2 : 4, rows = r.rows, hidden = l.out->n, inner = l.down->k;
    const long q_width = d.heads * d.dim, kv_width = d.kv_heads * d.dim, wide = q_width + 2 * kv_width;
    const long step = round_up(rows * std::max({hidden, wide, 2 * inner}) * size, 64);
    char* first = static_cast<char*>(workspace<2>(static_cast<size_t>(3 * step)));
    char *second = first + step, *third = second + step;

    kernels.rms_norm(bf16, r.x, l.attention_norm, rows, hidden, d.eps, first);
    kernels.linear(*l.qkv, first, rows, second, false);
    for (long i = 0; i < rows; i++)
        std::memcpy(static_cast<char*>(r.content) + i * q_width * size, second + i * wide * size, static_cast<size_t>(q_width * size));
    kernels.rope(bf16, {r.content, q_width, d.dim}, r.cos, r.sin, rows, d.heads, d.dim, r.q);
    kernels.rope(bf16, {second + q_width * size, wide, d.dim}, r.cos, r.sin, rows, d.kv_heads, d.dim, r.k);
    for (long i = 0; i < rows; i++)
        std::memcpy(static_cast<char*>(r.v) + i * kv_width * size, second + (i * wide + q_width + kv_width) * size,
                    static_cast<size_t>(kv_width * size));
    store.reserve(length + rows);
    float* rest = nullptr;
    if (r.rest) {
        rest = static_cast<float*>(workspace<4>(static_cast<size_t>(rows * d.heads * (d.dim + 1)) * sizeof(float)));
        kernels.rests(bf16, r.content, r.rest, rows, d.heads, d.dim, rest);
    }
    kernels.attention({&store, length, rows, d.heads, r.q, {r.k, kv_width, d.dim}, {r.v, kv_width, d.dim}, r.parent,
                       1.0f / std::sqrt(static_cast<float>(d.dim)), l.window, rest, r.attended, r.lse});
    kernels.linear(*l.out, r.attended, rows, second, false);
    kernels.add(bf16, r.x, second, rows * hidden, r.x);
    kernels.rms_norm(bf16, r.x, l.mlp_norm, rows, hidden, d.eps, first);
    kernels.linear(*l.gate_up, first, rows, second, false);
    kernels.swiglu(bf16, second, rows, inner, third);
    kernels.linear(*l.down, third, rows, second, false);
    kernels.add(bf16, r.x, second, rows * hidden, r.x);
}

}  // namespace

void forward(const Kernels& kernels, const Decoder& d, const DecoderRows& rows, const std::vector<Store*>& stores,
             long length) {
    DecoderRows r = rows;
    auto skip = [](void*& at, long bytes) { at = static_cast<char*>(at) + bytes; };
    for (size_t i = 0; i < d.layers.size(); i++) {
        layer_forward(kernels, d, d.layers[i], r, *stores[i], length);
        const long size = stores[i]->is_bf16 ? 2 : 4, q_bytes = r.rows * d.heads * d.dim * size;
        skip(r.q, q_bytes);
        skip(r.content, q_bytes);
        skip(r.attended, q_bytes);
        skip(r.k, r.rows * d.kv_heads * d.dim * size);
        skip(r.v, r.rows * d.kv_heads * d.dim * size);
        r.lse += r.rows * d.heads;
        if (r.rest) r.rest += d.heads * (d.dim + 1) * (d.dim + 1);
    }
}

}  // namespace longdraft
