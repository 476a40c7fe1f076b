// All decoder layers in one call, with the operations of one variant. It computes what longdraft/kernels/layer.py does,
// without a call from Python for each operation.
#pragma once

#include "layout.h"
#include "mixture.h"

#include <algorithm>
#include <optional>

namespace longdraft {

// An input of a layer besides its rows x, which get  norm(out (gelu(gate x) * input))  at the layer's end.
struct ExtraInput {
    const Linear *gate, *out;  // [width, hidden], [hidden, width]; null: there is none
    const void* norm;
};

// Norms of a layer with experts beside its MLP: of the MLP's outputs, of the inputs of experts and router, of the experts'
// outputs.
struct BesideNorms {
    const void *mlp_post, *experts, *router, *experts_post;
};

// Convolutions over the rows of a text before and after a sublayer (`convolve_as`).
struct Convolution {
    const float* base;         // [2, taps, hidden]: of the one before, and of the one after; null: there are none
    const Linear* projection;  // of the sublayer's input to [2, taps, groups], which are added to the base of each row
    long taps;
};

struct Layer {
    const void* attention_norm;
    const Linear* qkv;  // q, k, v stacked
    const Linear* out;
    const void* mlp_norm;
    long window;  // positions that a row sees; 0: all
    const void *q_norm, *k_norm;  // applied to queries and keys before their rotation, or null
    bool norms_heads;             // whether each head is normalised by itself, or all heads as one vector
    bool rotates;                 // whether queries and keys are rotated
    long query_rope, key_rope;    // which of the forward's rotations
    const void *attention_post_norm, *mlp_post_norm;  // of the outputs of attention and MLP besides, or null
    bool is_gated;                // qkv has the weights of the gate after those of v
    const Linear* gates;          // of a delta layer: b and a stacked, and qkv is q, k, v, z; null: a layer with attention
    DeltaLayer delta;
    const float* sinks = nullptr;    // [heads]: scores of a key whose value is 0, which every row of a head sees, or null
    long kv_heads = 0, dim = 0;      // of this layer
    float query_factor = 1.0f;       // multiplies queries, with their rotation
    const void* v_norm = nullptr;    // applied to each head's values, or null
    long source = -1;                // the layer, among those with a store, whose keys and values this one reads; -1: its own
    float scalar = 1.0f;             // multiplies the rows that leave the layer
    Mlp mlp = {};                    // or, in its place or beside it,
    std::optional<Mixture> mixture = {};
    std::optional<BesideNorms> beside = {};
    ExtraInput extra = {};
    bool is_causal = true;           // whether a row sees its own path; else all rows of its text
    Convolution attention_conv = {}, mlp_conv = {};

    bool has_store() const { return !gates && source < 0; }
};

struct Decoder {
    long heads, kv_heads, dim;  // the last two: the largest of all layers
    float eps;
    bool post_norm;    // norms are applied to the outputs of attention and MLP, not to their inputs
    bool rounds_once;  // a norm rounds only after its weight, not before it too
    float residual_factor;  // multiplies the outputs of attention and MLP
    bool has_gelu;     // in the MLP, instead of SiLU
    long num_ropes;    // rotations of a forward
    bool float_norms;  // weights of norms are float32, whatever the rows are
    std::vector<Layer> layers;

    size_t num_deltas() const {
        return static_cast<size_t>(std::count_if(layers.begin(), layers.end(), [](const Layer& l) { return l.gates; }));
    }
    size_t num_stores() const {
        return static_cast<size_t>(std::count_if(layers.begin(), layers.end(), [](const Layer& l) { return l.has_store(); }));
    }
    // Numbers of the inputs of all layers besides x.
    long input_width() const {
        return layers.empty() || !layers[0].extra.gate ? 0 : layers[0].extra.gate->n * static_cast<long>(layers.size());
    }
    // Whether there is a store for each layer with keys and values of its own, of its shape, and an MLP or experts for all.
    bool has_stores(const std::vector<Store*>& stores) const {
        if (stores.size() != num_stores()) return false;
        auto store = stores.begin();
        return std::all_of(layers.begin(), layers.end(), [&](const Layer& l) {
            const bool same = !l.has_store() || ((*store)->heads == l.kv_heads && (*store)->dim == l.dim);
            store += l.has_store();
            return same && (l.mlp.down || (l.mixture && !l.beside));
        });
    }
};

// A state of one text in a delta layer (DeltaText).
struct DeltaState {
    void* history;
    float* matrix;
};

// One text's rows in a delta layer.
struct DeltaRows {
    DeltaState before, after;
    void* mixed;   // results: inputs of the convolution [rows, C],
    float* gates;  // and of the rule [rows, 2 value_heads]
};

// What the rows of one text read in a forward.
struct TextKV {
    std::vector<Store*> stores;  // one for each layer with keys and values of its own
    long length, rows;           // committed positions, rows of the text
    std::vector<const float*> remainders;  // for each store: maps [heads, dim + 1, dim + 1] for map_remainder_as; or empty
    std::vector<void*> taps;     // for each layer, and for the result: where to copy the rows that enter it, or null
    std::vector<DeltaRows> deltas;  // one for each delta layer
};

// The rows of a forward, text after text. The results of each layer have the layers with a store as their first axis. A
// layer with fewer KV heads or smaller ones fills the beginning of these axes, and zeros follow. Of a long prompt only the
// attention of the last `reported` rows is wanted.
struct DecoderRows {
    long rows, reported;
    const float *cos, *sin;  // [rows, num_ropes, dim / 2], of which a layer with smaller heads uses the beginning
    const int32_t* parent;   // [rows], relative to the first row of the text
    void* x;                 // [rows, hidden], overwritten by the result
    void *q, *k, *v;         // results [layers, reported, heads, dim], and twice [layers, rows, kv_heads, dim]
    void* content;           // result: queries before their rotation [layers, reported, heads, dim]
    void* attended;          // result [layers, reported, heads, dim]
    float* lse;              // result [layers, reported, heads]
    const void* given = nullptr;  // inputs of the layers besides x, `given_stride` apart: [rows, all layers, width]
    long given_stride = 0;
    const void* source = nullptr;  // [rows, width of the first qkv], the input of the first layer's qkv; null: x after its norm
};

// The RMS norm of rows [rows, width] with a weight of the decoder.
void norm(const Kernels& kernels, const Decoder& decoder, bool bf16, const void* x, const void* weight, long rows,
          long width, void* out);

// Have threads that wait fetch the beginning of a weight, which is read soon. null: not known.
void expect_weight(const Linear* weight);

//   after  the first weight that is read after the layers; null: not known
void forward(const Kernels& kernels, const Decoder& decoder, const DecoderRows& rows, const std::vector<TextKV>& texts,
             const Linear* after = nullptr);

}  // namespace longdraft
