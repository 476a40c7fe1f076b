// The Python face of the CPU kernels. Addresses and sizes come from longdraft/kernels/cpu.py, which checks
// them; nothing here is meant to be called by anybody else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "layer.h"
#include "layout.h"
#include "pool.h"

#include <string>

namespace nb = nanobind;
using Address = uintptr_t;

namespace longdraft {

void bind_suffix(nb::module_& m);  // suffix_module.cpp

#define VARIANT(name) namespace name { extern const Kernels table; }
#if defined(LONGDRAFT_X86)
VARIANT(avx512bf16)
VARIANT(avx2)
#endif
VARIANT(portable)
#undef VARIANT

namespace {

// The variants that this processor can run, the fastest first.
std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> found;
#if defined(LONGDRAFT_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
        found.push_back(&avx512bf16::table);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2::table);
#endif
    found.push_back(&portable::table);
    return found;
}

const Kernels& by_name(const std::string& name) {
    for (const Kernels* kernels : runnable())
        if (name == kernels->name) return *kernels;
    throw std::invalid_argument("this processor cannot run the variant " + name);
}

void require(bool condition, const char* wanted) {
    if (!condition) throw std::invalid_argument(std::string("CPU kernels want ") + wanted);
}

void require_order(const int32_t* parent, long rows) {
    for (long row = 0; row < rows; row++) require(-1 <= parent[row] && parent[row] < row, "parents before children");
}

template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }
Rows rows_at(Address address, long row_stride, long head_stride) { return {at<void>(address), row_stride, head_stride}; }

Linear* pack(const Kernels& kernels, bool bf16, long n, long k, Address weight, Address bias) {
    auto* packed = new Linear(bf16, n, k);
    kernels.pack(*packed, at<void>(weight));
    if (bias) packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    return packed;
}

}  // namespace
}  // namespace longdraft

NB_MODULE(_cpu, m) {
    using namespace longdraft;
    m.def("variants", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : runnable()) names.push_back(kernels->name);
        return names;
    });
    m.def("threads", &threads);
    m.def("set_threads", &set_threads);
    bind_suffix(m);

    nb::class_<Linear>(m, "Linear").def_ro("is_bf16", &Linear::is_bf16).def_ro("n", &Linear::n).def_ro("k", &Linear::k).def_prop_ro("nbytes", &Linear::bytes);

    nb::class_<Store>(m, "Store")
        .def(nb::init<bool, long, long>())
        .def("reserve", &Store::reserve)
        .def_ro("is_bf16", &Store::is_bf16)
        .def_ro("heads", &Store::heads)
        .def_ro("dim", &Store::dim)
        .def_prop_ro("capacity", &Store::capacity)
        .def_prop_ro("nbytes", &Store::bytes);

    auto free_gil = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Kernels>(m, "Kernels")
        .def_static("get", &by_name, nb::rv_policy::reference)
        .def_prop_ro("name", [](const Kernels& k) { return std::string(k.name); })
        .def("pack", &pack, nb::rv_policy::take_ownership)
        .def("linear", [](const Kernels& k, const Linear& w, Address x, long rows, Address out, bool keep_float) {
            k.linear(w, at<void>(x), rows, at<void>(out), keep_float); }, free_gil)
        .def("embed", [](const Kernels& k, const Linear& table, Address tokens, long rows, Address out) {
            k.embed(table, at<int64_t>(tokens), rows, at<void>(out)); })
        .def("rms_norm", [](const Kernels& k, bool bf16, Address x, Address weight, long rows, long width, float eps,
                            Address out) { k.rms_norm(bf16, at<void>(x), at<void>(weight), rows, width, eps, at<void>(out)); })
        .def("swiglu", [](const Kernels& k, bool bf16, Address x, long rows, long width, Address out) {
            k.swiglu(bf16, at<void>(x), rows, width, at<void>(out)); })
        .def("rope", [](const Kernels& k, bool bf16, Address x, long row_stride, long head_stride, Address cos, Address sin,
                        long rows, long heads, long dim, Address out) {
            k.rope(bf16, rows_at(x, row_stride, head_stride), at<float>(cos), at<float>(sin), rows, heads, dim, at<void>(out)); })
        .def("write", [](const Kernels& k, Store& s, long start, Address which, long rows, Address key, long key_row,
                         long key_head, Address value, long value_row, long value_head, long held) {
            for (long i = 0; which && i < rows; i++)
                require(0 <= at<int64_t>(which)[i] && at<int64_t>(which)[i] < held, "rows that are there");
            s.reserve(start + rows);
            k.write(s, start, rows_at(key, key_row, key_head), rows_at(value, value_row, value_head),
                    at<int64_t>(which), rows); })
        .def("decoder_layer", [](const Kernels& kernels, Address attention_norm, const Linear& qkv, const Linear& out,
                                 Address mlp_norm, const Linear& gate_up, const Linear& down, float eps, long heads,
                                 long kv_heads, long dim, Store& store, long length, long rows, Address x, Address cos,
                                 Address sin, Address parent, Address rest, Address q, Address k, Address v, Address attended,
                                 Address lse, Address result) {
            require_order(at<int32_t>(parent), rows);
            decoder_layer(kernels, {at<void>(attention_norm), &qkv, &out, at<void>(mlp_norm), &gate_up, &down, eps,
                                    heads, kv_heads, dim},
                          {at<void>(x), rows, at<float>(cos), at<float>(sin), at<int32_t>(parent), at<float>(rest),
                           at<void>(q), at<void>(k), at<void>(v), at<void>(attended), at<float>(lse), at<void>(result)}, store, length); }, free_gil)
        .def("read", [](const Kernels& k, const Store& s, Address positions, long count, Address key, Address value) {
            k.read(s, at<int64_t>(positions), count, at<void>(key), at<void>(value)); })
        .def("weights", [](const Kernels& k, const Store& s, long length, Address q, long rows, long heads, float scale,
                           Address out) { k.weights(s, length, at<void>(q), rows, heads, scale, at<float>(out)); }, free_gil)
        .def("attention", [](const Kernels& k, Store& s, long length, long rows, long heads, Address q, Address key,
                             long key_row, long key_head, Address value, long value_row, long value_head, Address parent,
                             float scale, Address rest, Address out, Address lse) {
            require_order(at<int32_t>(parent), rows);
            s.reserve(length + rows);
            k.attention({&s, length, rows, heads, at<void>(q), rows_at(key, key_row, key_head),
                         rows_at(value, value_row, value_head), at<int32_t>(parent), scale,
                         at<float>(rest), at<void>(out), at<float>(lse)}); }, free_gil);
}
