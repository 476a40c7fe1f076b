// A whole decoder layer in one call, made of one variant's operations: what Python would do step by step,
// without the steps through Python.
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
    float eps;
    long heads, kv_heads, dim;
    long window;  // positions a row sees; 0: all
};

struct LayerRows {
    const void* x;  // [rows, hidden]
    long rows;
    const float *cos, *sin;  // [rows, dim / 2]
    const int32_t* parent;   // [rows]
    const float* rest;       // as in Attention
    void *q, *k, *v;         // made here: [rows, heads, dim], [rows, kv_heads, dim] twice
    void* attended;          // made here: [rows, heads, dim]
    float* lse;              // made here: [rows, heads]
    void* out;               // [rows, hidden]
};

void decoder_layer(const Kernels& kernels, const Layer& layer, const LayerRows& rows, Store& store, long length);

}  // namespace longdraft
