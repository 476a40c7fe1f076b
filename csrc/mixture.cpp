#include "mixture.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

namespace longdraft {
namespace {

constexpr long MOST_PAIRS = 1024;  // pairs of a row and an expert at a time, besides one expert's: limits memory in prompts

// The memory of a forward.
struct Buffers {
    char *logits, *gathered, *gate_up, *inner, *shared_gate_up, *shared_inner;  // elements
    float *weights, *pair_weights, *outputs, *shared_weights, *shared_outputs, *total;
    int32_t *experts, *pair_rows;

    Buffers(const Mixture& m, long rows, long size) {
        const long pairs = rows * m.routing.chosen, some = std::min(pairs, MOST_PAIRS + rows), hidden = m.router->k;
        const long width = m.mlps[0].down->k, shared = m.shared_gate ? m.shared.down->k : 0;
        const long elements = rows * m.routing.count + some * (hidden + 3 * width) + rows * 3 * shared;
        const long words = 4 * pairs + some * hidden + rows * (2 * hidden + 1);
        constexpr long PIECES = 14;
        char* at = static_cast<char*>(workspace<8>(static_cast<size_t>(elements * size + words * 4 + PIECES * 64)));
        auto take = [&at](auto*& piece, long count, long bytes) {
            piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(at);
            at += round_up(count * bytes, 64);
        };
        take(logits, rows * m.routing.count, size);
        take(gathered, some * hidden, size);
        take(gate_up, some * 2 * width, size);
        take(inner, some * width, size);
        take(shared_gate_up, rows * 2 * shared, size);
        take(shared_inner, rows * shared, size);
        take(weights, pairs, 4);
        take(pair_weights, pairs, 4);
        take(outputs, some * hidden, 4);
        take(shared_weights, rows, 4);
        take(shared_outputs, rows * hidden, 4);
        take(total, rows * hidden, 4);
        take(experts, pairs, 4);
        take(pair_rows, pairs, 4);
    }
};

// One forward of a mixture.
class Forward {
  public:
    Forward(const Kernels& kernels, const Mixture& mixture, bool bf16, const void* x, long rows)
        : k_(kernels), m_(mixture), bf16_(bf16), x_(static_cast<const char*>(x)), rows_(rows), size_(bf16 ? 2 : 4),
          hidden_(mixture.router->k), b_(mixture, rows, size_) {}

    void run(const void* routed, void* out) {
        route(routed);
        std::fill_n(b_.total, rows_ * hidden_, 0.0f);
        const long count = m_.routing.count;
        for (long first = 0, end; first < count; first = end) {
            for (end = first + 1; end < count && starts_[static_cast<size_t>(end)] - start(first) < MOST_PAIRS;) end++;
            some_experts(first, end);
        }
        if (m_.shared_gate) {
            k_.sigmoid(b_.shared_weights, rows_);
            k_.add_weighted(b_.total, b_.shared_outputs, nullptr, b_.shared_weights, rows_, hidden_);
        }
        k_.narrow(bf16_, b_.total, rows_ * hidden_, out);
    }

  private:
    long start(long expert) const { return starts_[static_cast<size_t>(expert)]; }

    // Each row's experts, and the pairs of rows and experts sorted by expert.
    void route(const void* routed) {
        const Product products[] = {{m_.router, routed, rows_, b_.logits, false},
                                    {m_.shared_gate, x_, rows_, b_.shared_weights, true}};
        k_.products(products, m_.shared_gate ? 2 : 1);
        k_.route(bf16_, b_.logits, rows_, m_.routing, b_.experts, b_.weights);
        const long pairs = rows_ * m_.routing.chosen;
        starts_.assign(static_cast<size_t>(m_.routing.count) + 1, 0);
        for (long i = 0; i < pairs; i++) starts_[static_cast<size_t>(b_.experts[i]) + 1]++;
        std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
        std::vector<long> next(starts_.begin(), starts_.end() - 1);
        for (long i = 0; i < pairs; i++) {
            const long place = next[static_cast<size_t>(b_.experts[i])]++;
            b_.pair_rows[place] = static_cast<int32_t>(i / m_.routing.chosen);
            b_.pair_weights[place] = b_.weights[i];
        }
    }

    // Add the outputs of experts [first, end). The first time, the shared expert's are computed with them.
    void some_experts(long first, long end) {
        const long from = start(first), pairs = start(end) - from, inner = m_.mlps[0].down->k;
        const bool with_shared = first == 0 && m_.shared_gate;
        const char* rows = x_;
        if (rows_ > 1) {
            rows = b_.gathered;
            for (long i = 0; i < pairs; i++)
                std::memcpy(b_.gathered + i * hidden_ * size_, x_ + b_.pair_rows[from + i] * hidden_ * size_,
                            static_cast<size_t>(hidden_ * size_));
        }
        std::vector<Product> gate_up, down;
        for (long expert = first; expert < end; expert++) {
            const long place = start(expert) - from, count = start(expert + 1) - start(expert);
            if (!count) continue;
            const Mlp& mlp = m_.mlps[static_cast<size_t>(expert)];
            gate_up.push_back({mlp.gate_up, rows_ > 1 ? rows + place * hidden_ * size_ : rows, count,
                               b_.gate_up + place * 2 * inner * size_, false});
            down.push_back({mlp.down, b_.inner + place * inner * size_, count, b_.outputs + place * hidden_, true});
        }
        if (with_shared) {
            gate_up.push_back({m_.shared.gate_up, x_, rows_, b_.shared_gate_up, false});
            down.push_back({m_.shared.down, b_.shared_inner, rows_, b_.shared_outputs, true});
        }
        if (gate_up.empty()) return;
        k_.products(gate_up.data(), static_cast<long>(gate_up.size()));
        if (m_.limit != 0.0f) k_.clamped_swiglu(bf16_, b_.gate_up, pairs, inner, m_.alpha, m_.limit, b_.inner);
        else (m_.has_gelu ? k_.geglu : k_.swiglu)(bf16_, b_.gate_up, pairs, inner, b_.inner);
        if (with_shared) k_.swiglu(bf16_, b_.shared_gate_up, rows_, m_.shared.down->k, b_.shared_inner);
        k_.products(down.data(), static_cast<long>(down.size()));
        k_.add_weighted(b_.total, b_.outputs, b_.pair_rows + from, b_.pair_weights + from, pairs, hidden_);
    }

    const Kernels& k_;
    const Mixture& m_;
    const bool bf16_;
    const char* x_;
    const long rows_, size_, hidden_;
    Buffers b_;
    std::vector<long> starts_;  // of each expert's pairs, and the end
};

}  // namespace

void mixture_forward(const Kernels& kernels, const Mixture& mixture, bool bf16, const void* x, const void* routed, long rows,
                     void* out) {
    Forward(kernels, mixture, bf16, x, rows).run(routed, out);
}

}  // namespace longdraft
