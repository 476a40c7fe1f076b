// One variant of every operation. CMake compiles this file several times, each time with the instructions of other
// processors and LONGDRAFT_VARIANT set to the variant's name.
#include "attention.h"
#include "attention_weights.h"
#include "delta.h"
#include "fit.h"
#include "layout.h"
#include "int4.h"
#include "linear.h"
#include "routing.h"
#include "rows.h"
#include "simd.h"
#include "take_rows.h"

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

namespace longdraft {
namespace LONGDRAFT_VARIANT {
namespace {

template <class T> void pack_with(Linear& w, const void* weight) {
    w.is_int8 ? pack_as<T>(w, static_cast<const int8_t*>(weight))
              : pack_as<T>(w, static_cast<const typename T::Element*>(weight));
}

void pack(Linear& w, const void* weight) { w.is_bf16 ? pack_with<BF16>(w, weight) : pack_with<F32>(w, weight); }

void quantise_int4(bool bf16, const void* weight, long n, long k, uint8_t* values, uint16_t* scales, uint8_t* zeros) {
    bf16 ? int4::quantise<BF16>(weight, n, k, values, scales, zeros) : int4::quantise<F32>(weight, n, k, values, scales, zeros);
}

void products(const Product* products, long count) {
    products->weight->is_bf16 ? products_as<BF16>(products, count) : products_as<F32>(products, count);
}

void embed(const Linear& table, const int64_t* tokens, long rows, void* out) {
    table.is_bf16 ? embed_as<BF16>(table, tokens, rows, static_cast<uint16_t*>(out))
                  : embed_as<F32>(table, tokens, rows, static_cast<float*>(out));
}

void rms_norm(bool bf16, const void* x, const void* weight, long rows, long width, float eps, bool once, void* out) {
    bf16 ? rms_norm_as<BF16>(x, weight, rows, width, eps, once, out)
         : rms_norm_as<F32>(x, weight, rows, width, eps, once, out);
}

void scale(bool bf16, void* x, long count, float by) { bf16 ? scale_as<BF16>(x, count, by) : scale_as<F32>(x, count, by); }

void add(bool bf16, const void* a, const void* b, long count, void* out) {
    bf16 ? add_as<BF16>(a, b, count, out) : add_as<F32>(a, b, count, out);
}

void swiglu(bool bf16, const void* gate_up, long rows, long width, void* out) {
    const auto activation = [](Floats x) { return silu(x); };  // a function's address would be called for each vector
    bf16 ? gated_as<BF16>(gate_up, rows, width, out, activation) : gated_as<F32>(gate_up, rows, width, out, activation);
}

void geglu(bool bf16, const void* gate_up, long rows, long width, void* out) {
    const auto activation = [](Floats x) { return gelu(x); };
    bf16 ? gated_as<BF16>(gate_up, rows, width, out, activation) : gated_as<F32>(gate_up, rows, width, out, activation);
}

void clamped_swiglu(bool bf16, const void* gate_up, long rows, long width, float alpha, float limit, void* out) {
    bf16 ? clamped_swiglu_as<BF16>(gate_up, rows, width, alpha, limit, out)
         : clamped_swiglu_as<F32>(gate_up, rows, width, alpha, limit, out);
}

void gate(bool bf16, const void* x, const void* gates, long stride, long rows, long width, void* out) {
    bf16 ? gate_as<BF16>(x, gates, stride, rows, width, out) : gate_as<F32>(x, gates, stride, rows, width, out);
}

void rope(bool bf16, Rows x, const float* cos, const float* sin, long rows, long heads, long dim, void* out) {
    bf16 ? rope_as<BF16>(x, cos, sin, rows, heads, dim, out) : rope_as<F32>(x, cos, sin, rows, heads, dim, out);
}

void write(Store& s, long start, Rows k, Rows v, const int64_t* which, long rows) {
    s.is_bf16 ? write_as<BF16>(s, start, k, v, which, rows) : write_as<F32>(s, start, k, v, which, rows);
}

void read(const Store& s, const int64_t* positions, long count, void* k, void* v) {
    s.is_bf16 ? read_as<BF16>(s, positions, count, k, v) : read_as<F32>(s, positions, count, k, v);
}

void weights(const Store& s, long length, const void* q, long rows, long heads, float scale, float* out) {
    s.is_bf16 ? weights_as<BF16>(s, length, q, rows, heads, scale, out)
              : weights_as<F32>(s, length, q, rows, heads, scale, out);
}

void map_remainder(bool bf16, const void* content, const float* map, long rows, long heads, long dim, float* out) {
    bf16 ? map_remainder_as<BF16>(content, map, rows, heads, dim, out)
         : map_remainder_as<F32>(content, map, rows, heads, dim, out);
}

void attention(const Attention* texts, long count) {
    texts->store->is_bf16 ? attention_as<BF16>(texts, count) : attention_as<F32>(texts, count);
}

void learn_rows(bool bf16, const RemainderFit& f, const RemainderRows& rows, bool solves, float* fit) {
    bf16 ? learn_rows_as<BF16>(f, rows, solves, fit) : learn_rows_as<F32>(f, rows, solves, fit);
}

void subtract_part(bool bf16, const void* whole, const float* whole_lse, const void* part, const float* part_lse, long count,
                   long dim, float* out) {
    bf16 ? subtract_part_as<BF16>(whole, whole_lse, part, part_lse, count, dim, out)
         : subtract_part_as<F32>(whole, whole_lse, part, part_lse, count, dim, out);
}

void delta(bool bf16, const DeltaLayer& layer, const DeltaText* texts, long count) {
    bf16 ? delta_as<BF16>(layer, texts, count) : delta_as<F32>(layer, texts, count);
}

void route(bool bf16, const void* logits, long rows, const Routing& how, int32_t* experts, float* weights) {
    bf16 ? route_as<BF16>(logits, rows, how, experts, weights) : route_as<F32>(logits, rows, how, experts, weights);
}

void narrow(bool bf16, const float* x, long count, void* out) {
    bf16 ? narrow_some<BF16>(static_cast<uint16_t*>(out), x, count) : narrow_some<F32>(static_cast<float*>(out), x, count);
}

void rms_norm_float(bool bf16, const void* x, const float* weight, long rows, long width, float eps, void* out) {
    bf16 ? rms_norm_as<BF16, F32>(x, weight, rows, width, eps, true, out)
         : rms_norm_as<F32>(x, weight, rows, width, eps, true, out);
}

void convolve(bool bf16, const void* x, const float* base, const float* moving, long stride, long groups, long taps, long rows,
              long width, void* out) {
    bf16 ? convolve_as<BF16>(x, base, moving, stride, groups, taps, rows, width, out)
         : convolve_as<F32>(x, base, moving, stride, groups, taps, rows, width, out);
}

}  // namespace

extern const Kernels table;
const Kernels table = {STRINGIFY(LONGDRAFT_VARIANT), pack, mxfp4::pack, quantise_int4, products, embed, take_rows,
                       rms_norm, add, swiglu, gate, rope, write, read, weights, attention, map_remainder, scale,
                       learn_rows, subtract_part, delta, rms_norm_float, geglu, soft_cap_all,
                       clamped_swiglu, route, sigmoid_all, add_weighted, narrow, convolve};

}  // namespace LONGDRAFT_VARIANT
}  // namespace longdraft
