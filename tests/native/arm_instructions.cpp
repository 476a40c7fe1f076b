// Whether this processor's, or this emulator's, dot products are those of the architecture: each instruction is compared with a
// model on random operands, extreme exponents, NaN and infinities among them.
#include "model.h"

#include <arm_neon.h>

#include <random>

namespace {

std::mt19937 draw(5);

// With `kind` 0 close exponents, 1 further ones, 2 all, 3 also NaN, infinities and denormals.
uint16_t random_bf16(int kind) {
    const auto r = static_cast<uint32_t>(draw());
    if (kind == 3 && r % 64 == 0) return static_cast<uint16_t>(draw());
    const uint32_t low = kind == 0 ? 120 : kind == 1 ? 100 : 1, high = kind == 0 ? 130 : kind == 1 ? 150 : 254;
    return static_cast<uint16_t>((r & 1) << 15 | (low + (r >> 8) % (high - low + 1)) << 7 | (r >> 1 & 127));
}

bool same(const float* a, const float* b) { return !std::memcmp(a, b, 16); }

// The names of the instructions that gave another result than the model with these operands.
void check_bf16(int kind, void (*wrong)(const char*)) {
    uint16_t x[8], y[8];
    float sum[4], got[4], expected[4];
    for (int i = 0; i < 8; i++) x[i] = random_bf16(kind), y[i] = random_bf16(kind);
    for (float& s : sum) s = bits_as<float>(static_cast<uint32_t>(random_bf16(kind)) << 16 | static_cast<uint32_t>(draw() & 0xffff));
    const bfloat16x8_t a = vreinterpretq_bf16_u16(vld1q_u16(x)), b = vreinterpretq_bf16_u16(vld1q_u16(y));
    const float32x4_t start = vld1q_f32(sum);
    vst1q_f32(got, vbfdotq_f32(start, a, b));
    for (int i = 0; i < 4; i++) expected[i] = dot_to_odd(sum[i], x + 2 * i, y + 2 * i);
    if (!same(got, expected)) wrong("BFDOT");
    vst1q_f32(got, vbfdotq_laneq_f32(start, a, b, 2));
    for (int i = 0; i < 4; i++) expected[i] = dot_to_odd(sum[i], x + 2 * i, y + 4);
    if (!same(got, expected)) wrong("BFDOT by element");
    vst1q_f32(got, vbfmmlaq_f32(start, a, b));
    for (int i = 0; i < 4; i++) {
        const uint16_t *row = x + i / 2 * 4, *column = y + i % 2 * 4;
        expected[i] = dot_to_odd(dot_to_odd(sum[i], row, column), row + 2, column + 2);
    }
    if (!same(got, expected)) wrong("BFMMLA");
    uint16_t rounded[4];
    vst1_u16(rounded, vreinterpret_u16_bf16(vcvt_bf16_f32(start)));
    for (int i = 0; i < 4; i++)
        if (rounded[i] != to_bf16(sum[i])) wrong("BFCVTN");
}

void check_int8(void (*wrong)(const char*)) {
    int8_t x[16], y[16];
    int32_t sum[4], got[4];
    for (int i = 0; i < 16; i++) x[i] = static_cast<int8_t>(draw()), y[i] = static_cast<int8_t>(draw());
    for (int32_t& s : sum) s = static_cast<int32_t>(draw() % 2000000) - 1000000;
    const int8x16_t a = vld1q_s8(x), b = vld1q_s8(y);
    vst1q_s32(got, vdotq_laneq_s32(vld1q_s32(sum), a, b, 1));
    for (int i = 0; i < 4; i++) {
        int32_t expected = sum[i];
        for (int j = 0; j < 4; j++) expected += x[4 * i + j] * y[4 + j];
        if (got[i] != expected) wrong("SDOT by element");
    }
    vst1q_s32(got, vmmlaq_s32(vld1q_s32(sum), a, b));
    for (int i = 0; i < 4; i++) {
        int32_t expected = sum[i];
        for (int j = 0; j < 8; j++) expected += x[i / 2 * 8 + j] * y[i % 2 * 8 + j];
        if (got[i] != expected) wrong("SMMLA");
    }
}

}  // namespace

void check_arm_instructions(long rounds, void (*wrong)(const char*)) {
    for (long round = 0; round < rounds; round++) check_bf16(static_cast<int>(round % 4), wrong), check_int8(wrong);
}
