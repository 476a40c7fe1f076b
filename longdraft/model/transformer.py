"""The decoder of all model families. Prefill, plain decoding, drafting and verification are one call:

    result = model.forward(rows, cache, num_logits)     # run rows; their keys and values are provisional
    cache.commit(path)                                  # keep the rows of the accepted path, drop the others

Only the rows differ:

    prefill            chain_rows(prompt[a:b], a)           num_logits=0
    plain decoding     chain_rows([token], position)        num_logits=1
    drafting           the same, over a partial cache
    verification       tree_rows(draft, position)           logits of every node

`forward_batch` runs the rows of several texts in one forward, which reads the weights once. Each text has its own
cache. A row's result does not depend on the other rows, so batching changes the time and never the text.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longdraft.cache.full import FullCache, KVCache
from longdraft.cache.states import StateCache
from longdraft.cache.taps import TapLog
from longdraft.kernels import AttentionOutput, Geometry, Kernels, LayersKV, LayerWeights, Linear
from longdraft.kernels.chain_plan import ChainPlan, DraftStores, DraftWeights, ModelLayers
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.interface import TokenDecoder, TokenRows, parents_tensor
from longdraft.kernels.layer_inputs import LayerInputs
from longdraft.model.config import ModelConfig
from longdraft.model.rope import RopeTable, max_unscaled_length, rotations_of
from longdraft.model.shared_choice import SharedTextChoices, TextChoice, logits_source_of
from longdraft.request.tree import Tree

if TYPE_CHECKING:
    from longdraft.kernels.cuda.choices import LogitsSource

log = logging.getLogger(__name__)


class Rows(NamedTuple):
    """One text's rows of a forward.

    tokens     token ids
    positions  absolute positions in the text
    parents    index of the row that each row follows; -1: the last row of the cache
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]


def tree_rows(tree: Tree, root_position: int) -> Rows:
    """Rows of a draft tree, whose root is at `root_position`."""
    return Rows(tree.tokens, [root_position + depth for depth in tree.depths], tree.parents)


def chain_rows(tokens: Sequence[int], start: int) -> Rows:
    """Rows of consecutive tokens from position `start` on."""
    return Rows(tokens, range(start, start + len(tokens)), range(-1, len(tokens) - 1))


class ModelWeights(NamedTuple):
    embedding: Linear
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden], the final norm
    head: Linear
    quantize: str = "none"  # none | int8 | int4 | file, of matrices; norms and biases are never quantised
    layer_inputs: LayerInputs | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, those of each expert and the tables among them."""
        experts = [weight for layer in self.layers if layer.experts for mlp in layer.experts.mlps for weight in mlp]
        linears = [weight for layer in self.layers for weight in layer.linears] + experts + [self.embedding, self.head]
        if self.layer_inputs:
            linears += [self.layer_inputs.table, self.layer_inputs.projection]
        return sum(weight.nbytes for weight in {id(weight): weight for weight in linears}.values())


class ForwardRequest(NamedTuple):
    """One text's part of a forward: rows over its cache, and logits of the last `num_logits` of them.

    is_prompt  the rows are a chunk of a prompt; see `LayersKV`
    choice     how the tokens that follow the rows, which have logits all, are chosen; None: not with other texts'
    """

    model: Transformer
    rows: Rows
    cache: KVCache
    num_logits: int = 0
    is_prompt: bool = False
    choice: TextChoice | None = None


class Forward:
    """The result of a forward for one text. In a batch, the tensors are slices that are made on first use.

    logits            [num_logits, V] float32, of the last rows
    hidden            [R, hidden], the last layer's output before the final norm
    attention_output  what each layer's attention computed for the rows
    """

    def __init__(self, hidden: Tensor, attention_output: AttentionOutput, rows: slice | None,
                 logits: Tensor | Callable[[], Tensor], source: LogitsSource | None = None,
                 walk: tuple[list[int], list[int]] | None = None) -> None:
        """rows: this text's rows in `hidden` and `attention_output`; None: all.

        source  on a device, for a forward whose rows all have logits: computes them together with the choice of tokens
        walk    the result of `ForwardRequest.choice`, where it was made with other texts'
        """
        self._logits, self.source, self.walk = logits, source, walk
        self._hidden, self._attention_output, self._rows = hidden, attention_output, rows

    @cached_property
    def logits(self) -> Tensor:
        return self._logits() if callable(self._logits) else self._logits

    @cached_property
    def hidden(self) -> Tensor:
        return self._hidden if self._rows is None else self._hidden[self._rows]

    @cached_property
    def attention_output(self) -> AttentionOutput:
        return self._attention_output if self._rows is None else self._attention_output.cut(self._rows)


class Transformer:
    """A decoder: weights and kernels. It holds no state of any text."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels,
                 whole: ModelConfig | None = None) -> None:
        """config: this process's share of the model; whole: the model itself, where ranks share it."""
        self.config = config
        self.whole = whole or config
        self.weights = weights
        self.kernels = kernels
        self.geometry = Geometry(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps,
                                 config.post_norm, config.rounds_once, config.query_factor, config.residual_factor,
                                 config.has_gelu, config.num_ropes)
        self.embedding_factor = config.embedding_factor
        if config.rounds_embedding_factor:
            self.embedding_factor = float(torch.tensor(config.embedding_factor, dtype=kernels.dtype))
        self._decoder = kernels.new_decoder(weights.layers, self.geometry)
        has_inputs = weights.layer_inputs is not None  # which `TokenRows` have not
        self._token_decoder = self._decoder if isinstance(self._decoder, TokenDecoder) and not has_inputs else None
        self._rope = RopeTable(config, 1, kernels.device)
        self._largest = len(config.kv_shapes), *(max(sizes) for sizes in zip(*config.kv_shapes, strict=True))
        self._has_warned, self.taps = False, tuple[int, ...]()
        self.part: PartOfVocabulary | None = None

    def with_taps(self, layers: Sequence[int]) -> Transformer:
        """This model, whose caches also hold the rows that enter these layers (`Taps`). Weights are shared."""
        other = copy.copy(self)
        other.taps = tuple(layers)
        return other

    def for_length(self, length: int) -> Transformer:
        """The model with the rotations for a text of `length` tokens, prompt included. Weights are shared.

        The rope types `dynamic` and `longrope` depend on the length. It is fixed before the text begins, because the
        keys in the cache keep their rotations. Other types return this model.
        """
        config = self.config
        if length > config.trained_positions and not self._has_warned:
            self._has_warned = True
            log.warning("the text may reach %d tokens, the model was trained on %d (max_position_embeddings); rope "
                        "type %r extends it to %d, but quality may suffer", length, config.trained_positions,
                        config.rope.kind, config.max_positions)
        unscaled = max_unscaled_length(config.rope, config.trained_positions)
        if unscaled is None or length <= unscaled:
            return self
        other = copy.copy(self)
        other._rope = RopeTable(config, length, self.kernels.device)
        return other

    def with_part_of_vocabulary(self, part: PartOfVocabulary, head: Linear) -> Transformer:
        """The model with logits of some tokens; those of all others are -inf. The other weights are shared.

        head  the rows of this model's head for them
        """
        other = copy.copy(self)
        for made in ("_logits_source", "_shared_choices", "_chain_layers", "weights_bytes"):  # of another head
            other.__dict__.pop(made, None)
        other.weights, other.part = self.weights._replace(head=head), part
        return other

    @property
    def rotation_key(self) -> object:
        """Equal for models of one identity whose rows of the KV cache are the same functions of the tokens."""
        return self._rope.key

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the weights that a forward of one row reads. Of experts, the share that a row chooses."""
        chosen = sum(sum(mlp.gate_up.nbytes + mlp.down.nbytes for mlp in each.mlps) * each.chosen // len(each.mlps)
                     for each in (layer.experts for layer in self.weights.layers) if each is not None)
        return sum(linear.nbytes for linear in self.linears) + chosen

    @property
    def weights_in_tokens(self) -> float:
        """Number of context tokens whose cache is as large as the weights that a forward reads."""
        return self.weights_bytes / self.cache_bytes_per_token

    @property
    def linears(self) -> list[Linear]:
        """Every matrix that each row is multiplied with, in order. Those of experts are not among them."""
        inputs = [self.weights.layer_inputs.projection] if self.weights.layer_inputs else []
        return [*(linear for layer in self.weights.layers for linear in layer.linears), *inputs, self.weights.head]

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(heads * self.kernels.cache_bytes(dim) for heads, dim in self.config.kv_shapes)

    def new_cache(self) -> FullCache:
        """An empty KV cache for one text."""
        config, layers = self.config, self.weights.layers
        windows = [attention.window for attention in config.kv_attention]
        taps = TapLog(self.kernels, self.taps, config.hidden_size) if self.taps else None
        deltas = [layer.delta for layer in layers if layer.delta is not None]
        states, sinks = StateCache(self.kernels, deltas) if deltas else None, [layer.sinks for layer in layers]
        return FullCache(self.kernels, config.kv_shapes, windows, taps, states, config.score_cap,
                         [each for each in sinks if each is not None])

    @property
    def identity(self) -> object:
        """The same object for models that `forward_batch` may combine: copies of one model for different lengths."""
        return self.part or self._decoder

    def forward(self, rows: Rows, cache: KVCache, num_logits: int = 0, is_prompt: bool = False) -> Forward:
        """Run one text's rows. Their keys and values are provisional until `cache.commit`."""
        return self.forward_batch([ForwardRequest(self, rows, cache, num_logits, is_prompt)])[0]

    def forward_batch(self, requests: Sequence[ForwardRequest]) -> list[Forward]:
        """Run the rows of several texts in one forward. The requests are for this model (see `identity`)."""
        kernels = self.kernels
        counts = [len(request.rows.tokens) for request in requests]
        ends = list(accumulate(counts))
        num_layers, heads, dim = self._largest  # of the layers' KV rows
        shape = (num_layers, ends[-1], heads, dim)
        k = torch.empty(shape, dtype=kernels.dtype, device=kernels.device)  # [L, R, Hkv, D]
        v = torch.empty(shape, dtype=kernels.dtype, device=kernels.device)
        layers_kv = [request.cache.append(*parts)._replace(is_prompt=request.is_prompt) for request, *parts in
                     zip(requests, _split(k, counts, 1), _split(v, counts, 1), strict=True)]
        hidden, attention_output = self._run_layers(requests, layers_kv)
        if kernels.is_device and len(requests) == 1 and requests[0].num_logits == counts[0]:
            return [Forward(hidden, attention_output, None, lambda: self.logits(hidden), self._logits_source)]
        walks = self._shared_choices.of([request.choice for request in requests],
                                        [request.cache for request in requests], counts, hidden, k, v)
        logits = self._last_logits(hidden, [(end, 0 if walk else request.num_logits)
                                            for end, request, walk in zip(ends, requests, walks, strict=True)])
        return [Forward(hidden, attention_output, None if len(requests) == 1 else slice(end - count, end),
                        partial(self._logits_of, hidden, slice(end - count, end)) if walk else part, walk=walk)
                for count, end, part, walk in zip(counts, ends, logits, walks, strict=True)]

    def _run_layers(self, requests: Sequence[ForwardRequest],
                    layers_kv: Sequence[LayersKV]) -> tuple[Tensor, AttentionOutput]:
        tokens = [token for request in requests for token in request.rows.tokens]
        parents = parents_tensor(tuple([parent for request in requests for parent in request.rows.parents]))
        if self._token_decoder and not any(request.is_prompt for request in requests):
            rows = TokenRows(self.weights.embedding, self.embedding_factor, tokens, *_rotations(requests, True))
            return self._token_decoder.forward_tokens(rows, layers_kv, parents)
        x = self.embed(tokens)
        if own := self.weights.layer_inputs:
            x = torch.cat([x, own.of(self.kernels, x, tokens, self.config.rms_norm_eps)], 1)
        return self._decoder.forward(x, *_rotations(requests), layers_kv, parents)

    def chain_plan(self, stores: DraftStores, path: Sequence[int], position: int, count: int,
                   shares_forwards: bool = False) -> ChainPlan:
        """The plan of a chain of `count` tokens after `path`, whose last token is rotated at `position`. The rest is as
        in `ChainPlan`."""
        rotations = self.rotations(range(position, position + count), on_host=True)
        return ChainPlan(self._chain_layers, path, count, stores, rotations, shares_forwards)

    @cached_property
    def _chain_layers(self) -> ModelLayers:
        weights, config = self.weights, self.config
        return ModelLayers(self._decoder, DraftWeights(
            weights.embedding, weights.norm, weights.head, config.logits_divisor, self.part, self.embedding_factor,
            config.logits_cap, weights.layer_inputs))

    def _last_logits(self, hidden: Tensor, wanted: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """Logits of each text's last rows. wanted: (end of the text's rows, number of logits)."""
        counts = [count for _, count in wanted]
        if not any(counts):
            return [hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)] * len(wanted)
        if sum(counts) != hidden.shape[0]:
            hidden = torch.cat([hidden[end - count : end] for end, count in wanted])
        return _split(self.logits(hidden), counts, 0)

    def rotations(self, positions: Sequence[int], on_host: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin [R, S D / 2] float32 of positions, for S rotations (`ModelConfig.num_ropes`)."""
        return (self._rope.on_host if on_host else self._rope).at(positions)

    @cached_property
    def _logits_source(self) -> LogitsSource | None:
        weights = self.weights
        return None if self.part else logits_source_of(self.kernels, self.config, weights.norm, weights.head)

    @cached_property
    def _shared_choices(self) -> SharedTextChoices:
        return SharedTextChoices(self._logits_source)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [R, hidden], the first layer's input."""
        x = self.kernels.embed(self.weights.embedding, tokens)
        return x if self.embedding_factor == 1 else x * self.embedding_factor

    def _logits_of(self, hidden: Tensor, rows: slice) -> Tensor:
        return self.logits(hidden[rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of hidden states [R, hidden] before the final norm."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] after the final norm."""
        config = self.config
        return self.kernels.rms_norm(hidden, self.weights.norm, config.rms_norm_eps, rounds_once=config.rounds_once)

    def head(self, normed: Tensor) -> Tensor:
        """Logits [R, V] float32 of hidden states [R, hidden] after the final norm."""
        logits = self.kernels.linear(normed, self.weights.head, keep_float=True)
        if self.config.logits_divisor != 1:
            logits.div_(self.config.logits_divisor)
        if self.config.logits_cap:
            logits = self.kernels.soft_cap(logits, self.config.logits_cap)
        return logits if self.part is None else self.part.whole(logits)


def _split(x: Tensor, counts: Sequence[int], axis: int) -> Sequence[Tensor]:
    """Views of `counts` rows each along an axis."""
    return (x,) if len(counts) == 1 else torch.split(x, list(counts), axis)


def _rotations(requests: Sequence[ForwardRequest], on_host: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin [R, D / 2] of all rows, from each text's own table."""
    tables = [request.model._rope.on_host if on_host else request.model._rope for request in requests]
    return rotations_of(tables, [request.rows.positions for request in requests])
