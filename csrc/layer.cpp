#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace longdraft {
namespace {

// A rotation of the forward: cos and sin times a factor, or no rotation (cos 1, sin 0) times that factor.
struct Rotation {
    std::vector<float> held;
    const float *cos, *sin;

    Rotation(const DecoderRows& r, const Decoder& d, long rope, bool rotates, float by) : cos(r.cos), sin(r.sin) {
        if (rotates && by == 1.0f && d.num_ropes == 1) return;
        const long half = d.dim / 2, count = r.rows * half;
        held.assign(static_cast<size_t>(2 * count), 0.0f);
        for (long i = 0; i < count; i++) {
            const long from = (i / half * d.num_ropes + rope) * half + i % half;
            held[static_cast<size_t>(i)] = rotates ? r.cos[from] * by : by;
            if (rotates) held[static_cast<size_t>(count + i)] = r.sin[from] * by;
        }
        cos = held.data();
        sin = held.data() + count;
    }
};

// Copy columns [first, first + width) of rows that are `wide` elements apart to contiguous rows.
void gather(const char* from, long rows, long wide, long first, long width, long size, void* to) {
    for (long i = 0; i < rows; i++)
        std::memcpy(static_cast<char*>(to) + i * width * size, from + (i * wide + first) * size,
                    static_cast<size_t>(width * size));
}

// Split qkv into r.content, r.q, r.k and r.v. `buffer` has room for the keys of all rows.
void split_qkv(const Kernels& kernels, const Decoder& d, const Layer& l, const DecoderRows& r, bool bf16,
               const char* qkv, char* buffer) {
    const long q_width = d.heads * d.dim, kv_width = d.kv_heads * d.dim, wide = l.qkv->n;
    const long size = bf16 ? 2 : 4, rows = r.rows;
    gather(qkv, rows, wide, 0, q_width, size, r.content);
    gather(qkv, rows, wide, q_width + kv_width, kv_width, size, r.v);
    Rows keys = {const_cast<char*>(qkv) + q_width * size, wide, d.dim};
    auto norm_heads = [&](void* x, const void* weight, long width) {
        const long unit = l.norms_heads ? d.dim : width;
        norm(kernels, d, bf16, x, weight, rows * (width / unit), unit, x);
    };
    if (l.q_norm) norm_heads(r.content, l.q_norm, q_width);
    if (l.k_norm) {
        gather(qkv, rows, wide, q_width, kv_width, size, buffer);
        norm_heads(buffer, l.k_norm, kv_width);
        keys = {buffer, kv_width, d.dim};
    }
    const Rotation of_queries(r, d, l.query_rope, l.rotates, d.query_factor), of_keys(r, d, l.key_rope, l.rotates, 1.0f);
    kernels.rope(bf16, {r.content, q_width, d.dim}, of_queries.cos, of_queries.sin, rows, d.heads, d.dim, r.q);
    kernels.rope(bf16, keys, of_keys.cos, of_keys.sin, rows, d.kv_heads, d.dim, r.k);
}

// Sinks as a remainder [rows, heads, dim + 1]: outputs of 0 with their scores as log-sum-exps.
void write_sinks(const float* sinks, long rows, long heads, long dim, float* remainder) {
    std::fill_n(remainder, rows * heads * (dim + 1), 0.0f);
    for (long i = 0; i < rows * heads; i++) remainder[i * (dim + 1) + dim] = sinks[i % heads];
}

// Attention of each text's rows over the text's own store of this layer.
//   place  of the layer among those with attention
void attend_texts(const Kernels& kernels, const Decoder& d, const Layer& l, size_t place, const DecoderRows& r,
                  const std::vector<TextKV>& texts) {
    const bool bf16 = texts[0].stores[place]->is_bf16;
    const long size = bf16 ? 2 : 4, q_width = d.heads * d.dim, kv_width = d.kv_heads * d.dim;
    const long map = d.heads * (d.dim + 1) * (d.dim + 1);
    auto at = [size](void* rows, long row, long width) { return static_cast<char*>(rows) + row * width * size; };
    float* remainders = nullptr;
    if (l.sinks || std::any_of(texts.begin(), texts.end(), [](const TextKV& text) { return text.remainder != nullptr; }))
        remainders =
            static_cast<float*>(workspace<4>(static_cast<size_t>(r.rows * d.heads * (d.dim + 1)) * sizeof(float)));
    std::vector<Attention> attentions;
    long row = 0;
    for (const TextKV& text : texts) {
        Store& store = *text.stores[place];
        store.prepare(text.length, text.rows);
        float* remainder = text.remainder || l.sinks ? remainders + row * d.heads * (d.dim + 1) : nullptr;
        if (text.remainder)  // that of drafts contains the sinks: it is part of the full attention
            kernels.map_remainder(bf16, at(r.content, row, q_width), text.remainder + static_cast<long>(place) * map,
                                  text.rows, d.heads, d.dim, remainder);
        else if (l.sinks)
            write_sinks(l.sinks, text.rows, d.heads, d.dim, remainder);
        attentions.push_back({&store, text.length, text.rows, d.heads, at(r.q, row, q_width),
                         {at(r.k, row, kv_width), kv_width, d.dim}, {at(r.v, row, kv_width), kv_width, d.dim},
                         r.parent + row, 1.0f / std::sqrt(static_cast<float>(d.dim)), l.window, remainder,
                         at(r.attended, row, q_width), r.lse + row * d.heads});
        row += text.rows;
    }
    kernels.attention(attentions.data(), static_cast<long>(attentions.size()));
}

// The states of each text's rows, and the layer's output [rows, values], from qkvz and gates [rows, 2 value_heads].
void apply_delta(const Kernels& kernels, const Layer& l, size_t place, const DecoderRows& r, bool bf16,
                 const std::vector<TextKV>& texts, const char* qkvz, const char* gates, char* out) {
    const long size = bf16 ? 2 : 4, wide = l.qkv->n, values = l.out->k, channels = wide - values, per_row = l.gates->n * 4;
    std::vector<DeltaText> rows;
    long row = 0;
    for (const TextKV& text : texts) {
        const DeltaRows& own = text.deltas[place];
        gather(qkvz + row * wide * size, text.rows, wide, 0, channels, size, own.mixed);
        std::memcpy(own.gates, gates + row * per_row, static_cast<size_t>(text.rows * per_row));
        rows.push_back({text.rows, own.before.history, own.before.matrix, own.after.history, own.after.matrix, own.mixed,
                        own.gates, qkvz + (row * wide + channels) * size, wide, out + row * values * size, r.parent + row});
        row += text.rows;
    }
    kernels.delta(bf16, l.delta, rows.data(), static_cast<long>(rows.size()));
}

// One layer, x in place. The pointers of `r` point to the results of this layer.
//   place  of the layer among those of its kind: with attention, or with a state
void layer_forward(const Kernels& kernels, const Decoder& d, const Layer& l, size_t place, const DecoderRows& r, bool bf16,
                   const std::vector<TextKV>& texts) {
    const long size = bf16 ? 2 : 4, rows = r.rows, hidden = l.out->n;
    const long inner = l.mixture ? 0 : l.mlp.down->k;
    const long widest = std::max({hidden, l.qkv->n, l.out->k, 2 * inner, l.gates ? l.gates->n * 4 / size : 0});
    const long step = round_up(rows * widest * size, 64);
    char* first = static_cast<char*>(workspace<2>(static_cast<size_t>(3 * step)));
    char *second = first + step, *third = second + step;

    auto input = [&](const void* weight) -> const void* {  // the input of attention, of the rule or of the MLP
        if (d.post_norm) return r.x;
        norm(kernels, d, bf16, r.x, weight, rows, hidden, first);
        return first;
    };
    auto add_residual = [&](const void* weight) {  // add `second` to x
        if (weight) norm(kernels, d, bf16, second, weight, rows, hidden, second);
        if (d.residual_factor != 1.0f) kernels.scale(bf16, second, rows * hidden, d.residual_factor);
        kernels.add(bf16, r.x, second, rows * hidden, r.x);
    };

    const void *source = input(l.attention_norm), *output = third;
    kernels.linear(*l.qkv, source, rows, second, false);
    if (l.gates) {
        kernels.linear(*l.gates, source, rows, third, true);
        apply_delta(kernels, l, place, r, bf16, texts, second, third, third);
    } else {
        split_qkv(kernels, d, l, r, bf16, second, first);
        attend_texts(kernels, d, l, place, r, texts);
        output = r.attended;
        if (l.is_gated) {
            const long width = d.heads * d.dim;
            kernels.gate(bf16, r.attended, second + (l.qkv->n - width) * size, l.qkv->n, rows, width, third);
            output = third;
        }
    }
    kernels.linear(*l.out, output, rows, second, false);
    add_residual(d.post_norm ? l.attention_norm : l.attention_post_norm);
    source = input(l.mlp_norm);
    if (l.mixture) {
        mixture_forward(kernels, *l.mixture, bf16, source, rows, second);
    } else {
        kernels.linear(*l.mlp.gate_up, source, rows, second, false);
        (d.has_gelu ? kernels.geglu : kernels.swiglu)(bf16, second, rows, inner, third);
        kernels.linear(*l.mlp.down, third, rows, second, false);
    }
    add_residual(d.post_norm ? l.mlp_norm : l.mlp_post_norm);
}

// Copy the rows that enter a layer to where their texts want them.
void tap(const Decoder& d, size_t layer, const DecoderRows& r, const std::vector<TextKV>& texts) {
    const char* from = static_cast<const char*>(r.x);
    for (const TextKV& text : texts) {
        const long bytes = text.rows * d.layers[0].out->n * (text.stores[0]->is_bf16 ? 2 : 4);
        if (!text.taps.empty() && text.taps[layer]) std::memcpy(text.taps[layer], from, static_cast<size_t>(bytes));
        from += bytes;
    }
}

}  // namespace

void norm(const Kernels& kernels, const Decoder& d, bool bf16, const void* x, const void* weight, long rows, long width,
          void* out) {
    if (d.float_norms)
        kernels.rms_norm_float(bf16, x, static_cast<const float*>(weight), rows, width, d.eps, out);
    else
        kernels.rms_norm(bf16, x, weight, rows, width, d.eps, d.rounds_once, out);
}

void forward(const Kernels& kernels, const Decoder& d, const DecoderRows& rows, const std::vector<TextKV>& texts) {
    DecoderRows r = rows;
    const bool bf16 = texts[0].stores[0]->is_bf16;
    const long size = bf16 ? 2 : 4, q_bytes = r.rows * d.heads * d.dim * size, kv_bytes = r.rows * d.kv_heads * d.dim * size;
    auto skip = [](void*& at, long bytes) { at = static_cast<char*>(at) + bytes; };
    size_t num_attentions = 0, num_deltas = 0;
    for (size_t i = 0; i < d.layers.size(); i++) {
        const Layer& l = d.layers[i];
        tap(d, i, r, texts);
        layer_forward(kernels, d, l, l.gates ? num_deltas++ : num_attentions++, r, bf16, texts);
        if (l.gates) continue;
        skip(r.q, q_bytes);
        skip(r.content, q_bytes);
        skip(r.attended, q_bytes);
        skip(r.k, kv_bytes);
        skip(r.v, kv_bytes);
        r.lse += r.rows * d.heads;
    }
    tap(d, d.layers.size(), r, texts);
}

}  // namespace longdraft
