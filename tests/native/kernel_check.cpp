// The compiled kernels without Python: instructions against the architecture, products against a model of their arithmetic, and
// rows alone against rows together, all to the bit. Build it with -DLONGDRAFT_CHECK=ON; `make test-arm` runs it in an emulator.
#include "blocks.h"
#include "encoding.h"
#include "layout.h"
#include "model.h"
#include "variants.h"

#include <cstdio>
#include <random>
#include <string>
#include <vector>

using namespace longdraft;

void check_arm_instructions(long rounds, void (*wrong)(const char*));

namespace {

constexpr long MOST_ROWS = 17, OUTPUTS = 70;
long checks = 0, failures = 0;

void check(bool is_right, const std::string& what) {
    checks++;
    if (!is_right && failures++ < 20) std::printf("  wrong: %s\n", what.c_str());
}

std::mt19937 draw(7);
float normal() { return std::normal_distribution<float>()(draw); }
int whole(int low, int high) { return std::uniform_int_distribution<int>(low, high)(draw); }

bool same(const std::vector<float>& a, const std::vector<float>& b, long count) {
    return !std::memcmp(a.data(), b.data(), static_cast<size_t>(count) * sizeof(float));
}

// Rows of elements: their numbers, and what the kernels read.
struct Matrix {
    long rows, width;
    bool is_bf16;
    std::vector<float> numbers;
    std::vector<uint16_t> halves;

    Matrix(long r, long w, bool bf16) : rows(r), width(w), is_bf16(bf16), numbers(static_cast<size_t>(r * w)), halves(numbers.size()) {
        for (size_t i = 0; i < numbers.size(); i++) {
            halves[i] = to_bf16(numbers[i] = normal());
            if (bf16) numbers[i] = from_bf16(halves[i]);
        }
    }
    const void* row(long r) const {
        return is_bf16 ? static_cast<const void*>(halves.data() + r * width) : static_cast<const void*>(numbers.data() + r * width);
    }
    float at(long r, long i) const { return numbers[static_cast<size_t>(r * width + i)]; }
};

// A row times a row of a weight, as a chain over words: `to_odd` says how the sums of bfloat16 are rounded.
float chain(const float* x, const float* w, long width, bool bf16, bool to_odd) {
    float sum = 0;
    if (!bf16) {
        for (long i = 0; i < width; i++) sum = std::fma(x[i], w[i], sum);
        return sum;
    }
    for (long i = 0; i < width; i += 2) {
        uint16_t a[2] = {to_bf16(x[i]), 0}, b[2] = {to_bf16(w[i]), 0};
        if (i + 1 < width) a[1] = to_bf16(x[i + 1]), b[1] = to_bf16(w[i + 1]);
        sum = to_odd ? dot_to_odd(sum, a, b) : dot_fused(sum, a, b);
    }
    return sum;
}

// All rows together against each alone; and against the model, if there is one.
void check_products(const Kernels& kernels, const Linear& weight, const Matrix& x, const std::vector<float>* model,
                    const std::string& what) {
    std::vector<float> alone(static_cast<size_t>(MOST_ROWS * OUTPUTS)), together(alone);
    for (long r = 0; r < MOST_ROWS; r++) kernels.linear(weight, x.row(r), 1, alone.data() + r * OUTPUTS, true);
    for (long rows = 1; rows <= MOST_ROWS; rows++) {
        kernels.linear(weight, x.row(0), rows, together.data(), true);
        check(same(alone, together, rows * OUTPUTS), what + ": a row depends on " + std::to_string(rows) + " rows");
    }
    if (model) check(same(alone, *model, MOST_ROWS * OUTPUTS), what + ": not the bits of the model");
}

struct Variant {
    const Kernels& kernels;
    bool is_fused, to_odd;  // which model has its bits
};

// Words, and int8 with a scale for each output.
void check_words(const Variant& v, bool bf16, bool int8, long width) {
    const std::string what = std::string(v.kernels.name) + (int8 ? " int8" : bf16 ? " bfloat16" : " float32") + " products";
    const Matrix x(MOST_ROWS, width, bf16);
    Matrix w(OUTPUTS, width, bf16);
    std::vector<int8_t> bytes(w.numbers.size());
    Linear weight(bf16, int8 ? 8 : bf16 ? 16 : 32, Groups::NONE, OUTPUTS, width);
    if (int8) {
        for (size_t i = 0; i < bytes.size(); i++) w.numbers[i] = bytes[i] = static_cast<int8_t>(whole(-127, 127));
        for (long n = 0; n < OUTPUTS; n++) weight.scale.push_back(0.01f + std::fabs(normal()));
    }
    v.kernels.pack(weight, int8 ? bytes.data() : w.row(0));
    std::vector<float> model;
    for (long r = 0; r < MOST_ROWS; r++)
        for (long n = 0; n < OUTPUTS; n++) {
            model.push_back(chain(&x.numbers[static_cast<size_t>(r * width)], &w.numbers[static_cast<size_t>(n * width)], width, bf16, v.to_odd));
            if (int8) model.back() *= weight.scale[static_cast<size_t>(n)];
        }
    check_products(v.kernels, weight, x, v.is_fused ? &model : nullptr, what);
}

void check_mxfp4(const Variant& v, bool bf16, long width) {
    constexpr float NUMBERS[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
    const Matrix x(MOST_ROWS, width, bf16);
    std::vector<uint8_t> codes, exponents;
    std::vector<float> numbers, model;
    for (long i = 0; i < OUTPUTS * width / 2; i++) codes.push_back(static_cast<uint8_t>(whole(0, 255)));
    for (long i = 0; i < OUTPUTS * width / 32; i++) exponents.push_back(static_cast<uint8_t>(whole(120, 130)));
    for (long i = 0; i < OUTPUTS * width; i++) {
        const uint8_t code = codes[static_cast<size_t>(i / 2)];
        numbers.push_back(std::ldexp(NUMBERS[i % 2 ? code >> 4 : code & 15], exponents[static_cast<size_t>(i / 32)] - 127));
    }
    Linear weight(bf16, MXFP4, Groups::NONE, OUTPUTS, width);
    v.kernels.pack_mxfp4(weight, codes.data(), exponents.data());
    for (long r = 0; r < MOST_ROWS; r++)
        for (long n = 0; n < OUTPUTS; n++)
            model.push_back(chain(&x.numbers[static_cast<size_t>(r * width)], &numbers[static_cast<size_t>(n * width)], width, bf16, v.to_odd));
    check_products(v.kernels, weight, x, v.is_fused ? &model : nullptr, std::string(v.kernels.name) + " MXFP4 products");
}

// Weights in groups: exact integers for each group, then a few operations of floats (csrc/groups.h).
void check_groups(const Variant& v, Groups kind, long groups, bool bf16) {
    const GroupShape shape = shape_of(kind);
    const long width = groups * GROUP, numbers = OUTPUTS * groups;
    const int of_scale = shape.halves ? 2 : 1;
    const Matrix x(MOST_ROWS, width, bf16);
    std::vector<uint8_t> codes, zeros;
    std::vector<uint16_t> scales, leasts, common;
    std::vector<int8_t> whole_scales, whole_leasts;
    for (long i = 0; i < OUTPUTS * width; i++) codes.push_back(static_cast<uint8_t>(whole(0, (1 << shape.bits) - 1)));
    for (long i = 0; i < numbers * of_scale; i++) {
        scales.push_back(to_half(0.02f * normal())), whole_scales.push_back(static_cast<int8_t>(whole(-128, 127)));
    }
    for (long i = 0; i < numbers; i++) {
        zeros.push_back(static_cast<uint8_t>(whole(0, 15)));
        leasts.push_back(to_half(normal())), whole_leasts.push_back(static_cast<int8_t>(whole(0, 63)));
    }
    for (long i = 0; i < OUTPUTS * groups / COMMON_GROUPS * 2; i++) common.push_back(to_half(0.001f * normal()));
    Linear weight(bf16, shape.bits, kind, OUTPUTS, width);
    pack_groups(weight, {codes.data(), shape.common ? static_cast<void*>(whole_scales.data()) : scales.data(),
                         shape.has_zero ? static_cast<void*>(zeros.data()) : !shape.has_least ? nullptr
                         : shape.common ? static_cast<void*>(whole_leasts.data()) : leasts.data(),
                         shape.common ? common.data() : nullptr});
    std::vector<float> model;
    for (long r = 0; r < MOST_ROWS; r++)
        for (long n = 0; n < OUTPUTS; n++) {
            float total = 0;
            for (long g = 0; g < groups; g++) {
                float largest = 0;
                for (long i = 0; i < GROUP; i++) largest = std::max(largest, std::fabs(x.at(r, g * GROUP + i)));
                const float inverse = 127.0f / largest, step = largest / 127.0f;
                int32_t products[2] = {}, sum = 0;
                const long at = n * groups + g;
                for (long i = 0; i < GROUP; i++) {
                    const int value = static_cast<int>(std::nearbyint(x.at(r, g * GROUP + i) * inverse));
                    const int code = codes[static_cast<size_t>(n * width + g * GROUP + i)] - shape.offset;
                    products[shape.halves ? i / 16 : 0] += (code - (shape.has_zero ? zeros[static_cast<size_t>(at)] : 0)) * value;
                    sum += value;
                }
                auto common_at = [&](long which) {
                    const long each = shape.has_least ? 2 : 1;
                    return from_half(common[static_cast<size_t>((n * (groups / COMMON_GROUPS) + g / COMMON_GROUPS) * each + which)]);
                };
                for (int half = 0; half < of_scale; half++) {
                    const size_t which = static_cast<size_t>(at * of_scale + half);
                    const float scale = shape.common ? static_cast<float>(whole_scales[which]) * common_at(0) : from_half(scales[which]);
                    total = std::fma(static_cast<float>(products[half]) * step, scale, total);
                }
                if (!shape.has_least) continue;
                const size_t which = static_cast<size_t>(at);
                const float least = shape.common ? static_cast<float>(whole_leasts[which]) * common_at(1) : from_half(leasts[which]);
                total = std::fma(step * static_cast<float>(sum), least, total);
            }
            model.push_back(total);
        }
    check_products(v.kernels, weight, x, v.is_fused ? &model : nullptr,
                   std::string(v.kernels.name) + " products of groups of kind " + std::to_string(static_cast<int>(kind)));
}

// A chain of rows after a long prefix: each row alone after the rows before it, and all together.
void check_attention(const Variant& v, bool bf16, long dim, long length) {
    constexpr long HEADS = 2, SHARED = 3;  // KV heads, and query heads of each
    const Matrix k(length + MOST_ROWS, HEADS * dim, bf16), values(length + MOST_ROWS, HEADS * dim, bf16), q(MOST_ROWS, HEADS * SHARED * dim, bf16);
    auto rows_of = [&](const Matrix& m, long r) { return Rows{const_cast<void*>(m.row(r)), HEADS * dim, dim}; };
    std::vector<int64_t> which;
    for (long i = 0; i < length + MOST_ROWS; i++) which.push_back(i);
    std::vector<int32_t> parent;
    for (int r = 0; r < MOST_ROWS; r++) parent.push_back(r - 1);
    auto attend = [&](long committed, long first, long rows, std::vector<float>& lse) {
        Store store(bf16, HEADS, dim, 0.0f);
        store.prepare(0, length + MOST_ROWS);
        v.kernels.write(store, 0, rows_of(k, 0), rows_of(values, 0), which.data(), committed);
        std::vector<float> out(static_cast<size_t>(rows * HEADS * SHARED * dim));
        lse.resize(static_cast<size_t>(rows * HEADS * SHARED));
        const Attention text = {&store, committed, rows, HEADS * SHARED, q.row(first), rows_of(k, committed), rows_of(values, committed),
                                parent.data(), 1 / std::sqrt(static_cast<float>(dim)), 0, nullptr, out.data(), lse.data()};
        v.kernels.attention(&text, 1);
        return out;
    };
    const long row_bytes = HEADS * SHARED * dim * (bf16 ? 2 : 4);
    std::vector<float> lse, lse_alone;
    for (long rows : {2L, 5L, 8L, MOST_ROWS}) {
        const std::vector<float> together = attend(length, 0, rows, lse);
        for (long r = 0; r < rows; r++) {
            const std::vector<float> alone = attend(length + r, r, 1, lse_alone);
            const bool is_same = !std::memcmp(alone.data(), reinterpret_cast<const char*>(together.data()) + r * row_bytes, static_cast<size_t>(row_bytes))
                                 && !std::memcmp(lse_alone.data(), lse.data() + r * HEADS * SHARED, HEADS * SHARED * 4);
            check(is_same, std::string(v.kernels.name) + " attention: a row depends on others");
        }
    }
}

}  // namespace

int main() {
    for (const Kernels* kernels : runnable()) {
        const std::string name = kernels->name;
        const bool to_odd = name == "neon_bf16", is_x86 = name == "avx2" || name == "avxvnni" || name == "avx512vnni";
        const bool is_fused = to_odd || is_x86 || name == "neon" || name == "armv8";
        const Variant variant = {*kernels, is_fused, to_odd};
#if defined(LONGDRAFT_ARM)
        if (to_odd) {
            checks++;
            check_arm_instructions(100000, [](const char* instruction) { check(false, std::string(instruction) + " is not the model's"); });
        }
#endif
        for (bool bf16 : {false, true}) {
            for (long width : {33L, 130L, 512L})
                for (bool int8 : {false, true}) check_words(variant, bf16, int8, width);
            check_mxfp4(variant, bf16, 160);
            for (int kind = static_cast<int>(Groups::NIBBLES_ZERO); kind <= static_cast<int>(Groups::BYTES_HALVES_LEAST); kind++)
                check_groups(variant, static_cast<Groups>(kind), 24, bf16);
            for (long dim : {64L, 80L})
                for (long length : {1L, 300L}) check_attention(variant, bf16, dim, length);
        }
        std::printf("%s: %ld checks so far, %ld wrong\n", kernels->name, checks, failures);
    }
    return failures != 0;
}
