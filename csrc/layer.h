// All decoder layers in one call, with the operations of one variant. It computes what longdraft/kernels/layer.py does,
// without a call from Python for each operation.
#pragma once

#include "layout.h"
#include "mixture.h"

#include <algorithm>
#include <optional>

namespace longdraft {

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
    bool is_gated;                // qkv has the weights of the gate behind those of v
    const Linear* gates;          // of a delta layer: b and a stacked, and qkv is q, k, v, z; null: a layer with attention
    DeltaLayer delta;
    const float* sinks = nullptr;    // [heads]: scores of a key whose value is 0, which every row of a head sees, or null
    Mlp mlp = {};                    // or, in its place,
    std::optional<Mixture> mixture = {};
};

struct Decoder {
    long heads, kv_heads, dim;
    float eps;
    bool post_norm;    // norms are applied to the outputs of attention and MLP, not to their inputs
    bool rounds_once;  // a norm rounds only after its weight, not before it too
    float query_factor, residual_factor;  // multiply queries (with their rotation); the outputs of attention and MLP
    bool has_gelu;     // in the MLP, instead of SiLU
    long num_ropes;    // rotations of a forward
    bool float_norms;  // weights of norms are float32, whatever the rows are
    std::vector<Layer> layers;

    size_t num_deltas() const {
        return static_cast<size_t>(std::count_if(layers.begin(), layers.end(), [](const Layer& l) { return l.gates; }));
    }
    // Whether there is a store for each layer with attention, a state for each delta layer, and an MLP or experts for all.
    bool fits(size_t stores, size_t states) const {
        return states == num_deltas() && stores + states == layers.size() &&
               std::all_of(layers.begin(), layers.end(), [](const Layer& l) { return l.mixture || l.mlp.down; });
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
    std::vector<Store*> stores;  // one for each layer with attention
    long length, rows;           // committed positions, rows of the text
    const float* remainder;      // [layers, heads, dim + 1, dim + 1] or null: maps for map_remainder_as
    std::vector<void*> taps;     // for each layer, and for the result: where to copy the rows that enter it, or null
    std::vector<DeltaRows> deltas;  // one for each delta layer
};

// The rows of a forward, text after text. The results of each layer have the layers with attention as their first axis.
struct DecoderRows {
    long rows;
    const float *cos, *sin;  // [rows, num_ropes, dim / 2]
    const int32_t* parent;   // [rows], relative to the first row of the text
    void* x;                 // [rows, hidden], overwritten by the result
    void *q, *k, *v;         // results [layers, rows, heads, dim], and twice [layers, rows, kv_heads, dim]
    void* content;           // result: queries before their rotation [layers, rows, heads, dim]
    void* attended;          // result [layers, rows, heads, dim]
    float* lse;              // result [layers, rows, heads]
};

// The RMS norm of rows [rows, width] with a weight of the decoder.
void norm(const Kernels& kernels, const Decoder& decoder, bool bf16, const void* x, const void* weight, long rows,
          long width, void* out);

void forward(const Kernels& kernels, const Decoder& decoder, const DecoderRows& rows, const std::vector<TextKV>& texts);

}  // namespace longdraft
