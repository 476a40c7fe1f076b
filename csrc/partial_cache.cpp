#include "partial_cache.h"

#include "pool.h"

#include <cmath>

namespace longdraft {
namespace {

constexpr long POSITIONS = 16;  // whose words of a key stand side by side (layout.h)

// Copy one position of one head. Keys and values of bfloat16 have two elements in a word.
void copy_position(const Store& source, long head, long from, Store& target, long to) {
    const long words = source.padded / source.step();
    auto key = [&](const Store& s, long at) {
        const long place = at % SPLIT;
        return s.key(at / SPLIT, head) + place / POSITIONS * words * POSITIONS + place % POSITIONS;
    };
    auto value = [&](const Store& s, long at) { return s.value(at / SPLIT, head) + at % SPLIT / s.step() * s.padded; };
    const uint32_t *from_key = key(source, from), *from_value = value(source, from);
    uint32_t *to_key = key(target, to), *to_value = value(target, to);
    for (long i = 0; i < words; i++) to_key[i * POSITIONS] = from_key[i * POSITIONS];
    if (!source.is_bf16) {
        std::memcpy(to_value, from_value, static_cast<size_t>(source.padded) * 4);
        return;
    }
    const auto* elements = reinterpret_cast<const uint16_t*>(from_value) + from % 2;
    auto* placed = reinterpret_cast<uint16_t*>(to_value) + to % 2;
    for (long i = 0; i < source.padded; i++) placed[2 * i] = elements[2 * i];
}

}  // namespace

void copy(const std::vector<Store*>& sources, const std::vector<Store*>& targets, const int64_t* positions, long count,
          long start) {
    const long heads = sources[0]->heads;
    for (Store* target : targets) target->prepare(start, count);
    parallel(static_cast<long>(sources.size()) * heads, [&](long i) {
        const size_t layer = static_cast<size_t>(i / heads);
        for (long n = 0; n < count; n++)
            copy_position(*sources[layer], i % heads, positions[i * count + n], *targets[layer], start + n);
    });
}

void remainder(const Kernels& kernels, const std::vector<Store*>& parts, long length, const WholeAttention& whole, float* out) {
    const long dim = parts[0]->dim, count = whole.rows * whole.heads;
    const bool bf16 = parts[0]->is_bf16;
    const size_t layer_bytes = static_cast<size_t>(count * dim) * (bf16 ? 2 : 4);
    auto of_layer = [&](const void* rows, size_t layer) {
        return static_cast<const char*>(rows) + static_cast<long>(layer) * whole.layer_rows * whole.heads * dim * (bf16 ? 2 : 4);
    };
    std::vector<char> part_out(parts.size() * layer_bytes);
    std::vector<float> lse(parts.size() * static_cast<size_t>(count));
    std::vector<int32_t> parent(static_cast<size_t>(whole.rows));
    for (size_t i = 0; i < parent.size(); i++) parent[i] = static_cast<int32_t>(i) - 1;
    std::vector<Attention> attentions;
    for (size_t layer = 0; layer < parts.size(); layer++)
        attentions.push_back({parts[layer], length - whole.rows, whole.rows, whole.heads, of_layer(whole.q, layer),
                              {nullptr, 0, 0}, {nullptr, 0, 0}, parent.data(), 1.0f / std::sqrt(static_cast<float>(dim)), 0,
                              nullptr, part_out.data() + layer * layer_bytes, lse.data() + layer * static_cast<size_t>(count)});
    kernels.attention(attentions.data(), static_cast<long>(attentions.size()));
    for (size_t layer = 0; layer < parts.size(); layer++)
        kernels.subtract_part(bf16, of_layer(whole.out, layer), whole.lse + static_cast<long>(layer) * whole.layer_rows * whole.heads,
                              part_out.data() + layer * layer_bytes, lse.data() + layer * static_cast<size_t>(count), count,
                              dim, out + static_cast<long>(layer) * count * (dim + 1));
}

void learn_remainder(const Kernels& kernels, const std::vector<Store*>& parts, long length, const WholeAttention& whole,
                     const void* content, RemainderFit& fit, float* maps) {
    std::vector<float> remainders(static_cast<size_t>(fit.count * whole.rows * fit.n));
    remainder(kernels, parts, length, whole, remainders.data());
    const bool solves = !fit.is_solved || fit.held + whole.rows >= fit.room;
    kernels.learn_rows(parts[0]->is_bf16, fit, {whole.rows, whole.heads, whole.layer_rows, content, remainders.data()}, solves,
                       maps);
    fit.held = solves ? 0 : fit.held + whole.rows;
    fit.is_solved = true;
}

}  // namespace longdraft
