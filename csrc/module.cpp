// The Python bindings of the CPU kernels. Only longdraft/kernels/cpu/kernels.py and longdraft/sampling/fast.py call them, with
// addresses and sizes that they have checked. What Python cannot check cheaply is checked here.
#include "module.h"

#include "blocks.h"
#include "choice.h"
#include "layout.h"
#include "partial_cache.h"
#include "pool.h"

#if defined(LONGDRAFT_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace longdraft {

#define VARIANT(name) namespace name { extern const Kernels table; }
#if defined(LONGDRAFT_AMX)
VARIANT(amx)
#endif
#if defined(LONGDRAFT_X86)
VARIANT(avx512bf16)
VARIANT(avx2)
#endif
VARIANT(portable)
#undef VARIANT

namespace {

#if defined(LONGDRAFT_AMX)
// Linux grants the use of the matrix unit's registers to a process that asks for it, once.
bool may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool is_granted = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                                   syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_granted;
}
#endif

// The variants that this processor can run, fastest first.
std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> found;
#if defined(LONGDRAFT_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
#if defined(LONGDRAFT_AMX)
        if (may_use_tiles()) found.push_back(&amx::table);
#endif
        found.push_back(&avx512bf16::table);
    }
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

// `weight` is int8 where a scale is given, otherwise float32 or bfloat16.
Linear* pack(const Kernels& kernels, bool bf16, long n, long k, Address weight, Address scale, Address bias) {
    auto* packed = new Linear(bf16, scale ? 8 : bf16 ? 16 : 32, Groups::NONE, n, k);
    kernels.pack(*packed, at<void>(weight));
    if (scale) packed->scale.assign(at<float>(scale), at<float>(scale) + n);
    if (bias) packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    return packed;
}

// The encoding of a weight in groups: the number of bits, whether halves have scales, zero points, least values, common
// scales.
Groups groups_of(int bits, bool halves, bool has_zero, bool has_least, bool has_common) {
    for (Groups kind : {Groups::NIBBLES_ZERO, Groups::NIBBLES_LEAST, Groups::NIBBLES_COMMON, Groups::FIVE, Groups::FIVE_COMMON,
                        Groups::SIX_COMMON, Groups::BYTES, Groups::BYTES_HALVES_LEAST}) {
        const GroupShape shape = shape_of(kind);
        if (shape.bits == bits && shape.halves == halves && shape.has_zero == has_zero && shape.has_least == has_least &&
            (shape.common != 0) == has_common) return kind;
    }
    throw std::invalid_argument("an encoding of groups");
}

Linear* pack_number_groups(bool bf16, int bits, bool halves, long n, long k, Address values, Address scales, Address zeros,
                           Address least, Address common, Address bias, Address order) {
    require(!common || k % (GROUP * COMMON_GROUPS) == 0, "whole blocks of 256 inputs");
    auto* packed = new Linear(bf16, bits, groups_of(bits, halves, zeros != 0, least != 0, common != 0), n, k);
    pack_groups(*packed, {at<uint8_t>(values), at<void>(scales), at<void>(zeros ? zeros : least), at<uint16_t>(common)});
    if (bias) packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    if (order) packed->order.assign(at<int32_t>(order), at<int32_t>(order) + k);
    return packed;
}

// Rows of quantised blocks; `damaged` receives the result of pack_blocks.
Linear* pack_block_rows(bool bf16, long n, long k, Address rows, Address types, Address bias, Address damaged) {
    require(n > 0 && k > 0 && k % GROUP == 0, "rows of whole groups");
    const Groups kind = encoding_of(at<uint8_t>(types), n);
    require(kind != Groups::NONE, "types that groups can hold");
    require(!shape_of(kind).common || k % (GROUP * COMMON_GROUPS) == 0, "whole blocks of 256 inputs");
    auto* packed = new Linear(bf16, shape_of(kind).bits, kind, n, k);
    *at<int64_t>(damaged) = pack_blocks(*packed, at<const uint8_t*>(rows), at<uint8_t>(types));
    if (bias) packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    return packed;
}

Linear* pack_mxfp4(const Kernels& kernels, bool bf16, long n, long k, Address codes, Address exponents, Address bias) {
    require(k % MXFP4_GROUP == 0, "groups of 32 inputs");
    auto* packed = new Linear(bf16, MXFP4, Groups::NONE, n, k);
    kernels.pack_mxfp4(*packed, at<uint8_t>(codes), at<uint8_t>(exponents));
    if (bias) packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    return packed;
}

// A weight whose memory the caller fills (`memory_of`).
Linear* new_linear(bool bf16, int bits, long n, long k, bool has_bias, bool has_order) {
    require((bits == 4 || bits == 8) && n > 0 && k > 0, "4 or 8 bits and a shape");
    auto* packed = new Linear(bf16, bits, bits == 4 ? Groups::NIBBLES_ZERO : Groups::NONE, n, k);
    if (bits == 8) packed->scale.resize(static_cast<size_t>(n));
    if (has_bias) packed->bias.resize(static_cast<size_t>(n));
    if (has_order) packed->order.resize(static_cast<size_t>(k));
    return packed;
}

// Address and bytes of a weight's tiles, its scale, its bias and its order: all that it consists of.
std::vector<std::vector<Address>> memory_of(const Linear& w) {
    auto part = [](const auto& x) {
        return std::vector<Address>{reinterpret_cast<Address>(x.data()), x.size() * sizeof x[0]};
    };
    const auto tiles = reinterpret_cast<Address>(w.data->words());
    return {{tiles, static_cast<size_t>(w.tiles()) * w.tile_bytes()}, part(w.scale), part(w.bias), part(w.order)};
}

Linear* take_rows(const Kernels& kernels, const Linear& weight, const std::vector<int64_t>& rows) {
    require(!weight.is_grouped() && !weight.is_mxfp4 && !rows.empty(), "a weight without groups, and one or more rows");
    for (int64_t row : rows) require(0 <= row && row < weight.n, "rows of the weight");
    const int bits = weight.is_int8 ? 8 : weight.is_bf16 ? 16 : 32;
    auto* taken = new Linear(weight.is_bf16, bits, Groups::NONE, static_cast<long>(rows.size()), weight.k, false);
    kernels.take_rows(weight, rows.data(), *taken);
    return taken;
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
    m.def("workspace_bytes", [] { return workspace_bytes.load(); });
    bind_suffix(m);

    nb::class_<Linear>(m, "Linear")
        .def_ro("is_bf16", &Linear::is_bf16)
        .def_ro("is_int8", &Linear::is_int8)
        .def_prop_ro("is_grouped", &Linear::is_grouped)
        .def_ro("n", &Linear::n)
        .def_ro("k", &Linear::k)
        .def_prop_ro("nbytes", &Linear::bytes)
        .def_prop_ro("memory", &memory_of);

    nb::class_<Store>(m, "Store")
        .def(nb::init<bool, long, long, float>())
        .def("reserve", &Store::reserve)
        .def("append", [](Store& s, const Store& source, long first, long count) {
            require(s.is_bf16 == source.is_bf16 && s.heads == source.heads && s.dim == source.dim, "stores of one shape");
            require(first >= 0 && first % SPLIT == 0 && s.capacity() % SPLIT == 0 && count >= 0 &&
                        first + count <= source.capacity(), "whole blocks after whole blocks");
            s.append(source, first, count); })
        .def("bytes_of", &Store::bytes_of)
        .def_ro("is_bf16", &Store::is_bf16)
        .def_ro("heads", &Store::heads)
        .def_ro("dim", &Store::dim)
        .def_prop_ro("capacity", &Store::capacity)
        .def_prop_ro("nbytes", &Store::bytes);

    nb::class_<RemainderFit>(m, "RemainderFit")
        .def("__init__", [](RemainderFit* fit, long count, long n, long room, float decay_rows, float ridge, float ridge_rows,
                            float least_spread, float last_error, float log_zero) {
            require(count > 0 && n > 1 && room > 0, "heads, rows of two numbers or more, and room");
            new (fit) RemainderFit{count, n, room, decay_rows, ridge, ridge_rows, least_spread, last_error, log_zero}; })
        .def_prop_ro("nbytes", &RemainderFit::bytes);

    nb::class_<PartOfVocabulary>(m, "PartOfVocabulary")
        .def("__init__", [](PartOfVocabulary* part, std::vector<int64_t> ids, long vocabulary) {
            for (size_t i = 0; i < ids.size(); i++)
                require((i ? ids[i - 1] : -1) < ids[i] && ids[i] < vocabulary, "ascending ids of the vocabulary");
            new (part) PartOfVocabulary(std::move(ids), vocabulary); });

    nb::class_<Choice>(m, "Choice")
        .def("__init__", [](Choice* choice, double temperature, double lowest, double least, double filter_temperature,
                            float penalty, long window, uint64_t seed, long top_k, double top_p, long vocabulary,
                            std::vector<int64_t> banned) {
            require(top_k >= 0 && top_p > 0 && top_p <= 1, "a number of tokens and a share");
            require(vocabulary > 0 && (penalty == 1.0f || window > 0), "a vocabulary and a window");
            for (int64_t token : banned) require(0 <= token && token < vocabulary, "banned ids of the vocabulary");
            new (choice) Choice({temperature, lowest, least, filter_temperature, penalty, window, seed, top_k, top_p},
                                vocabulary, std::move(banned)); })
        .def("set_penalties", &Choice::set_penalties, nb::keep_alive<1, 2>())
        .def("extend", [](Choice& choice, Address tokens, long count) { choice.extend(at<int32_t>(tokens), count); })
        .def("choose", [](const Choice& choice, Address logits, const std::vector<int32_t>& tokens,
                          const std::vector<int32_t>& parents, long position, long banned_depth) {
            require_order(parents.data(), static_cast<long>(parents.size()));
            std::vector<int64_t> chosen(tokens.size());
            choice.choose(at<float>(logits), tokens.data(), parents.data(), static_cast<long>(tokens.size()), position,
                          banned_depth, chosen.data());
            return chosen; })
        .def("rank", [](const Choice& choice, Address logits, const std::vector<int32_t>& path, long position,
                        bool is_banned, long count, double within) {
            return pair_of(choice.rank(at<float>(logits), path.data(), static_cast<long>(path.size()), position, is_banned,
                                       count, within)); });

    auto free_gil = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Kernels> kernels(m, "Kernels");
    kernels
        .def_static("get", &by_name, nb::rv_policy::reference)
        .def_prop_ro("name", [](const Kernels& k) { return std::string(k.name); })
        .def("pack", &pack, nb::rv_policy::take_ownership)
        .def_static("pack_groups", &pack_number_groups, nb::rv_policy::take_ownership, free_gil)
        .def_static("pack_blocks", &pack_block_rows, nb::rv_policy::take_ownership, free_gil)
        .def_static("new_linear", &new_linear, nb::rv_policy::take_ownership)
        .def("take_rows", &take_rows, nb::rv_policy::take_ownership, free_gil)
        .def("pack_mxfp4", &pack_mxfp4, nb::rv_policy::take_ownership, free_gil)
        .def("quantise_int4", [](const Kernels& k, bool bf16, Address weight, long rows, long columns, Address values,
                             Address scales, Address zeros) {
            k.quantise_int4(bf16, at<void>(weight), rows, columns, at<uint8_t>(values), at<uint16_t>(scales), at<uint8_t>(zeros)); }, free_gil)
        .def("linear", [](const Kernels& k, const Linear& w, Address x, long rows, Address out, bool keep_float) {
            k.linear(w, at<void>(x), rows, at<void>(out), keep_float); }, free_gil)
        .def("embed", [](const Kernels& k, const Linear& table, const std::vector<int64_t>& tokens, Address out) {
            require(!table.is_mxfp4, "a table that is not in MXFP4");
            for (int64_t token : tokens) require(0 <= token && token < table.n, "token ids of the table");
            k.embed(table, tokens.data(), static_cast<long>(tokens.size()), at<void>(out)); })
        .def("rms_norm", [](const Kernels& k, bool bf16, Address x, Address weight, long rows, long width, float eps,
                            bool rounds_once, Address out) {
            k.rms_norm(bf16, at<void>(x), at<void>(weight), rows, width, eps, rounds_once, at<void>(out)); })
        .def("rms_norm_float", [](const Kernels& k, bool bf16, Address x, Address weight, long rows, long width, float eps,
                                  Address out) {
            k.rms_norm_float(bf16, at<void>(x), at<float>(weight), rows, width, eps, at<void>(out)); })
        .def("swiglu", [](const Kernels& k, bool bf16, Address x, long rows, long width, Address out) {
            k.swiglu(bf16, at<void>(x), rows, width, at<void>(out)); })
        .def("gate", [](const Kernels& k, bool bf16, Address x, Address gates, long stride, long rows, long width, Address out) {
            k.gate(bf16, at<void>(x), at<void>(gates), stride, rows, width, at<void>(out)); })
        .def("geglu", [](const Kernels& k, bool bf16, Address x, long rows, long width, Address out) {
            k.geglu(bf16, at<void>(x), rows, width, at<void>(out)); })
        .def("clamped_swiglu", [](const Kernels& k, bool bf16, Address x, long rows, long width, float alpha, float limit,
                                  Address out) {
            k.clamped_swiglu(bf16, at<void>(x), rows, width, alpha, limit, at<void>(out)); })
        .def("route", [](const Kernels& k, bool bf16, Address logits, long rows, long count, long chosen, bool normalises,
                         bool rounds, Address scales, Address experts, Address weights) {
            require(0 < chosen && chosen <= count, "no more experts than there are");
            k.route(bf16, at<void>(logits), rows, {count, chosen, normalises, rounds, at<float>(scales)},
                    at<int32_t>(experts), at<float>(weights)); })
        .def("sigmoid", [](const Kernels& k, Address x, long count) { k.sigmoid(at<float>(x), count); })
        .def("soft_cap", [](const Kernels& k, Address x, long count, float cap) { k.soft_cap(at<float>(x), count, cap); })
        .def("rope", [](const Kernels& k, bool bf16, Address x, long row_stride, long head_stride, Address cos,
                        Address sin, long rows, long heads, long dim, Address out) {
            k.rope(bf16, rows_at(x, row_stride, head_stride), at<float>(cos), at<float>(sin), rows, heads, dim,
                   at<void>(out)); })
        .def("write", [](const Kernels& k, Store& s, long start, Address which, long rows, Address key, long key_row,
                         long key_head, Address value, long value_row, long value_head, long num_rows) {
            for (long i = 0; which && i < rows; i++)
                require(0 <= at<int64_t>(which)[i] && at<int64_t>(which)[i] < num_rows,
                        "row numbers below the number of rows");
            s.prepare(start, rows);
            k.write(s, start, rows_at(key, key_row, key_head), rows_at(value, value_row, value_head),
                    at<int64_t>(which), rows); })
        .def("keep", [](const Kernels& k, const std::vector<Store*>& stores, long start,
                        const std::vector<int64_t>& rows, long num_rows, const std::vector<long>& strides, Address key,
                        Address value) {
            require(strides.size() == 3, "strides of layers, rows and heads");
            for (int64_t row : rows) require(0 <= row && row < num_rows, "row numbers below the number of rows");
            for (size_t i = 0; i < stores.size(); i++) {
                Store& s = *stores[i];
                const long count = static_cast<long>(rows.size());
                const long offset = static_cast<long>(i) * strides[0] * (s.is_bf16 ? 2 : 4);
                s.prepare(start, count);
                k.write(s, start, rows_at(key + offset, strides[1], strides[2]), rows_at(value + offset, strides[1], strides[2]),
                        rows.data(), count);
            } })
        .def_static("copy", [](const std::vector<Store*>& sources, const std::vector<Store*>& targets, Address positions,
                               long count, long start) {
            const int64_t* from = at<int64_t>(positions);
            for (const Store* source : sources)
                for (long p = 0; p < source->heads * count; p++, from++)
                    require(0 <= *from && *from < source->capacity(), "positions below the store's capacity");
            copy(sources, targets, at<int64_t>(positions), count, start); })
        .def("remainder", [](const Kernels& k, const std::vector<Store*>& parts, long length, long rows, long heads,
                             long layer_rows, Address q, Address whole, Address lse, Address out) {
            remainder(k, parts, length, {rows, heads, layer_rows, at<void>(q), at<void>(whole), at<float>(lse)},
                      at<float>(out)); }, free_gil)
        .def("learn_remainder", [](const Kernels& k, const std::vector<Store*>& parts, long length, long rows, long heads,
                                   long layer_rows, Address q, Address whole, Address lse, Address content,
                                   RemainderFit& fit, Address maps) {
            learn_remainder(k, parts, length, {rows, heads, layer_rows, at<void>(q), at<void>(whole), at<float>(lse)},
                            at<void>(content), fit, at<float>(maps)); }, free_gil)
        .def("read", [](const Kernels& k, const Store& s, Address positions, long count, Address key, Address value) {
            k.read(s, at<int64_t>(positions), count, at<void>(key), at<void>(value)); }, free_gil)
        .def("weights", [](const Kernels& k, const Store& s, long length, Address q, long rows, long heads, float scale,
                           Address out) {
            k.weights(s, length, at<void>(q), rows, heads, scale, at<float>(out)); }, free_gil)
        .def("attention", [](const Kernels& k, Store& s, long length, long rows, long heads, Address q, Address key,
                             long key_row, long key_head, Address value, long value_row, long value_head,
                             Address parent, float scale, long window, Address remainder, Address out, Address lse) {
            require_order(at<int32_t>(parent), rows);
            s.prepare(length, rows);
            const Attention text = {&s, length, rows, heads, at<void>(q), rows_at(key, key_row, key_head),
                                    rows_at(value, value_row, value_head), at<int32_t>(parent), scale,
                                    window, at<float>(remainder), at<void>(out), at<float>(lse)};
            k.attention(&text, 1); }, free_gil);
    bind_decoder(m, kernels);
}
