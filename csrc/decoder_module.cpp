// The Python bindings of whole decoders: their layers, forwards, chains of drafts, and the rule of delta layers.
// decoder.py, chain.py and delta.py of longdraft/kernels/cpu call them. The arrays' shapes and types are checked here.
#include "module.h"

#include "draft.h"
#include "layer.h"

namespace longdraft {
namespace {

using LinearPair = std::pair<const Linear*, const Linear*>;
using StateArrays = std::pair<Array, Array>;                               // history, matrix
using DeltaArrays = std::tuple<StateArrays, StateArrays, Array, Array>;    // before, after, mixed, gates
using ChainStateArrays = std::tuple<StateArrays, StateArrays, StateArrays>;  // before, and two that rows write to in turn

using ConvolutionArrays = std::pair<Array, const Linear*>;                 // base, projection
// joined, norms of embedding and row, reads_both, keeps_normed, feeds_normed (Feedback)
using FeedbackArrays = std::tuple<const Linear*, Array, Array, bool, bool, bool>;

// shape: key heads, value heads, key dim, value dim, width
DeltaLayer delta_layer(const std::vector<long>& shape, const Array& conv, const Array& decay, const Array& bias,
                       const Array& norm, float eps) {
    require(shape.size() == 5 && *std::min_element(shape.begin(), shape.end()) > 0, "a shape of five numbers above 0");
    DeltaLayer l = {shape[0], shape[1], shape[2], shape[3], shape[4], nullptr, nullptr, nullptr, nullptr, eps};
    require(l.key_dim % 16 == 0 && l.value_dim % 16 == 0 && l.value_heads % l.key_heads == 0 && 2 <= l.width && l.width <= MAX_WIDTH,
            "head dims that are multiples of 16, whole groups of heads, a width of 2 to 16");
    l.conv = memory<float>("conv", conv, Type::FLOAT32, {l.width, channels(l)});
    l.decay = memory<float>("decay", decay, Type::FLOAT32, {l.value_heads});
    l.bias = memory<float>("bias", bias, Type::FLOAT32, {l.value_heads});
    l.norm = memory<float>("norm", norm, Type::FLOAT32, {l.value_dim});
    return l;
}

DeltaState state_of(const DeltaLayer& l, bool bf16, const StateArrays& arrays) {
    const long columns = state_columns(l);
    return {memory("a history", arrays.first, rows_type(bf16), {l.width - 1, channels(l)}),
            memory<float>("a state", arrays.second, Type::FLOAT32,
                          {l.value_heads, l.value_dim / columns, l.key_dim, columns})};
}

DeltaRows rows_of(const DeltaLayer& l, bool bf16, long count, const DeltaArrays& arrays) {
    const auto& [before, after, mixed, gates] = arrays;
    const DeltaRows rows = {state_of(l, bf16, before), state_of(l, bf16, after),
                            memory("mixed", mixed, rows_type(bf16), {count, channels(l)}),
                            memory<float>("gates", gates, Type::FLOAT32, {count, 2 * l.value_heads})};
    require(rows.before.matrix != rows.after.matrix, "two states");
    return rows;
}

// Of each delta layer of a decoder.
std::vector<DeltaRows> delta_rows(const Decoder& d, bool bf16, long count, const std::vector<DeltaArrays>& arrays) {
    require(arrays.size() == d.num_deltas(), "rows of each delta layer");
    std::vector<DeltaRows> rows;
    for (const Layer& l : d.layers)
        if (l.gates) rows.push_back(rows_of(l.delta, bf16, count, arrays[rows.size()]));
    return rows;
}

std::vector<ChainStates> chain_states(const Decoder& d, bool bf16, const std::vector<ChainStateArrays>& arrays) {
    require(arrays.size() == d.num_deltas(), "states of each delta layer");
    std::vector<ChainStates> states;
    for (const Layer& l : d.layers)
        if (l.gates) {
            const auto& [before, first, second] = arrays[states.size()];
            const ChainStates three = {state_of(l.delta, bf16, before), {state_of(l.delta, bf16, first), state_of(l.delta, bf16, second)}};
            require(three.after[0].matrix != three.before.matrix && three.after[0].matrix != three.after[1].matrix,
                    "a first row that writes to another state than it reads");
            states.push_back(three);
        }
    return states;
}

// The remainder's maps [heads, dim + 1, dim + 1] of each layer with a store; empty for none.
std::vector<const float*> maps_of(const Decoder& d, const LayerArrays& arrays) {
    std::vector<const float*> maps;
    if (arrays.each.empty()) return maps;
    require(arrays.each.size() == d.num_stores(), "a remainder for each store, or none");
    for (const Layer& l : d.layers)
        if (l.has_store())
            maps.push_back(memory<float>("a remainder", arrays.each[maps.size()], Type::FLOAT32,
                                         {d.heads, l.dim + 1, l.dim + 1}));
    return maps;
}

void require_stores(const Decoder& d, bool bf16, const std::vector<Store*>& stores, long length) {
    require_all(stores);
    for (const Store* store : stores) {
        require(store->is_bf16 == bf16, "stores of the decoder's type");
        require(0 <= length && length <= store->capacity(), "a length within the stores' positions");
    }
    require(d.has_stores(stores), "a store of its shape for each layer, and an MLP or experts");
}

std::pair<const float*, const float*> rotations(const Decoder& d, long rows, const Array& cos, const Array& sin) {
    const long width = d.num_ropes * d.dim / 2;
    return {memory<float>("cos", cos, Type::FLOAT32, {rows, width}), memory<float>("sin", sin, Type::FLOAT32, {rows, width})};
}

// One text's part of a forward; `LayersKV` in Python.
struct Text {
    std::vector<Store*> stores;
    long length;
    Array k, v;
    LayerArrays remainder;
    std::vector<long> tapped;
    Array taps;
    std::vector<DeltaArrays> deltas;
};

// For each layer, and for the result: where to copy the rows that enter it, or null; empty without taps.
std::vector<void*> taps_of(const Decoder& d, bool bf16, long hidden, long count, const std::vector<long>& tapped,
                           const Array& rows) {
    if (!rows) return {};
    const long layers = static_cast<long>(tapped.size()), last = static_cast<long>(d.layers.size());
    memory("tapped rows", rows, rows_type(bf16), {layers, count, hidden});
    std::vector<void*> taps(static_cast<size_t>(last + 1));
    for (long i = 0; i < layers; i++) {
        const long layer = tapped[static_cast<size_t>(i)];
        require(0 <= layer && layer <= last && !taps[static_cast<size_t>(layer)], "different tapped layers of the decoder");
        taps[static_cast<size_t>(layer)] = rows.part(i).data;
    }
    return taps;
}

// Whether x [layers, count, heads, dim] are the rows from `row` on of a tensor [layers, rows, heads, dim] at `start`.
bool is_slice(const Array& x, Type type, const char* start, long layers, long row, long count, long rows, long heads, long dim) {
    const long wanted[] = {rows * heads * dim, heads * dim, dim, 1};
    if (!x || x.type != type || !x.has_shape({layers, count, heads, dim}) || x.data != start + row * heads * dim * size_of(type))
        return false;
    for (long axis = 0; axis < 4; axis++)
        if (x.shape[axis] != 1 && x.stride[axis] != wanted[axis]) return false;
    return true;
}

void run_forward(const Kernels& k, const Decoder& d, const std::vector<const Text*>& texts, const Array& x, const Array& given,
                 const Array& source, const Array& cos, const Array& sin, const Array& parents, const Array& q, const Array& content,
                 const Array& attended, const Array& lse) {
    require_all(texts);
    require(!texts.empty() && !d.layers.empty() && x.axes == 2 && q.axes == 4,
            "layers, texts, rows [R, hidden] and queries [L, R, H, D]");
    const bool bf16 = x.type == Type::BFLOAT16;
    const Type type = rows_type(bf16);
    const long rows = x.shape[0], hidden = x.shape[1], reported = q.shape[1];
    const long layers = static_cast<long>(d.num_stores());
    require(d.layers[0].qkv->is_bf16 == bf16 && d.layers[0].out->n == hidden, "rows of the decoder's type and width");
    require(source || d.layers[0].qkv->k == hidden, "an input of the first layer's queries, keys and values");
    require(0 < reported && reported <= rows, "one or more of the rows to report");
    const int32_t* parent = memory<int32_t>("parents", parents, Type::INT32, {rows});
    std::vector<TextKV> placed;
    long row = 0;
    for (const Text* text : texts) {
        const long count = text->k.axes == 4 ? text->k.shape[1] : 0;
        const bool fits = count > 0 && row + count <= rows &&
                          is_slice(text->k, type, texts[0]->k.data, layers, row, count, rows, d.kv_heads, d.dim) &&
                          is_slice(text->v, type, texts[0]->v.data, layers, row, count, rows, d.kv_heads, d.dim);
        require(fits, "keys and values [L, R, Hkv, D] of the rows' type, a slice for each text");
        require_order(parent + row, count);
        require_stores(d, bf16, text->stores, text->length);
        placed.push_back({text->stores, text->length, count, maps_of(d, text->remainder),
                          taps_of(d, bf16, hidden, count, text->tapped, text->taps),
                          delta_rows(d, bf16, count, text->deltas)});
        row += count;
    }
    require(row == rows, "as many keys and values as rows");
    const long inputs = d.input_width();
    require(inputs ? given.type == type && given.has_shape({rows, inputs}) && given.stride[1] == 1 : !given,
            "the layers' inputs, rows of adjacent numbers");
    const auto [turn_cos, turn_sin] = rotations(d, rows, cos, sin);
    const DecoderRows all = {
        rows, reported, turn_cos, turn_sin, parent, memory("rows", x, type, {rows, hidden}),
        memory("queries", q, type, {layers, reported, d.heads, d.dim}), texts[0]->k.data, texts[0]->v.data,
        memory("content", content, type, {layers, reported, d.heads, d.dim}),
        memory("attention", attended, type, {layers, reported, d.heads, d.dim}),
        memory<float>("lse", lse, Type::FLOAT32, {layers, reported, d.heads}), given.data, inputs ? given.stride[0] : 0,
        optional_memory<void>("the first layer's input", source, type, {rows, d.layers[0].qkv->k})};
    nb::gil_scoped_release others_run;
    forward(k, d, all, placed);
}

void apply_delta(const Kernels& k, bool bf16, const DeltaLayer& layer, const std::vector<DeltaArrays>& texts, const Array& z,
                 const Array& out, const Array& parents) {
    const long size = bf16 ? 2 : 4, width = layer.value_heads * layer.value_dim;
    long rows = 0;
    for (const DeltaArrays& text : texts) rows += std::get<2>(text).axes == 2 ? std::get<2>(text).shape[0] : 0;
    require(!z || (z.type == rows_type(bf16) && z.has_shape({rows, width}) && z.stride[1] == 1), "z [R, Hv Dv] of the rows' type");
    const int32_t* parent = memory<int32_t>("parents", parents, Type::INT32, {rows});
    char* result = optional_memory<char>("a result", out, rows_type(bf16), {rows, width});
    require(z.is_given == out.is_given, "z and a result, or neither");
    std::vector<DeltaText> placed;
    long row = 0;
    for (const DeltaArrays& text : texts) {
        const Array& mixed = std::get<2>(text);
        const long count = mixed.axes == 2 ? mixed.shape[0] : 0;
        require(count > 0, "one or more rows of each text");
        const DeltaRows own = rows_of(layer, bf16, count, text);
        require_order(parent + row, count);
        placed.push_back({count, own.before.history, own.before.matrix, own.after.history, own.after.matrix, own.mixed, own.gates,
                          z ? z.data + row * z.stride[0] * size : nullptr, z ? z.stride[0] : 0,
                          result ? result + row * width * size : nullptr, parent + row});
        row += count;
    }
    nb::gil_scoped_release others_run;
    k.delta(bf16, layer, placed.data(), static_cast<long>(placed.size()));
}

// Convolutions around a sublayer with rows of `hidden` numbers, whose input has `inputs`.
Convolution convolution(const std::optional<ConvolutionArrays>& arrays, long inputs, long hidden) {
    if (!arrays) return {};
    const auto& [base, projection] = *arrays;
    const long taps = base.axes == 3 ? base.shape[1] : 0;
    require(inputs == hidden && taps > 0 && projection->k == hidden && projection->n % (2 * taps) == 0 &&
                hidden % (projection->n / (2 * taps)) == 0,
            "a base [2, taps, hidden] and a projection to whole groups for each tap");
    return {memory<float>("a base", base, Type::FLOAT32, {2, taps, hidden}), projection, taps};
}

// A layer with attention, or one with a state. Norms are of the rows' type, or float32 in all layers.
Layer layer(const Array& attention_norm, const Linear& qkv, const Linear& out, const Array& mlp_norm, const DeltaLayer* delta,
            const Linear* gates, long kv_heads, long dim, float query_factor, long window, const Array& q_norm, const Array& k_norm,
            const Array& v_norm, bool norms_heads, bool rotates, std::pair<long, long> ropes, const Array& sinks, bool is_gated,
            long source, const Array& attention_post_norm, const Array& mlp_post_norm, float scalar, std::optional<LinearPair> mlp,
            const Mixture* mixture, const std::vector<Array>& beside, std::optional<LinearPair> extra, const Array& extra_norm,
            bool is_causal, const std::optional<ConvolutionArrays>& attention_conv, const std::optional<ConvolutionArrays>& mlp_conv) {
    Layer l = {contiguous(attention_norm), &qkv, &out, contiguous(mlp_norm), window, contiguous(q_norm), contiguous(k_norm),
               norms_heads, rotates, ropes.first, ropes.second, contiguous(attention_post_norm), contiguous(mlp_post_norm),
               is_gated, gates, delta ? *delta : DeltaLayer{}};
    require((delta == nullptr) == (gates == nullptr), "the weights and the gates of a delta layer");
    l.sinks = contiguous<float>(sinks);
    l.kv_heads = kv_heads;
    l.dim = dim;
    l.query_factor = query_factor;
    l.v_norm = contiguous(v_norm);
    l.source = source;
    l.scalar = scalar;
    if (mlp) l.mlp = {mlp->first, mlp->second};
    if (mixture) l.mixture = *mixture;
    require(beside.empty() || beside.size() == 4, "four norms of a mixture beside an MLP");
    if (!beside.empty())
        l.beside = BesideNorms{contiguous(beside[0]), contiguous(beside[1]), contiguous(beside[2]), contiguous(beside[3])};
    if (extra) l.extra = {extra->first, extra->second, contiguous(extra_norm)};
    l.is_causal = is_causal;
    l.attention_conv = convolution(attention_conv, qkv.k, out.n);
    l.mlp_conv = convolution(mlp_conv, out.n, out.n);
    return l;
}

void add_layer(Decoder& d, const Layer& l) {
    if (!l.gates) {
        require(0 < l.kv_heads && l.kv_heads <= d.kv_heads && 0 < l.dim && l.dim <= d.dim, "heads within the largest");
        require(l.source < static_cast<long>(d.num_stores()), "an earlier layer with keys and values");
    }
    d.layers.push_back(l);
}

// shared: gate_up and down of the shared expert, and its gate.
Mixture mixture(const Linear& router, const std::vector<LinearPair>& mlps, long chosen, bool normalises, bool rounds,
                const Array& scales, bool has_gelu, float alpha, float limit, std::optional<LinearPair> shared,
                const Linear* shared_gate) {
    const long count = static_cast<long>(mlps.size());
    require(router.n == count && 0 < chosen && chosen <= count, "a router of all experts, and no more chosen than there are");
    require(shared.has_value() == (shared_gate != nullptr), "a shared expert and its gate");
    Mixture made = {&router, {}, {count, chosen, normalises, rounds, optional_memory<float>("scales of experts", scales, Type::FLOAT32, {count})},
                    has_gelu, alpha, limit, {}, shared_gate};
    for (const auto& [gate_up, down] : mlps) made.mlps.push_back({gate_up, down});
    if (shared) made.shared = {shared->first, shared->second};
    return made;
}

DraftModel draft_model(const Decoder& d, const Linear& embedding, const Linear& head, const Array& norm, float embedding_factor,
                       float logits_divisor, float logits_cap, const PartOfVocabulary* part, std::optional<LinearPair> inputs,
                       const Array& input_norm, std::vector<float> input_factors, std::optional<FeedbackArrays> feedback) {
    require(!d.layers.empty(), "layers");
    require(!part || static_cast<long>(part->ids.size()) == head.n, "a row of the head for each token of the part");
    const Type type = d.float_norms ? Type::FLOAT32 : rows_type(head.is_bf16);
    DraftModel model = {&d, &embedding, &head, optional_memory<void>("a norm", norm, type, {embedding.k}), embedding_factor,
                        logits_divisor, logits_cap, part, {}, {}};
    require(inputs.has_value() == (d.input_width() > 0), "inputs where the layers have some");
    if (inputs) {
        const auto [table, projection] = *inputs;
        require(table->k == d.input_width() && projection->n == table->k && input_factors.size() == 3,
                "a table and a projection of an input for each layer, and three factors");
        model.inputs = {table, projection, memory("the norm of inputs", input_norm, type, {table->k / static_cast<long>(d.layers.size())}),
                        input_factors[0], input_factors[1], input_factors[2]};
    }
    if (feedback) {
        const auto& [joined, of_embedding, of_row, reads_both, keeps_normed, feeds_normed] = *feedback;
        const long hidden = embedding.k;
        require(!inputs && d.layers[0].out->n == hidden, "layers as wide as the embeddings");
        require(!joined || (joined->k == 2 * hidden && joined->n == hidden), "a projection of embedding and row");
        require(d.layers[0].qkv->k == (reads_both ? 2 : 1) * hidden, "queries, keys and values of the first layer's input");
        model.feedback = Feedback{joined, optional_memory<void>("a norm", of_embedding, type, {hidden}),
                                  optional_memory<void>("a norm", of_row, type, {hidden}), reads_both, keeps_normed, feeds_normed};
        require((model.feedback->of_embedding && model.feedback->of_row) || joined, "norms, or a projection");
    }
    return model;
}

// Tokens, what stands for the row before each, cos, sin; see UnreadRows.
using UnreadArrays = std::tuple<std::vector<int64_t>, Array, Array, Array>;

// path: the text's last token, then drafted tokens that the chain continues.
Chain chain(const DraftModel& model, const std::vector<Store*>& stores, long length, const LayerArrays& remainder,
            const std::vector<ChainStateArrays>& states, const Choice& choice, long position, long width, double within,
            long banned_depth, std::tuple<std::vector<double>, std::vector<double>, double> end,
            const std::vector<int32_t>& path, const Array& cos, const Array& sin, const std::vector<long>& tapped,
            const Array& taps, const Array& row, std::optional<UnreadArrays> unread, long count) {
    const Decoder& d = *model.decoder;
    const bool bf16 = model.head->is_bf16;
    auto& [edges, rates, least] = end;
    const bool has_row = model.feedback.has_value();
    require(!path.empty(), "the last token of a text");
    require_ids(path, std::min(model.embedding->n, choice.vocabulary()));
    require((model.part ? static_cast<long>(model.part->places.size()) : model.head->n) == choice.vocabulary(),
            "logits of the vocabulary that the sampler chooses from");
    require(rates.size() == edges.size() + 1, "a rate below each edge, and one above");
    require_stores(d, bf16, stores, length);
    require(count > 0, "one or more tokens to draft");
    const auto [turn_cos, turn_sin] = rotations(d, count - has_row, cos, sin);
    char* before = optional_memory<char>("a row", row, rows_type(bf16), {1, model.embedding->k});
    require(has_row == (before != nullptr), "the text's last row, for layers that continue it");
    UnreadRows rows = {};
    if (unread) {
        auto& [tokens, states, read_cos, read_sin] = *unread;
        const long number = static_cast<long>(tokens.size());
        require(has_row && 0 < number && number <= length, "rows of a text, for layers that continue it");
        require_ids(tokens, model.embedding->n);
        const char* read = memory<char>("rows that are read", states, rows_type(bf16), {number, model.embedding->k});
        const auto [its_cos, its_sin] = rotations(d, number, read_cos, read_sin);
        rows = {std::move(tokens), read, its_cos, its_sin};
    }
    return {model,
            {stores, length, maps_of(d, remainder), chain_states(d, bf16, states),
             taps_of(d, bf16, model.embedding->k, count, tapped, taps)},
            &choice,
            {count, position, width, within, banned_depth, {std::move(edges), std::move(rates), least}}, path[0],
            {path.begin() + 1, path.end()}, turn_cos, turn_sin, before, std::move(rows)};
}

std::vector<RankedPair> pairs_of(std::vector<Ranked> places) {
    std::vector<RankedPair> pairs;
    for (Ranked& ranked : places) pairs.push_back(pair_of(std::move(ranked)));
    return pairs;
}

std::vector<RankedPair> run_draft(const Kernels& k, const Chain& chain) { return pairs_of(draft(k, chain)); }

std::vector<std::vector<RankedPair>> run_draft_apart(const Kernels& k, const std::vector<const Chain*>& chains) {
    require_all(chains);
    std::vector<std::vector<RankedPair>> found;
    for (std::vector<Ranked>& places : draft_apart(k, chains)) found.push_back(pairs_of(std::move(places)));
    return found;
}

// A bound class whose constructor is a function that makes one.
template <class T, class... Args, class... Extra> void constructor(nb::class_<T>& type, T (*make)(Args...), const Extra&... extra) {
    type.def("__init__", [make](T* made, Args... args) { new (made) T(make(std::forward<Args>(args)...)); }, extra...);
}

}  // namespace

void bind_decoder(nb::module_& m, nb::class_<Kernels>& kernels) {
    using namespace nb::literals;
    nb::class_<DeltaLayer> delta_class(m, "DeltaLayer");
    constructor(delta_class, &delta_layer, "shape"_a, "conv"_a, "decay"_a, "bias"_a, "norm"_a, "eps"_a);
    nb::class_<Mixture> mixture_class(m, "Mixture");
    constructor(mixture_class, &mixture, nb::kw_only(), "router"_a, "mlps"_a, "chosen"_a, "normalises"_a, "rounds"_a,
                "scales"_a.none(), "has_gelu"_a, "alpha"_a, "limit"_a, "shared"_a.none(), "shared_gate"_a.none());
    nb::class_<Layer> layer_class(m, "Layer");
    constructor(layer_class, &layer, nb::kw_only(), "attention_norm"_a, "qkv"_a, "out"_a, "mlp_norm"_a, "delta"_a.none() = nb::none(),
                "gates"_a.none() = nb::none(), "kv_heads"_a = 0, "dim"_a = 0, "query_factor"_a = 1.0f, "window"_a = 0,
                "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(), "v_norm"_a.none() = nb::none(),
                "norms_heads"_a = false, "rotates"_a = false, "ropes"_a = std::pair<long, long>(0, 0),
                "sinks"_a.none() = nb::none(), "is_gated"_a = false, "source"_a = -1, "attention_post_norm"_a.none() = nb::none(),
                "mlp_post_norm"_a.none() = nb::none(), "scalar"_a = 1.0f, "mlp"_a.none() = nb::none(),
                "mixture"_a.none() = nb::none(), "beside"_a = nb::make_tuple(), "extra"_a.none() = nb::none(),
                "extra_norm"_a.none() = nb::none(), "is_causal"_a = true, "attention_conv"_a.none() = nb::none(),
                "mlp_conv"_a.none() = nb::none());
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", [](Decoder* d, long heads, long kv_heads, long dim, float eps, bool post_norm, bool rounds_once,
                            float residual_factor, bool has_gelu, long num_ropes, bool float_norms) {
            require(heads > 0 && kv_heads > 0 && dim > 0 && num_ropes > 0, "heads and a rotation");
            new (d) Decoder{heads, kv_heads, dim, eps, post_norm, rounds_once, residual_factor, has_gelu, num_ropes, float_norms, {}};
        }, nb::kw_only(), "heads"_a, "kv_heads"_a, "dim"_a, "eps"_a, "post_norm"_a, "rounds_once"_a, "residual_factor"_a,
           "has_gelu"_a, "num_ropes"_a, "float_norms"_a)
        .def("add", &add_layer);
    nb::class_<Text>(m, "Text")
        .def("__init__", [](Text* text, std::vector<Store*> stores, long length, Array k, Array v, LayerArrays remainder,
                            std::vector<long> tapped, Array taps, std::vector<DeltaArrays> deltas) {
            new (text) Text{std::move(stores), length, k, v, std::move(remainder), std::move(tapped), taps, std::move(deltas)};
        }, "stores"_a, "length"_a, "k"_a, "v"_a, "remainder"_a.none(), "tapped"_a, "taps"_a.none(), "deltas"_a);
    nb::class_<DraftModel> model_class(m, "DraftModel");
    constructor(model_class, &draft_model, nb::kw_only(), "decoder"_a, "embedding"_a, "head"_a, "norm"_a.none(),
                "embedding_factor"_a, "logits_divisor"_a, "logits_cap"_a, "part"_a.none(), "inputs"_a.none(), "input_norm"_a.none(),
                "input_factors"_a, "feedback"_a.none());
    nb::class_<Chain> chain_class(m, "Chain");
    constructor(chain_class, &chain, nb::kw_only(), "model"_a, "stores"_a, "length"_a, "remainder"_a.none(), "states"_a, "choice"_a,
                "position"_a, "width"_a, "within"_a, "banned_depth"_a, "end"_a, "path"_a, "cos"_a, "sin"_a,
                "tapped"_a, "taps"_a.none(), "row"_a.none(), "unread"_a.none(), "count"_a);
    auto free_gil = nb::call_guard<nb::gil_scoped_release>();
    kernels.def("delta", &apply_delta, "bf16"_a, "layer"_a, "texts"_a, "z"_a.none(), "out"_a.none(), "parents"_a);
    kernels.def("forward", &run_forward, "decoder"_a, "texts"_a, "x"_a, "given"_a.none(), "source"_a.none(), "cos"_a, "sin"_a,
                "parents"_a, "q"_a, "content"_a, "attended"_a, "lse"_a);
    kernels.def("draft", &run_draft, free_gil);
    kernels.def("draft_apart", &run_draft_apart, free_gil);
}

}  // namespace longdraft
