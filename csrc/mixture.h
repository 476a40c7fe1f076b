// A mixture of experts in place of a layer's MLP, with the operations of one variant. It computes what
// longdraft/kernels/experts.py does: all rows read each expert's weights once.
#pragma once

#include "layout.h"

#include <vector>

namespace longdraft {

struct Mlp {
    const Linear *gate_up, *down;  // gate and up stacked
};

struct Mixture {
    const Linear* router;
    std::vector<Mlp> mlps;  // the experts, of one shape
    Routing routing;
    bool has_gelu;          // gates of experts have GELU instead of SiLU
    float alpha, limit;     // of the clamped activation; limit 0: another one
    Mlp shared;             // an expert of every row, times the sigmoid of `shared_gate`; null: there is none
    const Linear* shared_gate;
};

// out [rows, hidden] of rows x [rows, hidden], which must not overlap. The router sees the rows `routed`, which may be x or
// out.
void mixture_forward(const Kernels& kernels, const Mixture& mixture, bool bf16, const void* x, const void* routed, long rows,
                     void* out);

}  // namespace longdraft
