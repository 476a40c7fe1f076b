#include "layer.h"

#include "pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace longdraft {
namespace {

// A product, during and after which waiting threads fetch the weight of the next one.
void linear(const Kernels& kernels, const Linear& w, const void* x, long rows, void* out, const Linear* next) {
    expect_weight(next);
    kernels.linear(w, x, rows, out, false);
}

// A rotation of the forward for a layer: cos and sin times a factor, or no rotation (cos 1, sin 0) times that factor.
struct Rotation {
    std::vector<float> held;
    const float *cos, *sin;

    Rotation(const DecoderRows& r, const Decoder& d, const Layer& l, long rope, float by) : cos(r.cos), sin(r.sin) {
        const bool rotates = l.rotates;
        if (rotates && by == 1.0f && d.num_ropes == 1 && l.dim == d.dim) return;
        const long half = l.dim / 2, count = r.rows * half;
        held.assign(static_cast<size_t>(2 * count), 0.0f);
        for (long i = 0; i < count; i++) {
            const long from = (i / half * d.num_ropes + rope) * (d.dim / 2) + i % half;
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

// Move rows [rows, heads, dim] apart, in place, to [rows, wide_heads, wide_dim] with zeros between them.
void spread(void* data, long rows, long heads, long dim, long wide_heads, long wide_dim, long size) {
    if (heads == wide_heads && dim == wide_dim) return;
    auto* at = static_cast<char*>(data);
    for (long i = rows * wide_heads - 1; i >= 0; i--) {  // backwards: no row is overwritten before it is moved
        const long row = i / wide_heads, head = i % wide_heads, count = head < heads ? dim : 0;
        std::memmove(at + i * wide_dim * size, at + (row * heads + std::min(head, heads - 1)) * dim * size,
                     static_cast<size_t>(count * size));
        std::memset(at + (i * wide_dim + count) * size, 0, static_cast<size_t>((wide_dim - count) * size));
    }
}

// Split qkv into r.content, r.q and, unless the layer reads those of another one, r.k and r.v, of which the last two have
// the strides of the decoder's largest heads. `buffer` has room for the keys of all rows.
void split_qkv(const Kernels& kernels, const Decoder& d, const Layer& l, const DecoderRows& r, bool bf16,
               const char* qkv, char* buffer) {
    const long q_width = d.heads * l.dim, kv_width = l.kv_heads * l.dim, wide = l.qkv->n;
    const long size = bf16 ? 2 : 4, rows = r.rows;
    auto norm_heads = [&](void* x, const void* weight, long width) {
        const long unit = l.norms_heads ? l.dim : width;
        norm(kernels, d, bf16, x, weight, rows * (width / unit), unit, x);
    };
    gather(qkv, rows, wide, 0, q_width, size, r.content);
    if (l.q_norm) norm_heads(r.content, l.q_norm, q_width);
    const Rotation of_queries(r, d, l, l.query_rope, l.query_factor);
    kernels.rope(bf16, {r.content, q_width, l.dim}, of_queries.cos, of_queries.sin, rows, d.heads, l.dim, r.q);
    if (l.source >= 0) return;
    gather(qkv, rows, wide, q_width + kv_width, kv_width, size, r.v);
    if (l.v_norm) norm(kernels, d, bf16, r.v, l.v_norm, rows * l.kv_heads, l.dim, r.v);
    Rows keys = {const_cast<char*>(qkv) + q_width * size, wide, l.dim};
    if (l.k_norm) {
        gather(qkv, rows, wide, q_width, kv_width, size, buffer);
        norm_heads(buffer, l.k_norm, kv_width);
        keys = {buffer, kv_width, l.dim};
    }
    const Rotation of_keys(r, d, l, l.key_rope, 1.0f);
    kernels.rope(bf16, keys, of_keys.cos, of_keys.sin, rows, l.kv_heads, l.dim, r.k);
    for (void* x : {r.k, r.v}) spread(x, rows, l.kv_heads, l.dim, d.kv_heads, d.dim, size);
}

// Sinks as a remainder [rows, heads, dim + 1]: outputs of 0 with their scores as log-sum-exps.
void write_sinks(const float* sinks, long rows, long heads, long dim, float* remainder) {
    std::fill_n(remainder, rows * heads * (dim + 1), 0.0f);
    for (long i = 0; i < rows * heads; i++) remainder[i * (dim + 1) + dim] = sinks[i % heads];
}

// Attention of each text's rows over the text's own store of this layer.
//   place  of the store among those of all layers
void attend_texts(const Kernels& kernels, const Decoder& d, const Layer& l, size_t place, const DecoderRows& r,
                  const std::vector<TextKV>& texts) {
    const bool bf16 = texts[0].stores[place]->is_bf16;
    const long size = bf16 ? 2 : 4, q_width = d.heads * l.dim, kv_width = d.kv_heads * d.dim;
    auto map_of = [&](const TextKV& text) {
        return text.remainders.empty() || l.source >= 0 ? nullptr : text.remainders[place];
    };
    auto at = [size](void* rows, long row, long width) { return static_cast<char*>(rows) + row * width * size; };
    float* remainders = nullptr;
    if (l.sinks || std::any_of(texts.begin(), texts.end(), map_of))
        remainders =
            static_cast<float*>(workspace<4>(static_cast<size_t>(r.rows * d.heads * (l.dim + 1)) * sizeof(float)));
    std::vector<Attention> attentions;
    long row = 0;
    for (const TextKV& text : texts) {
        Store& store = *text.stores[place];
        store.prepare(text.length, text.rows);
        const float* map = map_of(text);
        float* remainder = map || l.sinks ? remainders + row * d.heads * (l.dim + 1) : nullptr;
        if (map)  // that of drafts contains the sinks: it is part of the full attention
            kernels.map_remainder(bf16, at(r.content, row, q_width), map, text.rows, d.heads, l.dim, remainder);
        else if (l.sinks)
            write_sinks(l.sinks, text.rows, d.heads, l.dim, remainder);
        attentions.push_back({&store, text.length, text.rows, d.heads, at(r.q, row, q_width),
                         {at(r.k, row, kv_width), kv_width, d.dim}, {at(r.v, row, kv_width), kv_width, d.dim},
                         r.parent + row, 1.0f / std::sqrt(static_cast<float>(l.dim)), l.window, remainder,
                         at(r.attended, row, q_width), r.lse + row * d.heads, l.is_causal});
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

// The rows that leave a layer, in place. `memory`: three pieces, `step` bytes apart, for [rows, hidden] and twice the width.
void end_layer(const Kernels& kernels, const Decoder& d, const Layer& l, const void* given, const DecoderRows& r, bool bf16,
               char* memory, long step) {
    const long size = bf16 ? 2 : 4, hidden = l.out->n;
    if (l.extra.gate) {
        const long width = l.extra.gate->n;
        char *first = memory, *second = first + step, *third = second + step;
        kernels.linear(*l.extra.gate, r.x, r.rows, first, false);
        for (long i = 0; i < r.rows; i++) {
            std::memcpy(second + 2 * i * width * size, first + i * width * size, static_cast<size_t>(width * size));
            std::memcpy(second + (2 * i + 1) * width * size, static_cast<const char*>(given) + i * r.given_stride * size,
                        static_cast<size_t>(width * size));
        }
        kernels.geglu(bf16, second, r.rows, width, third);
        kernels.linear(*l.extra.out, third, r.rows, first, false);
        norm(kernels, d, bf16, first, l.extra.norm, r.rows, hidden, first);
        kernels.add(bf16, r.x, first, r.rows * hidden, r.x);
    }
    if (l.scalar != 1.0f) kernels.scale(bf16, r.x, r.rows * hidden, l.scalar);
}

// The convolutions around a sublayer. Their kernels depend on the sublayer's input.
class Convolved {
  public:
    Convolved(const Kernels& kernels, const Convolution& conv, bool bf16, const std::vector<TextKV>& texts)
        : kernels_(kernels), conv_(conv), bf16_(bf16), texts_(texts) {}

    // The sublayer's input: `source`, or its convolution, which is written to `out` and may be in place.
    const void* before(const void* source, long rows, void* out) {
        if (!conv_.base) return source;
        moving_.resize(static_cast<size_t>(rows * conv_.projection->n));
        kernels_.linear(*conv_.projection, source, rows, moving_.data(), true);
        apply(source, 0, out);
        return out;
    }
    void after(void* output) const {
        if (conv_.base) apply(output, 1, output);
    }

  private:
    void apply(const void* x, long which, void* out) const {
        const long width = conv_.projection->k, all = conv_.projection->n, half = all / 2, size = bf16_ ? 2 : 4;
        const float* moving = moving_.data() + which * half;
        long at = 0;
        for (const TextKV& text : texts_) {
            kernels_.convolve(bf16_, static_cast<const char*>(x) + at, conv_.base + which * conv_.taps * width, moving, all,
                              half / conv_.taps, conv_.taps, text.rows, width, static_cast<char*>(out) + at);
            at += text.rows * width * size;
            moving += text.rows * all;
        }
    }

    const Kernels& kernels_;
    const Convolution& conv_;
    bool bf16_;
    const std::vector<TextKV>& texts_;
    std::vector<float> moving_;  // [rows, 2, taps, groups]
};

// One layer, x in place. The pointers of `r` point to the results of this layer.
//   place  of its store among those of all layers, or of its state
//   given  the layer's input besides x, of the first row
//   next   the first weight that is read after the layer; null: not known
void layer_forward(const Kernels& kernels, const Decoder& d, const Layer& l, size_t place, const void* given,
                   const DecoderRows& r, bool bf16, const std::vector<TextKV>& texts, const Linear* next) {
    const long size = bf16 ? 2 : 4, rows = r.rows, hidden = l.out->n;
    const long inner = l.mlp.down ? l.mlp.down->k : 0, extra = l.extra.gate ? l.extra.gate->n : 0;
    const long widest = std::max({hidden, l.qkv->n, l.out->k, 2 * inner, 2 * extra, l.gates ? l.gates->n * 4 / size : 0});
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

    Convolved attention(kernels, l.attention_conv, bf16, texts), mlp(kernels, l.mlp_conv, bf16, texts);
    const void *source = attention.before(r.source ? r.source : input(l.attention_norm), rows, first), *output = third;
    linear(kernels, *l.qkv, source, rows, second, l.gates ? l.gates : l.out);
    if (l.gates) {
        expect_weight(l.out);
        kernels.linear(*l.gates, source, rows, third, true);
        apply_delta(kernels, l, place, r, bf16, texts, second, third, third);
    } else {
        split_qkv(kernels, d, l, r, bf16, second, first);
        attend_texts(kernels, d, l, place, r, texts);
        output = r.attended;
        if (l.is_gated) {
            const long width = d.heads * l.dim;
            kernels.gate(bf16, r.attended, second + (l.qkv->n - width) * size, l.qkv->n, rows, width, third);
            output = third;
        }
    }
    linear(kernels, *l.out, output, rows, second, l.mlp.gate_up);
    attention.after(second);
    add_residual(d.post_norm ? l.attention_norm : l.attention_post_norm);
    source = mlp.before(input(l.mlp_norm), rows, first);
    if (l.mixture && !l.beside) {
        mixture_forward(kernels, *l.mixture, bf16, source, source, rows, second);
    } else {
        linear(kernels, *l.mlp.gate_up, source, rows, second, l.mlp.down);
        (d.has_gelu ? kernels.geglu : kernels.swiglu)(bf16, second, rows, inner, third);
        linear(kernels, *l.mlp.down, third, rows, second, next);
    }
    mlp.after(second);
    if (l.beside) {
        norm(kernels, d, bf16, second, l.beside->mlp_post, rows, hidden, second);
        norm(kernels, d, bf16, r.x, l.beside->experts, rows, hidden, first);
        norm(kernels, d, bf16, r.x, l.beside->router, rows, hidden, third);
        mixture_forward(kernels, *l.mixture, bf16, first, third, rows, third);
        norm(kernels, d, bf16, third, l.beside->experts_post, rows, hidden, third);
        kernels.add(bf16, second, third, rows * hidden, second);
    }
    add_residual(d.post_norm ? l.mlp_norm : l.mlp_post_norm);
    end_layer(kernels, d, l, given, r, bf16, first, step);
    if (l.has_store())
        for (void* x : {r.q, r.content, r.attended}) spread(x, rows, d.heads, l.dim, d.heads, d.dim, size);
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

void expect_weight(const Linear* w) {
    w ? expect(w->data->words(), static_cast<long>(w->tile_bytes()), w->tiles(), w->least_tiles()) : expect(nullptr, 0, 0, 0);
}

void forward(const Kernels& kernels, const Decoder& d, const DecoderRows& rows, const std::vector<TextKV>& texts,
             const Linear* after) {
    const bool bf16 = texts[0].stores[0]->is_bf16, reports_some = rows.reported < rows.rows;
    const long size = bf16 ? 2 : 4, q_row = d.heads * d.dim * size, lse_row = d.heads * 4;
    const long q_bytes = rows.rows * q_row, kv_bytes = rows.rows * d.kv_heads * d.dim * size;
    // Queries, content, outputs and log-sum-exps of layers without a store, which no drafter reads, and of all layers where
    // their last rows are reported.
    const bool is_used = reports_some || d.num_stores() + d.num_deltas() < d.layers.size();
    void* const buffer = is_used ? workspace<9>(static_cast<size_t>(3 * q_bytes + rows.rows * lse_row)) : nullptr;
    auto skip = [](void* at, long bytes) { return static_cast<char*>(at) + bytes; };
    long num_stores = 0, num_deltas = 0;
    for (size_t i = 0; i < d.layers.size(); i++) {
        const Layer& l = d.layers[i];
        const long place = l.gates ? num_deltas++ : l.source >= 0 ? l.source : num_stores++;
        DecoderRows r = rows;
        if (l.source >= 0 || reports_some) {
            r.q = buffer;
            r.content = skip(r.q, q_bytes);
            r.attended = skip(r.content, q_bytes);
            r.lse = reinterpret_cast<float*>(skip(r.attended, q_bytes));
        } else if (!l.gates) {
            for (void** x : {&r.q, &r.content, &r.attended}) *x = skip(*x, place * q_bytes);
            r.lse += place * rows.rows * d.heads;
        }
        if (!l.gates)
            for (void** x : {&r.k, &r.v}) *x = skip(*x, place * kv_bytes);
        const long width = l.extra.gate ? l.extra.gate->n : 0;
        if (i) r.source = nullptr;
        tap(d, i, r, texts);
        layer_forward(kernels, d, l, static_cast<size_t>(place),
                      static_cast<const char*>(r.given) + static_cast<long>(i) * width * size, r, bf16, texts,
                      i + 1 < d.layers.size() ? d.layers[i + 1].qkv : after);
        if (!reports_some || l.gates || l.source >= 0) continue;
        auto report = [&](void* from, void* to, long row) {
            std::memcpy(skip(to, place * rows.reported * row), skip(from, (rows.rows - rows.reported) * row),
                        static_cast<size_t>(rows.reported * row));
        };
        report(r.q, rows.q, q_row), report(r.content, rows.content, q_row), report(r.attended, rows.attended, q_row);
        report(r.lse, rows.lse, lse_row);
    }
    tap(d, d.layers.size(), rows, texts);
}

}  // namespace longdraft
