#include "draft.h"

#include "pool.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace longdraft {
namespace {

// Memory for the way of rows through the model: of one row at a time, or of rows that are read.
struct RowBuffers {
    std::vector<char> x, normed, q, k, v, content, attended, mixed, given, looked_up, embedded, first, second, both;
    std::vector<float> lse, logits, gates;

    RowBuffers(const Decoder& d, long hidden, long vocabulary, long inputs, long size, long rows = 1)
        : x(bytes(rows * hidden * size)), normed(x.size()), q(layers(d, rows * d.heads * d.dim * size)),
          k(layers(d, rows * d.kv_heads * d.dim * size)), v(k.size()), content(q.size()), attended(q.size()),
          given(bytes(inputs * size)), looked_up(given.size()), embedded(x.size()), first(x.size()), second(x.size()),
          both(2 * x.size()), lse(layers(d, rows * d.heads)), logits(static_cast<size_t>(vocabulary)) {
        for (const Layer& layer : d.layers)
            if (layer.gates) {
                mixed.resize(std::max(mixed.size(), bytes(layer.qkv->n * size)));
                gates.resize(std::max(gates.size(), static_cast<size_t>(layer.gates->n)));
            }
    }

    // Row `i` of a chain in the delta layers. The inputs of the rule are not kept: a chain has no other path.
    std::vector<DeltaRows> deltas(const std::vector<ChainStates>& states, long i) {
        std::vector<DeltaRows> rows;
        for (const ChainStates& state : states)
            rows.push_back({i ? state.after[(i - 1) % 2] : state.before, state.after[i % 2], mixed.data(), gates.data()});
        return rows;
    }

    // Where to copy row `i` of a chain from the layers that are tapped. bytes: of a row
    static std::vector<void*> taps(std::vector<void*> first, long i, long bytes) {
        for (void*& tap : first)
            if (tap) tap = static_cast<char*>(tap) + i * bytes;
        return first;
    }

  private:
    static size_t bytes(long count) { return static_cast<size_t>(count); }
    static size_t layers(const Decoder& d, long each) { return d.layers.size() * static_cast<size_t>(each); }
};

// Fill row.given, from row.x.
void look_up_inputs(const Kernels& kernels, const Decoder& d, const LayerInputs& inputs, bool bf16, int64_t token,
                    RowBuffers& row) {
    if (!inputs.projection) return;
    const long all = inputs.width(), count = static_cast<long>(d.layers.size());
    void *given = row.given.data(), *looked_up = row.looked_up.data();
    kernels.linear(*inputs.projection, row.x.data(), 1, given, false);
    kernels.scale(bf16, given, all, inputs.of_projection);
    norm(kernels, d, bf16, given, inputs.norm, count, all / count, given);
    kernels.embed(*inputs.table, &token, 1, looked_up);
    kernels.scale(bf16, looked_up, all, inputs.of_table);
    kernels.add(bf16, given, looked_up, all, given);
    kernels.scale(bf16, given, all, inputs.of_sum);
}

// Make the layers' inputs row.x of `rows` rows, and what it returns: the input of the first layer's queries, keys and values;
// null: row.x after its norm. before: the rows before, or what stands for them, which may be row.x.
const void* feed_back(const Kernels& kernels, const Decoder& d, const Feedback& f, bool bf16, long hidden, long rows,
                      const void* embedded, const char* before, RowBuffers& row) {
    const size_t all = row.x.size(), one = all / static_cast<size_t>(rows);
    char *first = row.first.data(), *second = row.second.data(), *both = row.both.data();
    if (f.of_embedding) norm(kernels, d, bf16, embedded, f.of_embedding, rows, hidden, first);
    else std::memcpy(first, embedded, all);
    if (f.of_row) norm(kernels, d, bf16, before, f.of_row, rows, hidden, second);
    else std::memcpy(second, before, all);
    for (size_t i = 0; i < static_cast<size_t>(rows); i++) {
        std::memcpy(both + 2 * i * one, first + i * one, one);
        std::memcpy(both + (2 * i + 1) * one, second + i * one, one);
    }
    if (f.joined) {
        kernels.linear(*f.joined, both, rows, row.x.data(), false);
        if (f.of_row) return nullptr;
        std::memcpy(first, row.x.data(), all);  // the rows themselves, without a norm
        return first;
    }
    std::memmove(row.x.data(), f.keeps_normed ? second : before, all);
    return both;
}

void embed(const Kernels& kernels, const DraftModel& model, const int64_t* tokens, long rows, void* out) {
    const long hidden = model.embedding->k;
    kernels.embed(*model.embedding, tokens, rows, out);
    if (model.embedding_factor != 1.0f) kernels.scale(model.head->is_bf16, out, rows * hidden, model.embedding_factor);
}

// Read the text's last rows; chain.row becomes the output of the last one.
void read(const Kernels& kernels, const Chain& chain) {
    const auto& [tokens, before, cos, sin] = chain.unread;
    const auto& [model, cache] = std::tie(chain.model, chain.cache);
    const Decoder& d = *model.decoder;
    const bool bf16 = model.head->is_bf16;
    const long size = bf16 ? 2 : 4, hidden = model.embedding->k, rows = static_cast<long>(tokens.size());
    const long start = cache.length - rows;
    RowBuffers row(d, hidden, 0, 0, size, rows);
    std::vector<int32_t> parents(tokens.size());
    std::iota(parents.begin(), parents.end(), -1);
    embed(kernels, model, tokens.data(), rows, row.embedded.data());
    const void* source = feed_back(kernels, d, *model.feedback, bf16, hidden, rows, row.embedded.data(),
                                   static_cast<const char*>(before), row);
    forward(kernels, d, {rows, rows, cos, sin, parents.data(), row.x.data(), row.q.data(), row.k.data(), row.v.data(),
                         row.content.data(), row.attended.data(), row.lse.data(), nullptr, 0, source},
            {{cache.stores, start, rows, cache.remainders, {}, {}}}, model.head);
    std::memcpy(chain.row, row.x.data() + (rows - 1) * hidden * size, static_cast<size_t>(hidden * size));
}

// Fill row.normed and row.logits, from row.x.
void score(const Kernels& kernels, const DraftModel& model, RowBuffers& row) {
    const Decoder& d = *model.decoder;
    if (model.norm) norm(kernels, d, model.head->is_bf16, row.x.data(), model.norm, 1, model.embedding->k, row.normed.data());
    else std::memcpy(row.normed.data(), row.x.data(), row.x.size());
    expect_weight(d.layers[0].qkv);
    kernels.linear(*model.head, row.normed.data(), 1, row.logits.data(), true);
    if (model.logits_divisor != 1.0f)
        for (float& logit : row.logits) logit /= model.logits_divisor;
    if (model.logits_cap != 0.0f) kernels.soft_cap(row.logits.data(), model.head->n, model.logits_cap);
}

}  // namespace

double ChainEnd::rate(double lead) const {
    return rates[static_cast<size_t>(std::upper_bound(edges.begin(), edges.end(), lead) - edges.begin())];
}

// The forward of a chain's rows writes their keys and values to the stores, unless they are not finite: the drafts end there.
std::vector<Ranked> draft(const Kernels& kernels, const Chain& chain) {
    const auto& [model, cache, choice, rules, root, begun, cos, sin, before, unread] = chain;
    if (!unread.tokens.empty()) read(kernels, chain);
    std::vector<int32_t> path = begun;
    const Decoder& d = *model.decoder;
    const bool bf16 = model.head->is_bf16;
    const long size = bf16 ? 2 : 4, hidden = model.embedding->k;
    RowBuffers row(d, hidden, model.head->n, model.inputs.width(), size);
    const int32_t parent = -1;
    std::vector<Ranked> places;
    double reached = 1;  // probability that all tokens so far become text
    for (long i = 0; i < rules.count; i++) {
        if (before && i == 0) {
            std::memcpy(row.x.data(), before, row.x.size());
        } else {
            const long number = i - (before != nullptr);  // of the row that is computed
            const int64_t token = path.empty() ? root : path.back();
            const long length = cache.length + number, half = d.num_ropes * d.dim / 2;
            std::vector<char>& embedded = model.feedback ? row.embedded : row.x;
            embed(kernels, model, &token, 1, embedded.data());
            look_up_inputs(kernels, d, model.inputs, bf16, token, row);
            const void* source = nullptr;
            if (model.feedback)
                source = feed_back(kernels, d, *model.feedback, bf16, hidden, 1, embedded.data(),
                                   (model.feedback->feeds_normed ? row.normed : row.x).data(), row);
            forward(kernels, d, {1, 1, cos + number * half, sin + number * half, &parent, row.x.data(), row.q.data(),
                                 row.k.data(), row.v.data(), row.content.data(), row.attended.data(), row.lse.data(),
                                 row.given.data(), model.inputs.width(), source},
                    {{cache.stores, length, 1, cache.remainders, RowBuffers::taps(cache.taps, number, hidden * size),
                      row.deltas(cache.deltas, number)}}, model.head);
        }
        score(kernels, model, row);
        const long known = static_cast<long>(path.size());
        places.push_back(choice->rank(row.logits.data(), path.data(), known, rules.position + i, known < rules.banned_depth,
                                     rules.width, rules.within, model.part));
        const auto& [tokens, lead] = places.back();
        if (tokens.empty()) break;
        path.push_back(static_cast<int32_t>(tokens[0]));
        reached *= rules.end.rate(lead);
        if (reached < rules.end.least) break;
    }
    return places;
}

std::vector<std::vector<Ranked>> draft_apart(const Kernels& kernels, const std::vector<const Chain*>& chains) {
    std::vector<std::vector<Ranked>> found(chains.size());
    const long count = static_cast<long>(chains.size());
    // Two jobs at least: within them, all other work stays on their threads.
    parallel(std::max(2L, count), [&](long i) {
        if (i < count) found[static_cast<size_t>(i)] = draft(kernels, *chains[static_cast<size_t>(i)]);
    });
    return found;
}

}  // namespace longdraft
