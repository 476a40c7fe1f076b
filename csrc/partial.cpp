#include "partial.h"

#include <cmath>
#include <limits>

namespace longdraft {
namespace {

constexpr float NOTHING = 1e-3f;  // a share of attention too small to be told from rounding

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
    target.reserve(start + count);
    kernels.write(target, start, {k.data(), source.dim, count * source.dim}, {v.data(), source.dim, count * source.dim},
                  nullptr, count);
}

void remainder(const Kernels& kernels, Store& part, long length, long heads, const void* q, const void* whole,
               const float* whole_lse, float* rest) {
    // Attention wants a provisional row: the last position, read and handed in once more.
    const long dim = part.dim, size = part.is_bf16 ? 2 : 4;
    std::vector<int64_t> last(static_cast<size_t>(part.heads), length - 1);
    std::vector<char> k(static_cast<size_t>(part.heads * dim * size)), v(k.size());
    std::vector<char> out(static_cast<size_t>(heads * dim * size));
    std::vector<float> lse(static_cast<size_t>(heads));
    const int32_t parent = -1;
    kernels.read(part, last.data(), 1, k.data(), v.data());
    kernels.attention({&part, length - 1, 1, heads, q, {k.data(), part.heads * dim, dim}, {v.data(), part.heads * dim, dim},
                       &parent, 1.0f / std::sqrt(static_cast<float>(dim)), 0, nullptr, out.data(), lse.data()});
    for (long h = 0; h < heads; h++, rest += dim + 1) {
        const float share = std::exp(lse[static_cast<size_t>(h)] - whole_lse[h]), left = 1.0f - share;
        const bool is_nothing = !(left >= NOTHING);
        for (long i = 0; i < dim; i++)
            rest[i] = is_nothing ? 0.0f
                                 : (as_float(part.is_bf16, whole, h * dim + i) -
                                    share * as_float(part.is_bf16, out.data(), h * dim + i)) / left;
        rest[dim] = is_nothing ? -std::numeric_limits<float>::infinity() : whole_lse[h] + std::log(left);
    }
}

}  // namespace longdraft
