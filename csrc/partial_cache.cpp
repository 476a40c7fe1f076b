#include "partial_cache.h"

#include <cmath>
#include <limits>

namespace longdraft {
namespace {

constexpr float NEGLIGIBLE_SHARE = 1e-3f;  // a share of attention that rounding errors may produce

float as_float(bool bf16, const void* data, long i) {
    if (!bf16) return static_cast<const float*>(data)[i];
    uint32_t word = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

}  // namespace

void copy(const Kernels& kernels, const Store& source, Store& target, const int64_t* positions, long count, long start) {
    const size_t size = static_cast<size_t>(source.heads * count * source.dim) * (source.is_bf16 ? 2 : 4);
    std::vector<char> k(size), v(size);
    kernels.read(source, positions, count, k.data(), v.data());
    target.prepare(start, count);
    kernels.write(target, start, {k.data(), source.dim, count * source.dim}, {v.data(), source.dim, count * source.dim},
                  nullptr, count);
}

void remainder(const Kernels& kernels, Store& part, long length, long rows, long heads, const void* q, const void* whole,
               const float* whole_lse, float* out) {
    // The rows' own keys and values are the last ones: read them, and pass them as a chain that follows the others.
    const long dim = part.dim, size = part.is_bf16 ? 2 : 4, held = part.heads * rows;
    std::vector<int64_t> last(static_cast<size_t>(held));
    for (long i = 0; i < held; i++) last[static_cast<size_t>(i)] = length - rows + i % rows;
    std::vector<char> k(static_cast<size_t>(held * dim * size)), v(k.size());
    std::vector<char> part_out(static_cast<size_t>(rows * heads * dim * size));
    std::vector<float> lse(static_cast<size_t>(rows * heads));
    std::vector<int32_t> parent(static_cast<size_t>(rows));
    for (long i = 0; i < rows; i++) parent[static_cast<size_t>(i)] = static_cast<int32_t>(i - 1);
    kernels.read(part, last.data(), rows, k.data(), v.data());
    const Attention attention = {&part, length - rows, rows, heads, q, {k.data(), dim, rows * dim},
                                 {v.data(), dim, rows * dim}, parent.data(), 1.0f / std::sqrt(static_cast<float>(dim)),
                                 0, nullptr, part_out.data(), lse.data()};
    kernels.attention(&attention, 1);
    for (long h = 0; h < rows * heads; h++, out += dim + 1) {
        const float share = std::exp(lse[static_cast<size_t>(h)] - whole_lse[h]), left = 1.0f - share;
        const bool is_negligible = !(left >= NEGLIGIBLE_SHARE);
        for (long i = 0; i < dim; i++)
            out[i] = is_negligible ? 0.0f
                                 : (as_float(part.is_bf16, whole, h * dim + i) -
                                    share * as_float(part.is_bf16, part_out.data(), h * dim + i)) / left;
        out[dim] = is_negligible ? -std::numeric_limits<float>::infinity() : whole_lse[h] + std::log(left);
    }
}

}  // namespace longdraft
