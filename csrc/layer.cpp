#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace longdraft {
namespace {

// Rotations times a factor: those given, or none (cos 1, sin 0).
struct Turn {
    std::vector<float> held;
    const float *cos, *sin;

    Turn(const DecoderRows& r, long half, bool rotates, float by) : cos(r.cos), sin(r.sin) {
        if (rotates && by == 1.0f) return;
        const long count = r.rows * half;
        held.assign(static_cast<size_t>(2 * count), 0.0f);
        for (long i = 0; i < count; i++) {
            held[static_cast<size_t>(i)] = rotates ? r.cos[i] * by : by;
            if (rotates) held[static_cast<size_t>(count + i)] = r.sin[i] * by;
        }
        cos = held.data();
        sin = held.data() + count;
    }
};

// Columns [first, first + width) of rows `wide` apart, one row behind the other.
void gather(const char* from, long rows, long wide, long first, long width, long size, void* to) {
    for (long i = 0; i < rows; i++)
        std::memcpy(static_cast<char*>(to) + i * width * size, from + (i * wide + first) * size,
                    static_cast<size_t>(width * size));
}

// Queries, keys and values of qkv [rows, wide]: r.content, r.q, r.k, r.v. `room` holds the keys of all rows.
void split(const Kernels& kernels, const Decoder& d, const Layer& l, const DecoderRows& r, bool bf16, const char* qkv,
           char* room) {
    const long q_width = d.heads * d.dim, kv_width = d.kv_heads * d.dim, wide = q_width + 2 * kv_width;
    const long size = bf16 ? 2 : 4, rows = r.rows;
    gather(qkv, rows, wide, 0, q_width, size, r.content);
    gather(qkv, rows, wide, q_width + kv_width, kv_width, size, r.v);
    Rows keys = {const_cast<char*>(qkv) + q_width * size, wide, d.dim};
    auto norm = [&](void* x, const void* weight, long width) {
        const long unit = l.norms_heads ? d.dim : width;
        kernels.rms_norm(bf16, x, weight, rows * (width / unit), unit, d.eps, d.rounds_once, x);
    };
    if (l.q_norm) norm(r.content, l.q_norm, q_width);
    if (l.k_norm) {
        gather(qkv, rows, wide, q_width, kv_width, size, room);
        norm(room, l.k_norm, kv_width);
        keys = {room, kv_width, d.dim};
    }
    const Turn of_queries(r, d.dim / 2, l.rotates, d.query_factor), of_keys(r, d.dim / 2, l.rotates, 1.0f);
    kernels.rope(bf16, {r.content, q_width, d.dim}, of_queries.cos, of_queries.sin, rows, d.heads, d.dim, r.q);
    kernels.rope(bf16, keys, of_keys.cos, of_keys.sin, rows, d.kv_heads, d.dim, r.k);
}

// Each text's rows over its own store of this layer.
void attend(const Kernels& kernels, const Decoder& d, size_t layer, const DecoderRows& r, const std::vector<Part>& parts) {
    const bool bf16 = parts[0].stores[layer]->is_bf16;
    const long size = bf16 ? 2 : 4, q_width = d.heads * d.dim, kv_width = d.kv_heads * d.dim;
    const long map = d.heads * (d.dim + 1) * (d.dim + 1);
    auto at = [size](void* rows, long row, long width) { return static_cast<char*>(rows) + row * width * size; };
    float* rests = nullptr;
    if (std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.rest != nullptr; }))
        rests = static_cast<float*>(workspace<4>(static_cast<size_t>(r.rows * d.heads * (d.dim + 1)) * sizeof(float)));
    std::vector<Attention> texts;
    long row = 0;
    for (const Part& part : parts) {
        Store& store = *part.stores[layer];
        store.reserve(part.length + part.rows);
        float* rest = part.rest ? rests + row * d.heads * (d.dim + 1) : nullptr;
        if (rest)
            kernels.rests(bf16, at(r.content, row, q_width), part.rest + static_cast<long>(layer) * map, part.rows, d.heads,
                          d.dim, rest);
        texts.push_back({&store, part.length, part.rows, d.heads, at(r.q, row, q_width),
                         {at(r.k, row, kv_width), kv_width, d.dim}, {at(r.v, row, kv_width), kv_width, d.dim},
                         r.parent + row, 1.0f / std::sqrt(static_cast<float>(d.dim)), d.layers[layer].window, rest,
                         at(r.attended, row, q_width), r.lse + row * d.heads});
        row += part.rows;
    }
    kernels.attention(texts.data(), static_cast<long>(texts.size()));
}

// One layer: x in place; the pointers of `r` are this layer's own.
void layer_forward(const Kernels& kernels, const Decoder& d, size_t layer, const DecoderRows& r,
                   const std::vector<Part>& parts) {
    const Layer& l = d.layers[layer];
    const bool bf16 = parts[0].stores[layer]->is_bf16;
    const long size = bf16 ? 2 : 4, rows = r.rows, hidden = l.out->n, inner = l.down->k;
    const long wide = (d.heads + 2 * d.kv_heads) * d.dim;
    const long step = round_up(rows * std::max({hidden, wide, 2 * inner}) * size, 64);
    char* first = static_cast<char*>(workspace<2>(static_cast<size_t>(3 * step)));
    char *second = first + step, *third = second + step;

    auto norm = [&](const void* x, const void* weight, void* to) {
        kernels.rms_norm(bf16, x, weight, rows, hidden, d.eps, d.rounds_once, to);
    };
    auto input = [&](const void* weight) -> const void* {  // of attention and of the MLP
        if (d.post_norm) return r.x;
        norm(r.x, weight, first);
        return first;
    };
    auto join = [&](const void* weight) {  // `second` to x
        if (d.post_norm) norm(second, weight, second);
        if (d.residual_factor != 1.0f) kernels.scale(bf16, second, rows * hidden, d.residual_factor);
        kernels.add(bf16, r.x, second, rows * hidden, r.x);
    };

    kernels.linear(*l.qkv, input(l.attention_norm), rows, second, false);
    split(kernels, d, l, r, bf16, second, first);
    attend(kernels, d, layer, r, parts);
    kernels.linear(*l.out, r.attended, rows, second, false);
    join(l.attention_norm);
    kernels.linear(*l.gate_up, input(l.mlp_norm), rows, second, false);
    kernels.swiglu(bf16, second, rows, inner, third);
    kernels.linear(*l.down, third, rows, second, false);
    join(l.mlp_norm);
}

}  // namespace

void forward(const Kernels& kernels, const Decoder& d, const DecoderRows& rows, const std::vector<Part>& parts) {
    DecoderRows r = rows;
    auto skip = [](void*& at, long bytes) { at = static_cast<char*>(at) + bytes; };
    for (size_t i = 0; i < d.layers.size(); i++) {
        layer_forward(kernels, d, i, r, parts);
        const long size = parts[0].stores[i]->is_bf16 ? 2 : 4, q_bytes = r.rows * d.heads * d.dim * size;
        skip(r.q, q_bytes);
        skip(r.content, q_bytes);
        skip(r.attended, q_bytes);
        skip(r.k, r.rows * d.kv_heads * d.dim * size);
        skip(r.v, r.rows * d.kv_heads * d.dim * size);
        r.lse += r.rows * d.heads;
    }
}

}  // namespace longdraft
