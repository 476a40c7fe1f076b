// A chain of tokens drafted in one call: embedding, layers, head, ranking, next token, again. The step-by-step chain
// in longdraft/drafters gives the same tokens, bit for bit; here nothing goes through Python between two tokens.
#pragma once

#include "choice.h"
#include "layer.h"
#include "layout.h"

#include <optional>
#include <vector>

namespace longdraft {

// Inputs of the layers besides x, of a token with the embedding x (longdraft/kernels/layer_inputs.py).
struct LayerInputs {
    const Linear *table, *projection;  // [V, layers * width], [layers * width, hidden]; null: there are none
    const void* norm;                  // [width]
    float of_projection, of_table, of_sum;  // factors

    long width() const { return projection ? projection->n : 0; }  // of all layers
};

// How the input of trained layers is made from the row before and a token's embedding (longdraft/parts/eagle.py).
struct Feedback {
    const Linear* joined;                // of [embedding | row]: the layers' input; null: there is none
    const void *of_embedding, *of_row;   // norms [hidden]; null: none
    bool reads_both;                     // the first layer's queries, keys and values are of [embedding | row]
    bool keeps_normed;                   // the residual is the row after its norm
    bool feeds_normed;                   // the row before is taken after the last norm
};

// What a row passes through before and after the layers.
struct DraftModel {
    const Decoder* decoder;
    const Linear* embedding;
    const Linear* head;
    const void* norm;  // [hidden], before the head; null: none
    float embedding_factor, logits_divisor;
    float logits_cap;  // logits are cap * tanh(logit / cap); 0: as they are
    const PartOfVocabulary* part;  // the tokens of the head's rows; null: the whole vocabulary
    LayerInputs inputs;
    std::optional<Feedback> feedback;  // none: the layers' input is the embedding
};

// The state of a delta layer that the chain continues. Its rows write the states after them to the other two in turn:
// the first row to after[0]. after[1] may be `before`.
struct ChainStates {
    DeltaState before, after[2];
};

// What the chain continues: `length` rows in the stores of each layer, then the rows of drafted tokens, which are
// written after them.
struct DraftCache {
    std::vector<Store*> stores;
    long length;
    std::vector<const float*> remainders;  // as for TextKV
    std::vector<ChainStates> deltas;  // one for each delta layer
    std::vector<void*> taps;  // as for TextKV: where to copy the first row. The rows after it follow, `hidden` values each
};

// When a chain ends before its last place: as soon as the probability that all its tokens become text is below `least`.
// A token whose lead (Ranked) is edges[i - 1] or more and below edges[i] is right with probability rates[i].
struct ChainEnd {
    std::vector<double> edges, rates;
    double least;

    double rate(double lead) const;
};

struct DraftRules {
    long count;           // tokens to draft
    long position;        // of the first drafted token in the text
    long width;           // guesses at each place
    double within;        // how far the score of a guess may be below the first one's
    long banned_depth;    // places before this one may not be banned tokens
    ChainEnd end;
};

// The last rows of a text, which trained layers read before they draft (longdraft/kernels/chain_plan.py). They are written to
// the last ones of the cache's rows.
struct UnreadRows {
    std::vector<int64_t> tokens;  // [T]; none: all rows are read
    const void* before;           // [T, hidden], in place of the row before each
    const float *cos, *sin;       // [T, num_ropes, dim / 2]
};

// A chain that one text needs. It ends early by the rules, and where logits are not finite.
struct Chain {
    DraftModel model;
    DraftCache cache;
    const Choice* choice;
    DraftRules rules;
    int32_t root;               // the text's last token
    std::vector<int32_t> path;  // drafted tokens after it, which the chain continues
    const float *cos, *sin;     // [count, num_ropes, dim / 2], of the rows; with feedback count - 1
    void* row;                  // [hidden], the layers' output for the last token of `path`; null without feedback
    UnreadRows unread;          // whose last output is written to `row`, with feedback
};

// Guesses for each place; the chain follows the best. All threads work for it.
std::vector<Ranked> draft(const Kernels& kernels, const Chain& chain);

// The same for the chains of several texts at the same time, each on one thread. Threads that share the small products of
// one chain wait for each other more than they compute.
std::vector<std::vector<Ranked>> draft_apart(const Kernels& kernels, const std::vector<const Chain*>& chains);

}  // namespace longdraft
