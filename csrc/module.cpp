// The Python bindings of the CPU kernels, for longdraft/kernels/cpu and longdraft/sampling/fast.py. Shapes and types of
// activations are checked here; those of a weight's parts, which are packed once, in kernels.py.
#include "module.h"

#include <memory>

#include "blocks.h"
#include "choice.h"
#include "layout.h"
#include "partial_cache.h"
#include "pool.h"
#include "variants.h"

namespace longdraft {
namespace {

const Kernels& by_name(const std::string& name) {
    for (const Kernels* kernels : runnable())
        if (name == kernels->name) return *kernels;
    throw std::invalid_argument("this processor cannot run the variant " + name);
}

void assign(Linear& packed, const Array& bias) {
    if (const float* values = optional_memory<float>("a bias", bias, Type::FLOAT32, {packed.n})) packed.bias.assign(values, values + packed.n);
}

// Number of rows and columns of a weight.
std::pair<long, long> matrix(const Array& x) {
    require(x.axes == 2 && x.is_contiguous, "a contiguous matrix");
    return {x.shape[0], x.shape[1]};
}

// `weight` is int8 where a scale is given, otherwise float32 or bfloat16.
Linear* pack(const Kernels& kernels, bool bf16, const Array& weight, const Array& scale, const Array& bias) {
    const auto [n, k] = matrix(weight);
    require(weight.type == (scale ? Type::INT8 : rows_type(bf16)), "a weight of the kernels' type, or int8 with scales");
    auto packed = std::make_unique<Linear>(bf16, scale ? 8 : bf16 ? 16 : 32, Groups::NONE, n, k);
    kernels.pack(*packed, weight.data);
    if (const float* scales = optional_memory<float>("scales", scale, Type::FLOAT32, {n})) packed->scale.assign(scales, scales + n);
    assign(*packed, bias);
    return packed.release();
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

Linear* pack_number_groups(bool bf16, int bits, bool halves, const Array& values, const Array& scales, const Array& zeros,
                           const Array& least, const Array& common, const Array& bias, const Array& order) {
    const auto [n, k] = matrix(values);
    require(!common || k % (GROUP * COMMON_GROUPS) == 0, "whole blocks of 256 inputs");
    auto packed = std::make_unique<Linear>(bf16, bits, groups_of(bits, halves, zeros.is_given, least.is_given, common.is_given), n, k);
    pack_groups(*packed, {contiguous<uint8_t>(values), contiguous<void>(scales), contiguous<void>(zeros ? zeros : least),
                          contiguous<uint16_t>(common)});
    assign(*packed, bias);
    if (const int32_t* inputs = optional_memory<int32_t>("an order", order, Type::INT32, {k})) packed->order.assign(inputs, inputs + k);
    return packed.release();
}

// Rows of quantised blocks, whose addresses and types are given; `damaged` [1] receives the result of pack_blocks.
Linear* pack_block_rows(bool bf16, long k, const Array& rows, const Array& types, const Array& bias, const Array& damaged) {
    require(rows.axes == 1 && rows.shape[0] > 0 && k > 0 && k % GROUP == 0, "rows of whole groups");
    const long n = rows.shape[0];
    const auto* kinds = memory<uint8_t>("types", types, Type::UINT8, {n});
    const Groups kind = encoding_of(kinds, n);
    require(kind != Groups::NONE, "types that groups can hold");
    require(!shape_of(kind).common || k % (GROUP * COMMON_GROUPS) == 0, "whole blocks of 256 inputs");
    auto packed = std::make_unique<Linear>(bf16, shape_of(kind).bits, kind, n, k);
    *memory<int64_t>("an index", damaged, Type::INT64, {1}) =
        pack_blocks(*packed, memory<const uint8_t*>("addresses", rows, Type::INT64, {n}), kinds);
    assign(*packed, bias);
    return packed.release();
}

Linear* pack_mxfp4(const Kernels& kernels, bool bf16, const Array& codes, const Array& exponents, const Array& bias) {
    const auto [n, half] = matrix(codes);
    const long k = 2 * half;
    require(k % MXFP4_GROUP == 0, "groups of 32 inputs");
    auto packed = std::make_unique<Linear>(bf16, MXFP4, Groups::NONE, n, k);
    kernels.pack_mxfp4(*packed, memory<uint8_t>("codes", codes, Type::UINT8, {n, half}),
                       memory<uint8_t>("exponents", exponents, Type::UINT8, {n, k / MXFP4_GROUP}));
    assign(*packed, bias);
    return packed.release();
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

// The bytes of a weight's tiles, its scale, its bias and its order, in place: all that it consists of.
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
std::vector<Bytes> memory_of(nb::handle_t<Linear> self) {
    Linear& w = nb::cast<Linear&>(self);
    auto bytes = [&](void* start, size_t size) { return Bytes(start, {size}, self); };
    auto part = [&](auto& x) { return bytes(x.data(), x.size() * sizeof x[0]); };
    return {bytes(w.data->words(), static_cast<size_t>(w.tiles()) * static_cast<size_t>(w.tile_bytes())), part(w.scale), part(w.bias), part(w.order)};
}

Linear* take_rows(const Kernels& kernels, const Linear& weight, const std::vector<int64_t>& rows) {
    require(!weight.is_mxfp4 && !rows.empty(), "a weight that is not in MXFP4, and one or more rows");
    for (int64_t row : rows) require(0 <= row && row < weight.n, "rows of the weight");
    const int bits = weight.is_int8 ? 8 : weight.is_bf16 ? 16 : 32;
    auto* taken = new Linear(weight.is_bf16, bits, weight.groups, static_cast<long>(rows.size()), weight.k, false);
    kernels.take_rows(weight, rows.data(), *taken);
    return taken;
}

// The number of rows of x [R, width], of a type of rows.
long num_rows(const Array& x, long width) {
    require(x.axes == 2 && (x.type == Type::BFLOAT16 || x.type == Type::FLOAT32), "rows [R, K] of float32 or bfloat16");
    memory("rows", x, x.type, {x.shape[0], width});
    return x.shape[0];
}

float* float_values(const Array& x) {
    require(x.type == Type::FLOAT32 && x.is_contiguous, "contiguous float32");
    return reinterpret_cast<float*>(x.data);
}

bool is_bf16(const Array& x) { return x.type == Type::BFLOAT16; }

// Rows of gates, of half their width.
void gated(void (*operation)(bool, const void*, long, long, void*), const Array& x, const Array& out) {
    const long width = x.axes == 2 ? x.shape[1] / 2 : 0, rows = num_rows(x, 2 * width);
    operation(is_bf16(x), x.data, rows, width, memory("a result", out, x.type, {rows, width}));
}

// Keys or values [T, H, D] whose heads are contiguous.
Rows rows_of(const Array& x, const Store& s, long rows) {
    require(x.type == rows_type(s.is_bf16) && x.has_shape({rows, s.heads, s.dim}) && (x.stride[2] == 1 || s.dim == 1),
            "keys and values [T, Hkv, D] of the store, with contiguous heads");
    return {x.data, x.stride[0], x.stride[1]};
}

void write_rows(const Kernels& k, Store& s, long start, const Array& keys, const Array& values) {
    require(start >= 0 && keys.axes == 3, "a start of 0 or more, and keys [T, Hkv, D]");
    const long rows = keys.shape[0];
    const Rows key = rows_of(keys, s, rows), value = rows_of(values, s, rows);
    s.prepare(start, rows);
    k.write(s, start, key, value, nullptr, rows);
}

// Rows of keys and values [L, T, H, D], contiguous within each layer, go to the stores of the layers.
void keep_rows(const Kernels& k, const std::vector<Store*>& stores, long start, const std::vector<int64_t>& rows, const Array& keys,
               const Array& values) {
    require_all(stores);
    const long layers = static_cast<long>(stores.size()), count = static_cast<long>(rows.size());
    require(start >= 0 && layers > 0 && keys.axes == 4 && keys.shape[0] == layers, "keys [L, T, Hkv, D], and a store for each layer");
    const long width = keys.shape[2] * keys.shape[3];
    for (const Array* x : {&keys, &values}) {
        require(x->type == rows_type(stores[0]->is_bf16) && x->shape == keys.shape, "keys and values [L, T, Hkv, D] of the stores' type");
        const long wanted[] = {keys.stride[0], width, keys.shape[3], 1};
        for (long axis = 0; axis < 4; axis++)
            require(x->shape[axis] == 1 || x->stride[axis] == wanted[axis], "keys and values that are contiguous within a layer");
    }
    for (int64_t row : rows) require(0 <= row && row < keys.shape[1], "row numbers below the number of rows");
    for (const Store* s : stores)
        require(s->is_bf16 == stores[0]->is_bf16 && s->heads <= keys.shape[2] && s->dim <= keys.shape[3], "stores of no more and no larger heads");
    const long layer = keys.stride[0] * size_of(keys.type);
    for (long i = 0; i < layers && count; i++) {
        Store& s = *stores[static_cast<size_t>(i)];
        s.prepare(start, count);
        k.write(s, start, {keys.data + i * layer, width, keys.shape[3]}, {values.data + i * layer, width, keys.shape[3]}, rows.data(), count);
    }
}

void copy_rows(const std::vector<Store*>& sources, const std::vector<Store*>& targets, const Array& positions, long start) {
    require_all(sources), require_all(targets);
    const long layers = static_cast<long>(sources.size());
    require(layers > 0 && targets.size() == sources.size() && start >= 0 && positions.axes == 3, "as many targets, and positions [L, Hkv, N]");
    const Store& first = *sources[0];
    for (const auto* stores : {&sources, &targets})
        for (const Store* s : *stores)
            require(s->is_bf16 == first.is_bf16 && s->heads == first.heads && s->dim == first.dim, "stores of one shape");
    const long count = positions.shape[2];
    const auto* from = memory<int64_t>("positions", positions, Type::INT64, {layers, first.heads, count});
    const int64_t* each = from;
    for (const Store* source : sources)
        for (long i = 0; i < source->heads * count; i++, each++)
            require(0 <= *each && *each < source->capacity(), "positions below the store's capacity");
    copy(sources, targets, from, count, start);
}

void read_rows(const Kernels& k, const Store& s, const Array& positions, const Array& keys, const Array& values) {
    require(positions.axes == 2, "positions [Hkv, N]");
    const long count = positions.shape[1];
    const auto* from = memory<int64_t>("positions", positions, Type::INT64, {s.heads, count});
    for (long i = 0; i < s.heads * count; i++) require(0 <= from[i] && from[i] < s.capacity(), "positions below the store's capacity");
    const Type type = rows_type(s.is_bf16);
    k.read(s, from, count, memory("keys", keys, type, {s.heads, count, s.dim}), memory("values", values, type, {s.heads, count, s.dim}));
}

// Queries [T, H, D] of a store, in groups of its heads.
void* queries_of(const Array& q, const Store& s) {
    require(q.axes == 3 && q.shape[1] > 0 && q.shape[1] % s.heads == 0, "query heads in groups of KV heads");
    return memory("queries", q, rows_type(s.is_bf16), {q.shape[0], q.shape[1], s.dim});
}

void attend(const Kernels& k, Store& s, long length, const Array& q, const Array& keys, const Array& values, const Array& parents,
            float scale, long window, const Array& remainder, const Array& out, const Array& lse) {
    const void* queries = queries_of(q, s);
    const long rows = q.shape[0], heads = q.shape[1];
    require(rows > 0 && window >= 0 && 0 <= length && length <= s.capacity(), "one or more rows, a window of 0 or more, and a length "
            "within the store's positions");
    const auto* parent = memory<int32_t>("parents", parents, Type::INT32, {rows});
    require_order(parent, rows);
    const Attention text = {&s, length, rows, heads, queries, rows_of(keys, s, rows), rows_of(values, s, rows), parent, scale, window,
                            optional_memory<float>("a remainder", remainder, Type::FLOAT32, {rows, heads, s.dim + 1}),
                            memory("a result", out, q.type, {rows, heads, s.dim}), memory<float>("lse", lse, Type::FLOAT32, {rows, heads})};
    nb::gil_scoped_release others_run;
    s.prepare(length, rows);
    k.attention(&text, 1);
}

// The attention [L, T, H, D] of the last rows of a text to the full cache, beside stores of a partial cache. The layers may be
// further apart than T rows, in all arrays equally.
WholeAttention whole_attention(const std::vector<Store*>& parts, long length, const Array& q, const Array& out, const Array& lse,
                               const Array& content) {
    require_all(parts);
    require(!parts.empty() && q.axes == 4 && lse.axes == 3 && lse.shape[2] == q.shape[2] && q.shape[2] > 0,
            "queries [L, T, H, D] and lse [L, T, H]");
    const long layers = q.shape[0], rows = q.shape[1], heads = q.shape[2], dim = q.shape[3], apart = lse.stride[0] / heads;
    require(layers == static_cast<long>(parts.size()) && lse.type == Type::FLOAT32 && lse.has_shape({layers, rows, heads}), "a store for each layer");
    for (const Array* x : {&q, &out, &content}) {
        const long wanted[] = {apart * heads * dim, heads * dim, dim, 1};
        require(x->type == rows_type(parts[0]->is_bf16) && x->shape == q.shape && x->axes == 4, "rows of the stores' type");
        for (long axis = 0; axis < 4; axis++)
            require(x->shape[axis] == 1 || x->stride[axis] == wanted[axis], "rows of layers that are equally far apart");
    }
    require((rows == 1 || lse.stride[1] == heads) && (heads == 1 || lse.stride[2] == 1), "contiguous rows of lse");
    for (const Store* s : parts)
        require(s->is_bf16 == parts[0]->is_bf16 && s->heads == parts[0]->heads && s->dim == dim && 0 < rows && rows <= length &&
                    length <= s->capacity() && heads % s->heads == 0,
                "query heads in groups of KV heads, and rows within the stores' positions");
    return {rows, heads, apart, q.data, out.data, reinterpret_cast<float*>(lse.data)};
}

}  // namespace
}  // namespace longdraft

NB_MODULE(_cpu, m) {
    using namespace longdraft;
    using namespace nb::literals;
    m.def("variants", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : runnable()) names.push_back(kernels->name);
        return names;
    });
    m.def("threads", &threads);
    m.def("set_threads", [](int count) {
        require(count > 0, "one thread or more");
        set_threads(count);
    });
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
        .def("__init__", [](Store* store, bool bf16, long heads, long dim, float cap) {
            require(heads > 0 && dim > 0, "one head of one number, or more");
            new (store) Store(bf16, heads, dim, cap); })
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
            require_ids(banned, vocabulary);
            new (choice) Choice({temperature, lowest, least, filter_temperature, penalty, window, seed, top_k, top_p},
                                vocabulary, std::move(banned)); })
        .def("set_penalties", [](Choice& choice, const PathPenalties* penalties) {
            require(penalties->vocabulary() == choice.vocabulary(), "penalties of the same vocabulary");
            choice.set_penalties(penalties); }, nb::keep_alive<1, 2>())
        .def("extend", [](Choice& choice, const Tokens& tokens) {
            require_ids(tokens, choice.vocabulary());
            choice.extend(tokens.data(), static_cast<long>(tokens.size())); })
        .def("choose", [](const Choice& choice, const Array& logits, const std::vector<int32_t>& tokens,
                          const std::vector<int32_t>& parents, long position, long banned_depth, bool every) {
            require_order(parents.data(), static_cast<long>(parents.size()));
            require(parents.size() == tokens.size(), "a parent for each token");
            require_ids(tokens, choice.vocabulary());
            const long nodes = static_cast<long>(tokens.size());
            std::vector<int64_t> chosen(tokens.size());
            choice.choose(memory<float>("logits", logits, Type::FLOAT32, {nodes, choice.vocabulary()}), tokens.data(),
                          parents.data(), nodes, position, banned_depth, every, chosen.data());
            return chosen; })
        .def("rank", [](const Choice& choice, const Array& logits, const std::vector<int32_t>& path, long position,
                        bool is_banned, long count, double within) {
            require_ids(path, choice.vocabulary());
            return pair_of(choice.rank(memory<float>("logits", logits, Type::FLOAT32, {1, choice.vocabulary()}), path.data(),
                                       static_cast<long>(path.size()), position, is_banned, count, within)); })
        .def("shortlists", [](const Choice& choice, const Array& logits, long position, long banned_depth, long count,
                              const PartOfVocabulary* part) {
            require(!part || static_cast<long>(part->places.size()) == choice.vocabulary(), "a part of the same vocabulary");
            require(logits.axes == 2 && count > 0, "logits [places, V], and one guess or more");
            const long places = logits.shape[0], size = part ? static_cast<long>(part->ids.size()) : choice.vocabulary();
            std::vector<std::pair<std::vector<int64_t>, std::vector<double>>> found;
            for (auto& [tokens, scores] : choice.shortlists(memory<float>("logits", logits, Type::FLOAT32, {places, size}), places,
                                                            position, banned_depth, count, part))
                found.emplace_back(std::move(tokens), std::move(scores));
            return found; }, "logits"_a, "position"_a, "banned_depth"_a, "count"_a, "part"_a.none());

    auto free_gil = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Kernels> kernels(m, "Kernels");
    kernels
        .def_static("get", &by_name, nb::rv_policy::reference)
        .def_prop_ro("name", [](const Kernels& k) { return std::string(k.name); })
        .def("pack", &pack, nb::rv_policy::take_ownership, free_gil, "bf16"_a, "weight"_a, "scale"_a.none(), "bias"_a.none())
        .def_static("pack_groups", &pack_number_groups, nb::rv_policy::take_ownership, nb::kw_only(), "bf16"_a, "bits"_a, "halves"_a,
                    "values"_a, "scales"_a, "zeros"_a.none() = nb::none(), "least"_a.none() = nb::none(),
                    "common"_a.none() = nb::none(), "bias"_a.none(), "order"_a.none() = nb::none())
        .def_static("pack_blocks", &pack_block_rows, nb::rv_policy::take_ownership, free_gil, "bf16"_a, "columns"_a, "rows"_a,
                    "types"_a, "bias"_a.none(), "damaged"_a)
        .def_static("new_linear", &new_linear, nb::rv_policy::take_ownership)
        .def("take_rows", &take_rows, nb::rv_policy::take_ownership, free_gil)
        .def("pack_mxfp4", &pack_mxfp4, nb::rv_policy::take_ownership, free_gil, "bf16"_a, "codes"_a, "exponents"_a, "bias"_a.none())
        .def("quantise_int4", [](const Kernels& k, const Array& weight, const Array& values, const Array& scales, const Array& zeros) {
            const auto [n, columns] = matrix(weight);
            const long groups = (columns + GROUP - 1) / GROUP;
            k.quantise_int4(is_bf16(weight), memory("a weight", weight, rows_type(is_bf16(weight)), {n, columns}), n, columns,
                            memory<uint8_t>("values", values, Type::UINT8, {n, columns}),
                            memory<uint16_t>("scales", scales, Type::FLOAT16, {n, groups}),
                            memory<uint8_t>("zeros", zeros, Type::UINT8, {n, groups})); }, free_gil)
        .def("linear", [](const Kernels& k, const Linear& w, const Array& x, const Array& out, bool keep_float) {
            const long rows = num_rows(x, w.k);
            require(is_bf16(x) == w.is_bf16, "rows and a weight of one type");
            void* result = memory("a result", out, keep_float ? Type::FLOAT32 : x.type, {rows, w.n});
            if (rows) k.linear(w, x.data, rows, result, keep_float); }, free_gil)
        .def("embed", [](const Kernels& k, const Linear& table, const std::vector<int64_t>& tokens, const Array& out) {
            require(!table.is_mxfp4, "a table that is not in MXFP4");
            require_ids(tokens, table.n);
            const long rows = static_cast<long>(tokens.size());
            k.embed(table, tokens.data(), rows, memory("a result", out, rows_type(table.is_bf16), {rows, table.k})); }, free_gil)
        .def("rms_norm", [](const Kernels& k, const Array& x, const Array& weight, float eps, bool rounds_once, const Array& out) {
            require(weight.axes == 1, "a norm [K]");
            const long width = weight.shape[0], rows = num_rows(x, width);
            void* result = memory("a result", out, x.type, {rows, width});
            if (is_bf16(x) && weight.type == Type::FLOAT32) {
                require(rounds_once, "a norm that rounds once for a float32 weight");
                k.rms_norm_float(true, x.data, memory<float>("a norm", weight, Type::FLOAT32, {width}), rows, width, eps, result);
            } else {
                k.rms_norm(is_bf16(x), x.data, memory("a norm", weight, x.type, {width}), rows, width, eps, rounds_once, result);
            } })
        .def("swiglu", [](const Kernels& k, const Array& x, const Array& out) { gated(k.swiglu, x, out); })
        .def("geglu", [](const Kernels& k, const Array& x, const Array& out) { gated(k.geglu, x, out); })
        .def("clamped_swiglu", [](const Kernels& k, const Array& x, float alpha, float limit, const Array& out) {
            const long width = x.axes == 2 ? x.shape[1] / 2 : 0, rows = num_rows(x, 2 * width);
            k.clamped_swiglu(is_bf16(x), x.data, rows, width, alpha, limit, memory("a result", out, x.type, {rows, width})); })
        .def("gate", [](const Kernels& k, const Array& x, const Array& gates, const Array& out) {
            const long width = x.axes == 2 ? x.shape[1] : 0, rows = num_rows(x, width);
            require(gates.type == x.type && gates.has_shape({rows, width}) && gates.stride[1] == 1, "gates like the rows");
            k.gate(is_bf16(x), x.data, gates.data, gates.stride[0], rows, width, memory("a result", out, x.type, {rows, width})); })
        .def("route", [](const Kernels& k, const Array& logits, long chosen, bool normalises, bool rounds, const Array& scales,
                         const Array& experts, const Array& weights) {
            const long count = logits.axes == 2 ? logits.shape[1] : 0, rows = num_rows(logits, count);
            require(0 < chosen && chosen <= count, "no more experts than there are");
            const float* factors = optional_memory<float>("scales of experts", scales, Type::FLOAT32, {count});
            k.route(is_bf16(logits), logits.data, rows, {count, chosen, normalises, rounds, factors},
                    memory<int32_t>("experts", experts, Type::INT32, {rows, chosen}),
                    memory<float>("weights", weights, Type::FLOAT32, {rows, chosen})); },
             "logits"_a, "chosen"_a, "normalises"_a, "rounds"_a, "scales"_a.none(), "experts"_a, "weights"_a)
        .def("sigmoid", [](const Kernels& k, const Array& x) { k.sigmoid(float_values(x), x.size()); })
        .def("soft_cap", [](const Kernels& k, const Array& x, float cap) { k.soft_cap(float_values(x), x.size(), cap); })
        .def("rope", [](const Kernels& k, const Array& x, const Array& cos, const Array& sin, const Array& out) {
            require(x.axes == 3 && x.shape[2] % 2 == 0 && x.stride[2] == 1, "rows [R, H, D] with contiguous heads of an even D");
            const long rows = x.shape[0], heads = x.shape[1], dim = x.shape[2];
            require(x.type == Type::FLOAT32 || is_bf16(x), "rows of float32 or bfloat16");
            k.rope(is_bf16(x), {x.data, x.stride[0], x.stride[1]}, memory<float>("cos", cos, Type::FLOAT32, {rows, dim / 2}),
                   memory<float>("sin", sin, Type::FLOAT32, {rows, dim / 2}), rows, heads, dim,
                   memory("a result", out, x.type, {rows, heads, dim})); })
        .def("write", &write_rows)
        .def("keep", &keep_rows)
        .def_static("copy", &copy_rows)
        .def("remainder", [](const Kernels& k, const std::vector<Store*>& parts, long length, const Array& q, const Array& output,
                             const Array& lse, const Array& out) {
            const WholeAttention whole = whole_attention(parts, length, q, output, lse, q);
            float* result = memory<float>("a result", out, Type::FLOAT32, {q.shape[0], whole.rows, whole.heads, q.shape[3] + 1});
            nb::gil_scoped_release others_run;
            remainder(k, parts, length, whole, result); })
        .def("learn_remainder", [](const Kernels& k, const std::vector<Store*>& parts, long length, const Array& q, const Array& output,
                                   const Array& lse, const Array& content, RemainderFit& fit, const Array& maps) {
            const WholeAttention whole = whole_attention(parts, length, q, output, lse, content);
            require(fit.count == q.shape[0] * whole.heads && fit.n == q.shape[3] + 1, "the stores and heads of the fit");
            float* result = memory<float>("maps", maps, Type::FLOAT32, {q.shape[0], whole.heads, fit.n, fit.n});
            nb::gil_scoped_release others_run;
            learn_remainder(k, parts, length, whole, content.data, fit, result); })
        .def("read", &read_rows)
        .def("weights", [](const Kernels& k, const Store& s, long length, const Array& q, float scale, const Array& out) {
            const void* queries = queries_of(q, s);
            require(0 < length && length <= s.capacity(), "one position or more, within the store's");
            float* result = memory<float>("a result", out, Type::FLOAT32, {s.heads, length});
            const long rows = q.shape[0], heads = q.shape[1];
            nb::gil_scoped_release others_run;
            k.weights(s, length, queries, rows, heads, scale, result); })
        .def("attention", &attend, "store"_a, "length"_a, "q"_a, "keys"_a, "values"_a, "parents"_a, "scale"_a, "window"_a,
             "remainder"_a.none(), "out"_a, "lse"_a);
    bind_decoder(m, kernels);
}
