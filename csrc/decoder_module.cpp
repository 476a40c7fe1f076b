// The Python bindings of whole decoders: their layers, forwards, chains of drafts, and the rule of delta layers.
// cpu_decoder.py, native_draft.py and cpu_delta.py call them, with addresses and sizes that they have checked.
#include "module.h"

#include "draft.h"
#include "layer.h"

namespace longdraft {
namespace {

using Addresses = std::vector<Address>;

// key heads, value heads, key dim, value dim, width; then the addresses of conv, decay, bias and norm.
DeltaLayer delta_layer(const std::vector<long>& shape, const Addresses& weights, float eps) {
    require(shape.size() == 5 && weights.size() == 4, "the shape and the weights of a delta layer");
    return {shape[0], shape[1], shape[2], shape[3], shape[4], at<float>(weights[0]), at<float>(weights[1]),
            at<float>(weights[2]), at<float>(weights[3]), eps};
}

// heads: those of keys and values, and their dimension. source: -1, or a layer with a store before this one.
void set_heads(Decoder& d, std::pair<long, long> heads, float query_factor, Address v_norm, long source, float scalar) {
    Layer& l = d.layers.back();
    require(source < static_cast<long>(d.num_stores()) - 1, "an earlier layer with keys and values");
    require(0 < heads.first && heads.first <= d.kv_heads && 0 < heads.second && heads.second <= d.dim, "heads within the largest");
    l.kv_heads = heads.first, l.dim = heads.second, l.query_factor = query_factor;
    l.v_norm = at<void>(v_norm), l.source = source, l.scalar = scalar;
}

// shared: gate_up, down and gate of the shared expert, or nothing.
Mixture mixture(const Linear& router, const std::vector<std::pair<Linear*, Linear*>>& mlps, const Routing& routing,
                bool has_gelu, float alpha, float limit, const std::vector<Linear*>& shared) {
    require(static_cast<long>(mlps.size()) == routing.count && 0 < routing.chosen && routing.chosen <= routing.count,
            "a router of all experts, and no more chosen than there are");
    require(shared.empty() || shared.size() == 3, "a whole shared expert");
    Mixture made = {&router, {}, routing, has_gelu, alpha, limit, {}, nullptr};
    for (const auto& [gate_up, down] : mlps) made.mlps.push_back({gate_up, down});
    if (!shared.empty()) made.shared = {shared[0], shared[1]}, made.shared_gate = shared[2];
    return made;
}

// Of the remainder's maps, for each store.
std::vector<const float*> maps_at(const Addresses& remainders, size_t stores) {
    require(remainders.empty() || remainders.size() == stores, "a remainder for each store, or none");
    std::vector<const float*> maps;
    for (Address remainder : remainders) maps.push_back(at<float>(remainder));
    return maps;
}

// table, projection and norm of layer inputs, or nothing; the three factors.
LayerInputs layer_inputs(const Decoder& d, const std::vector<const Linear*>& weights, Address norm, const std::vector<float>& by) {
    if (weights.empty()) return {};
    require(weights.size() == 2 && by.size() == 3 && weights[0]->k == weights[1]->n, "a table and a projection, three factors");
    for (const Layer& l : d.layers)
        require(l.extra.gate && l.extra.gate->n * static_cast<long>(d.layers.size()) == weights[1]->n, "an input for each layer");
    return {weights[0], weights[1], at<void>(norm), by[0], by[1], by[2]};
}

DeltaState state_at(const Addresses& text, size_t first) { return {at<void>(text[first]), at<float>(text[first + 1])}; }

// For each delta layer of a text: histories and states before and after the rows, mixed, gates.
std::vector<DeltaRows> delta_rows(const std::vector<Addresses>& layers) {
    std::vector<DeltaRows> rows;
    for (const Addresses& t : layers) {
        require(t.size() == 6, "two states, mixed and gates");
        rows.push_back({state_at(t, 0), state_at(t, 2), at<void>(t[4]), at<float>(t[5])});
    }
    return rows;
}

void apply_delta(const Kernels& k, bool bf16, const std::vector<long>& shape, const Addresses& weights, float eps,
                 const std::vector<long>& counts, const std::vector<Addresses>& texts, Address z, long z_stride, Address out,
                 Address parent) {
    const DeltaLayer layer = delta_layer(shape, weights, eps);
    const long size = bf16 ? 2 : 4, width = layer.value_heads * layer.value_dim;
    const std::vector<DeltaRows> rows = delta_rows(texts);
    std::vector<DeltaText> found;
    long row = 0;
    for (size_t i = 0; i < rows.size(); row += counts[i], i++) {
        require_order(at<int32_t>(parent) + row, counts[i]);
        found.push_back({counts[i], rows[i].before.history, rows[i].before.matrix, rows[i].after.history,
                         rows[i].after.matrix, rows[i].mixed, rows[i].gates,
                         z ? at<void>(z + row * z_stride * size) : nullptr, z_stride, at<void>(out + row * width * size),
                         at<int32_t>(parent) + row});
    }
    k.delta(bf16, layer, found.data(), static_cast<long>(found.size()));
}

void run_forward(const Kernels& k, const Decoder& decoder, const std::vector<std::vector<Store*>>& stores,
                 const std::vector<long>& lengths, const std::vector<long>& counts, const std::vector<Addresses>& remainders,
                 const std::vector<Addresses>& taps, const std::vector<std::vector<Addresses>>& deltas, Address x,
                 Address cos, Address sin, Address parent, long reported, Address q, Address content, Address key,
                 Address value, Address attended, Address lse, Address given, long given_stride) {
    std::vector<TextKV> texts;
    long rows = 0;
    for (size_t i = 0; i < stores.size(); i++) {
        require_order(at<int32_t>(parent) + rows, counts[i]);
        require(decoder.fits(stores[i], deltas[i].size()), "a store or a state, and an MLP or experts, for each layer");
        std::vector<void*> tapped;
        for (Address tap : taps[i]) tapped.push_back(at<void>(tap));
        require(tapped.empty() || tapped.size() == decoder.layers.size() + 1, "a tap for each layer and one more");
        texts.push_back({stores[i], lengths[i], counts[i], maps_at(remainders[i], stores[i].size()), std::move(tapped),
                         delta_rows(deltas[i])});
        rows += counts[i];
    }
    require(0 < reported && reported <= rows, "one or more of the rows to report");
    forward(k, decoder, {rows, reported, at<float>(cos), at<float>(sin), at<int32_t>(parent), at<void>(x), at<void>(q),
                         at<void>(key), at<void>(value), at<void>(content), at<void>(attended), at<float>(lse),
                         at<void>(given), given_stride},
            texts);
}

Chain chain(const Decoder& decoder, const Linear& embedding, const Linear& head, Address norm, float embedding_factor,
            float logits_divisor, float logits_cap, const std::vector<Store*>& stores, long length,
            const Addresses& remainders, const std::vector<Addresses>& states, const Choice& choice, long count, long position,
            long width, double within, long banned_depth, const std::vector<double>& edges, const std::vector<double>& rates,
            double least, int32_t root, const std::vector<int32_t>& path, Address cos, Address sin,
            const PartOfVocabulary* part, const std::vector<const Linear*>& input_weights, Address input_norm,
            const std::vector<float>& input_factors) {
    for (int32_t token : path) require(0 <= token && token < embedding.n, "token ids of the table");
    require(!part || static_cast<long>(part->ids.size()) == head.n, "a row of the head for each token of the part");
    require(0 <= root && root < embedding.n && decoder.fits(stores, states.size()),
            "a token of the table, and a store or a state for each layer");
    require(rates.size() == edges.size() + 1, "a rate below each edge, and one above");
    std::vector<ChainStates> deltas;
    for (const Addresses& s : states) {
        require(s.size() == 6, "three states");
        deltas.push_back({state_at(s, 0), {state_at(s, 2), state_at(s, 4)}});
    }
    return {{&decoder, &embedding, &head, at<void>(norm), embedding_factor, logits_divisor, logits_cap, part,
             layer_inputs(decoder, input_weights, input_norm, input_factors)},
            {stores, length, maps_at(remainders, stores.size()), std::move(deltas)}, &choice,
            {count, position, width, within, banned_depth, {edges, rates, least}}, root, path, at<float>(cos), at<float>(sin)};
}

std::vector<RankedPair> pairs_of(std::vector<Ranked> places) {
    std::vector<RankedPair> pairs;
    for (Ranked& ranked : places) pairs.push_back(pair_of(std::move(ranked)));
    return pairs;
}

std::vector<RankedPair> run_draft(const Kernels& k, const Chain& chain) { return pairs_of(draft(k, chain)); }

std::vector<std::vector<RankedPair>> run_draft_apart(const Kernels& k, const std::vector<const Chain*>& chains) {
    std::vector<std::vector<RankedPair>> found;
    for (std::vector<Ranked>& places : draft_apart(k, chains)) found.push_back(pairs_of(std::move(places)));
    return found;
}

}  // namespace

void bind_decoder(nb::module_& m, nb::class_<Kernels>& kernels) {
    using namespace nb::literals;
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", [](Decoder* d, long heads, long kv_heads, long dim, float eps, bool post_norm,
                            bool rounds_once, float residual_factor, bool has_gelu, long num_ropes, bool float_norms) {
            new (d) Decoder{heads, kv_heads, dim, eps, post_norm, rounds_once, residual_factor, has_gelu, num_ropes,
                            float_norms, {}}; })
        .def("add", [](Decoder& d, Address attention_norm, const Linear& qkv, const Linear& out, Address mlp_norm,
                       long window, Address q_norm, Address k_norm, bool norms_heads, bool rotates,
                       std::pair<long, long> ropes, Address attention_post_norm, Address mlp_post_norm, bool is_gated,
                       Address sinks) {
            d.layers.push_back({at<void>(attention_norm), &qkv, &out, at<void>(mlp_norm), window, at<void>(q_norm),
                                at<void>(k_norm), norms_heads, rotates, ropes.first, ropes.second,
                                at<void>(attention_post_norm), at<void>(mlp_post_norm), is_gated, nullptr, {},
                                at<float>(sinks)}); })
        .def("add_delta", [](Decoder& d, Address attention_norm, const Linear& qkvz, const Linear& out, Address mlp_norm,
                             const Linear& gates, const std::vector<long>& shape, const Addresses& weights, float eps) {
            d.layers.push_back({at<void>(attention_norm), &qkvz, &out, at<void>(mlp_norm), 0, nullptr, nullptr, false, false,
                                0, 0, nullptr, nullptr, false, &gates, delta_layer(shape, weights, eps)}); })
        .def("set_heads", &set_heads)
        .def("set_extra", [](Decoder& d, const Linear& gate, const Linear& out, Address norm) {
            d.layers.back().extra = {&gate, &out, at<void>(norm)}; })
        .def("set_beside", [](Decoder& d, Address mlp_post, Address experts, Address router, Address experts_post) {
            d.layers.back().beside = {at<void>(mlp_post), at<void>(experts), at<void>(router), at<void>(experts_post)}; })
        .def("set_mlp", [](Decoder& d, const Linear& gate_up, const Linear& down) { d.layers.back().mlp = {&gate_up, &down}; })
        .def("set_mixture", [](Decoder& d, const Linear& router, const std::vector<std::pair<Linear*, Linear*>>& mlps,
                               long chosen, bool normalises, bool rounds, Address scales, bool has_gelu, float alpha,
                               float limit, const std::vector<Linear*>& shared) {
            d.layers.back().mixture = mixture(router, mlps, {router.n, chosen, normalises, rounds, at<float>(scales)},
                                              has_gelu, alpha, limit, shared); });
    auto free_gil = nb::call_guard<nb::gil_scoped_release>();
    kernels.def("delta", &apply_delta, free_gil);
    kernels.def("forward", &run_forward, free_gil);
    kernels.def("draft", &run_draft, free_gil);
    kernels.def("draft_apart", &run_draft_apart, free_gil);
    nb::class_<Chain>(m, "Chain");
    m.def("chain", &chain, "decoder"_a, "embedding"_a, "head"_a, "norm"_a, "embedding_factor"_a, "logits_divisor"_a,
          "logits_cap"_a, "stores"_a, "length"_a, "remainders"_a, "states"_a, "choice"_a, "count"_a, "position"_a, "width"_a,
          "within"_a, "banned_depth"_a, "edges"_a, "rates"_a, "least"_a, "root"_a, "path"_a, "cos"_a, "sin"_a,
          "part"_a.none(), "input_weights"_a, "input_norm"_a, "input_factors"_a);
}

}  // namespace longdraft
