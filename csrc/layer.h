// All decoder layers in one call, made of one variant's operations: what Python would do step by step, without the
// steps through Python.
#pragma once

#include "layout.h"

namespace longdraft {

struct Layer {
    const void* attention_norm;
    const Linear* qkv;  // q, k, v stacked
    const Linear* out;
    const void* mlp_norm;
    const Linear* gate_up;  // gate, up stacked
    const Linear* down;
    long window;  // positions a row sees; 0: all
    const void *q_norm, *k_norm;  // of queries and keys before their rotation, or null
    bool norms_heads;             // each head by itself, not all of them as one vector
    bool rotates;
};

struct Decoder {
    long heads, kv_heads, dim;
    float eps;
    bool post_norm;  // attention and MLP read x as it is; what they give is normalised
    bool rounds_once;   // a norm rounds after its weight only
    float query_factor, residual_factor;  // on queries (with their rotation); on what a layer adds to x
    std::vector<Layer> layers;
};

// One text's part of a forward: rows that stand behind `length` positions of its own stores.
struct Part {
    std::vector<Store*> stores;  // of each layer
    long length, rows;
    const float* rest;  // [layers, heads, dim + 1, dim + 1] or null: maps to what is left out (rests_as)
};

// Rows on their way through the layers, those of one text after those of another; what is made for each layer has the
// layers as its first axis.
struct DecoderRows {
    long rows;
    const float *cos, *sin;  // [rows, dim / 2]
    const int32_t* parent;   // [rows], counted from the first row of the row's text
    void* x;                 // [rows, hidden], replaced by the result
    void *q, *k, *v;         // made here: [layers, rows, heads, dim], [layers, rows, kv_heads, dim] twice
    void* content;           // made here: queries before rotation [layers, rows, heads, dim]
    void* attended;          // made here: [layers, rows, heads, dim]
    float* lse;              // made here: [layers, rows, heads]
};

void forward(const Kernels& kernels, const Decoder& decoder, const DecoderRows& rows, const std::vector<Part>& parts);

}  // namespace longdraft
