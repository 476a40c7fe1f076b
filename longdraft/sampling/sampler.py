"""The sampler of one request. `choose` defines the target's tokens; `ranked` gives drafters their best guesses.

    token at position p  =  argmax over the tokens v that the filters leave of  logit_v / T + noise(seed, p, v)

The noise is Gumbel noise keyed by (seed, position, token id), so the argmax is a sample of the softmax (Gumbel-max).
T = 0 is plain argmax. The token is a deterministic function of the target's logits. Verification therefore chooses at
the root, and after each child that it has chosen (longdraft/speculation/verify.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft.kernels import Kernels, noise
from longdraft.kernels.chain_plan import PairScores, PlaceRows, Ranked, Ranker
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.launched import LaunchedWork, finished
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import process
from longdraft.sampling.device import MAX_GUESSES, DeviceSampler
from longdraft.sampling.fast import FastSampler
from longdraft.sampling.grammar import Grammar, GrammarRules, Mask
from longdraft.sampling.path_penalties import HOPELESS, PathPenalties, new_path_penalties
from longdraft.sampling.process import Support
from longdraft.sampling.window import PenaltyWindow

NO_TOKEN = -1  # the result of `choose` for a row whose logits are not finite
_MAX_DIRECT = 512  # up to this many tokens, the noise of each is computed
_GUESS_POOL = 128  # highest logits from which `ranked` takes guesses when the filters leave too few


class MarkedTokens(NamedTuple):
    """Tokens that some settings treat by their text.

    breakers   tokens that end a repeated passage, for DRY
    protected  tokens that XTC never excludes: ends of the text, and tokens with a line break
    """

    breakers: frozenset[int] = frozenset()
    protected: frozenset[int] = frozenset()


NO_MARKS = MarkedTokens()


class Shortlist(NamedTuple):
    """A drafter's best guesses for one place, as `Sampler.ranked` orders them, with their scores [K] in nats, falling:
    logit / T + noise after penalties, at T = 0 the logit. Guesses that the filters remove have at most the score of
    those before them."""

    tokens: list[int]
    scores: NDArray[np.float64]


class PairedShortlist(NamedTuple):
    """The best guesses of a place after the best one of the place before.

    table  [K of the place before, K]: what the logits gain by each token before; of the first place: [1, K]
    trust  how sure the drafter is of the place, 0 to 1
    """

    shortlist: Shortlist
    table: NDArray[np.float64]
    trust: float


class Sampler:
    """Chooses tokens of one request.

    params   the request's settings; `params.seed` must be set when temperature > 0
    banned   ids that cannot be chosen before params.min_new_tokens (end of text, stop ids)
    is_fast  use the compiled sampler for the settings that it supports (the same tokens, faster)
    kernels  use the sampler of their device for the settings that it supports (the same tokens, logits stay there)
    marked   tokens that DRY and XTC treat by their text
    rules    the grammar that the text must match; None: any text
    """

    def __init__(self, params: SamplingParams, banned: Iterable[int] = (), is_fast: bool = True,
                 kernels: Kernels | None = None, marked: MarkedTokens = NO_MARKS,
                 rules: GrammarRules | None = None) -> None:
        assert params.seed is not None or params.temperature == 0
        self._settings = params, tuple(banned), is_fast, kernels, marked
        self._grammar = Grammar(rules) if rules else None
        self.params = params
        self._seed = params.seed or 0
        self._banned = np.array(sorted(set(self._settings[1])), dtype=np.int64)
        self._window: PenaltyWindow | None = None
        if params.repetition_penalty != 1:
            self._window = PenaltyWindow(params.penalty_window, params.repetition_penalty)
        tokens, values = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self._bias = torch.tensor(tokens, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)
        self._marked = marked
        self._path_penalties: PathPenalties | None = None  # created when the vocabulary is known
        self._bans: tuple[int, list[int]] = (-1, [])  # tokens that cannot be chosen at one position
        self.imposed: frozenset[int] = frozenset()  # nodes of the latest tree after which a rule imposed the token
        self._is_fast = is_fast and FastSampler.supports(params)
        self._fast: FastSampler | None = None
        self.on_device: DeviceSampler | None = None
        if kernels is not None and DeviceSampler.supports(params, kernels):
            self.on_device = DeviceSampler(params, self._banned.tolist(), kernels)

    def truncate(self, context: Context) -> None:
        """The text was cut to this one. What has a window is made anew; what grows with the text is kept."""
        assert self._grammar is None and self.on_device is None, "neither goes with banned phrases"
        self._window = self._window and PenaltyWindow(self.params.penalty_window, self.params.repetition_penalty)
        self._fast = None
        if self._path_penalties is not None and len(self._path_penalties) > len(context):
            self._path_penalties.truncate(len(context))

    def of_free_text(self) -> Sampler:
        """A sampler of another text with the same settings, without grammar and rules. A sampler remembers its text."""
        return Sampler(*self._settings)

    def for_tree(self, tree: Tree, context: Context) -> Sampler:
        """The sampler that chooses the tokens of a step with this tree, the same ones as this sampler."""
        return self

    def quiet_for(self, context: Context) -> int:
        """Tokens that a step may append at most, at least 1."""
        return sys.maxsize

    def ban(self, position: int, tokens: Sequence[int]) -> None:
        """Tokens cannot be chosen at this position of the text. It replaces an earlier ban."""
        self._bans = position, list(tokens)

    def free_tokens(self, context: Context, count: int) -> list[bool]:
        """For each of the last `count` tokens, those of the latest step, whether no banned phrase contains it."""
        return [False] * count

    def choose(self, logits: torch.Tensor, tree: Tree, context: Context, every: bool = True) -> list[int]:
        """The target's token after each node, from its logits [nodes, V] float32.

        every  False: only the path along the choices is needed (`Tree.along`); other nodes may have NO_TOKEN

        NO_TOKEN where a row's logits are not finite. That is an error only if the text reaches the node.
        """
        if self.on_device:
            return self.on_device.choose(logits, tree, context)
        logits = self._biased(logits, [len(context) + depth for depth in tree.depths], self._masks(tree, context))
        if self._is_fast:
            return self._compiled(context, logits.shape[1]).choose(logits, tree, context, every)
        if every:
            return self._choices(logits, tree, context, range(len(tree)))
        chosen, node = [NO_TOKEN] * len(tree), 0
        while True:
            chosen[node], = self._choices(logits[node, None], tree, context, [node])
            child = tree.children.get((node, chosen[node]))
            if child is None:
                return chosen
            node = child

    def _choices(self, logits: torch.Tensor, tree: Tree, context: Context, nodes: Sequence[int]) -> list[int]:
        """The token after each of some nodes, from their logits [N, V]."""
        paths = [[tree.tokens[n] for n in tree.path(node)[1:]] for node in nodes]
        chosen = []
        for row, path in zip(self._penalised(logits, context, paths), paths, strict=True):
            position = len(context) + len(path)
            if not math.isfinite(row.max()):
                chosen.append(NO_TOKEN)
            elif self.params.temperature == 0:
                chosen.append(process.best_token(row))
            else:
                chosen.append(gumbel_argmax(self._filtered(row, position), self._seed, position))
        return chosen

    def ranked(self, logits: torch.Tensor, context: Context, path: Sequence[int], num: int, ahead: int = 0,
               within: float = math.inf) -> Ranked:
        """A drafter's `num` best guesses, best first, from its logits [V].

        path    drafted tokens after the text, without the root; the guesses follow them
        ahead   unknown tokens between the path and the guesses (for heads that predict further tokens)
        within  largest gap between a guess's score and the best one's; score: logit / T + noise, at T = 0 the logit

        Guesses are ranked with the noise that the target will use, so a draft that agrees with the target's logits
        agrees with its samples, at any temperature. Tokens that the filters remove come last, because a drafter's
        logits are an estimate; a device leaves them out. Logits that are not finite give no guesses.
        """
        return finished(self.rank_later(logits, context, path, num, ahead, within))

    def rank_later(self, logits: torch.Tensor, context: Context, path: Sequence[int], num: int, ahead: int = 0,
                   within: float = math.inf) -> LaunchedWork[Ranked]:
        """As `ranked`. A device has been given the work when this yields, and is waited for afterwards."""
        masks = None
        if self._grammar and not ahead:
            masks = [self._mask(context, path)]
            if masks[0] is None:
                return Ranked([], math.inf)
        if self.on_device and logits.device == self.on_device.device and num <= MAX_GUESSES:
            return (yield from self.on_device.ranked(logits, context, path, num, ahead, within))
        logits = self._biased(logits[None], [len(context) + len(path) + ahead], masks)[0]
        if self._is_fast:
            return self._compiled(context, len(logits)).ranked(logits, context, path, num, ahead, within)
        position = len(context) + len(path) + ahead
        row = self._penalised(logits[None], context, [path], ahead)[0]
        num = min(num, len(row))
        if not np.isfinite(row.max()):
            return Ranked([], math.inf)
        if self.params.temperature == 0:
            few = min(max(num, 2), len(row))
            best = np.argpartition(-row, few - 1)[:few]
            best = best[np.lexsort((best, -row[best]))]
            ranked = [(float(row[token]), int(token)) for token in best]
        else:
            inside = self._filtered(row, position)
            ranked = _by_noise(inside, self._seed, position)
        lead = ranked[0][0] - ranked[1][0] if len(ranked) > 1 else math.inf
        ranked = ranked[:num]
        if len(ranked) < num:
            pool = min(max(_GUESS_POOL, num), len(row))
            best = np.argpartition(-row, pool - 1)[:pool]
            others = np.setdiff1d(best, inside.ids)
            scores = row[others].astype(np.float64) / self.params.temperature
            ranked += _by_noise(Support(others, scores), self._seed, position)[: num - len(ranked)]
        return Ranked([token for score, token in ranked if score >= ranked[0][0] - within], lead)

    def shortlists(self, logits: torch.Tensor, context: Context, num: int,
                   part: PartOfVocabulary | None = None, ahead: int = 0) -> LaunchedWork[list[Shortlist]]:
        """A drafter's `num` best guesses for each of the places after the text, from their logits [places, V].

        part   the tokens that the drafter has: logits [places, N] are of these alone; None: the whole vocabulary
        ahead  unknown tokens between the text and the first place

        As `ranked` with no path and as many unknown tokens in between as there are places before. A device has been
        given the work when this yields; where the host ranks its logits, they are copied once.
        """
        first = len(context) + ahead
        positions, has_mask = range(first, first + len(logits)), self._grammar and len(logits) and not ahead
        if device := self._device_for(logits, num, first):
            whole = logits if part is None else part.whole(logits)
            return [Shortlist(*each) for each in (yield from device.shortlists(whole, context, num, ahead))]
        rows = logits.detach().float().cpu()
        masks = [self._mask(context, ())] + [None] * (len(rows) - 1) if has_mask else None
        if part is not None and (not self._is_fast or masks or len(self._bias[0]) or self._bans[0] in positions):
            rows, part = part.whole(rows), None
        if self._is_fast and len(rows):
            compiled = self._compiled(context, part.size if part else rows.shape[1])
            ranked = compiled.shortlists(self._biased(rows, positions, masks), context, num, part, ahead)
            return [Shortlist(tokens, np.array(scores)) for tokens, scores in ranked]
        return self._shortlists(rows, context, num, ahead)

    def _device_for(self, logits: torch.Tensor, num: int, first: int) -> DeviceSampler | None:
        """What makes shortlists of `num` guesses on the device, from logits of places from `first` on; None: the host
        does."""
        device = self.on_device
        is_possible = (device and len(logits) and logits.device == device.device and num <= MAX_GUESSES
                       and self._bans[0] not in range(first, first + len(logits)))
        return device if is_possible else None

    def paired_shortlists(self, places: PlaceRows, pairs: PairScores, context: Context, before: int, num: int,
                          ahead: int = 0) -> LaunchedWork[list[PairedShortlist]]:
        """As `shortlists`, of places whose logits depend on the token before: of the first one on `before`, of others
        on the best guess of the place before. It ends after a place without guesses. On a device, it is one graph."""
        if device := self._device_for(places.logits, num, len(context) + ahead):
            return [PairedShortlist(Shortlist(*each), table, trust) for each, table, trust in (
                yield from device.paired_shortlists(places, pairs, context, before, num, ahead))]
        shortlists, tokens = list[PairedShortlist](), [before]
        for place in range(len(places.logits)):
            rows = places.of(place)
            one, all_before = (torch.tensor(each, device=rows.logits.device) for each in (tokens[:1], [tokens]))
            (shortlist,) = yield from self.shortlists(pairs.after(rows, one), context, num, pairs.part, ahead + place)
            trust = float(pairs.trust(rows, one))
            if not shortlist.tokens:
                shortlists.append(PairedShortlist(shortlist, np.zeros((len(tokens), 0)), trust))
                break
            table = pairs.table(rows, all_before, torch.tensor([shortlist.tokens], device=rows.logits.device))
            shortlists.append(PairedShortlist(shortlist, table[0].double().cpu().numpy(), trust))
            tokens = shortlist.tokens
        return shortlists

    def _shortlists(self, rows: torch.Tensor, context: Context, num: int, first: int) -> list[Shortlist]:
        """As `shortlists`, by `ranked`."""
        shortlists = []
        for ahead, row in enumerate(rows, first):
            tokens = np.array(self.ranked(row, context, (), num, ahead).tokens, dtype=np.int64)
            position = len(context) + ahead
            values = self._penalised(self._biased(row[None], [position], None), context, [()], ahead)[0]
            scores = values[tokens].astype(np.float64)
            if self.params.temperature > 0:
                scores = scores / self.params.temperature + noise.gumbel(self._seed, position, tokens)
            sound = np.isfinite(scores)
            shortlists.append(Shortlist(tokens[sound].tolist(), np.minimum.accumulate(scores[sound])))
        return shortlists

    def log_probabilities(self, logits: torch.Tensor, context: Context,
                          paths: Sequence[Sequence[int]]) -> list[Support]:
        """For row i of logits [R, V], after the text and the tokens of paths[i]: the ids that penalty, bans and
        filters leave, and their log-probabilities. At T = 0, log-probabilities of the penalised logits at T = 1."""
        positions = [len(context) + len(path) for path in paths]
        masks = [self._mask(context, path) for path in paths] if self._grammar else None
        rows = self._penalised(self._biased(logits, positions, masks), context, paths)
        supports = []
        for row, position in zip(rows, positions, strict=True):
            ids = np.flatnonzero(np.isfinite(row))
            kept = Support(ids, row[ids].astype(np.float64))
            if self.params.temperature > 0:
                kept = self._filtered(row, position)
            supports.append(Support(kept.ids, process.log_probabilities(kept)))
        return supports

    def pruned(self, tree: Tree, context: Context) -> Tree:
        """A draft tree without the guesses that are banned, that the grammar forbids, or that penalties make hopeless.

        It saves time and changes no text.
        """
        if self._bans[0] == len(context):
            tree = tree.kept([parent != 0 or token not in self._bans[1]
                              for token, parent in zip(tree.tokens, tree.parents, strict=True)])
        if len(tree) > 1 and (masks := self._masks(tree, context)) is not None:
            tree = tree.kept([mask is not None for mask in masks])
        if not (self.params.dry_multiplier or self.params.no_repeat_ngram_size) or len(tree) == 1:
            return tree
        penalties = self._updated_penalties(context)
        return tree if penalties is None else tree.kept(penalties.hopeful(tree.tokens, tree.parents, HOPELESS))

    def extended(self, tree: Tree, context: Context, max_depth: int) -> Tree:
        """A pruned tree with the tokens that the grammar forces after its leaves, at most `max_depth` deep."""
        return self._grammar.extended(tree, context, max_depth) if self._grammar else tree

    def _masks(self, tree: Tree, context: Context) -> list[Mask | None] | None:
        """The tokens that the grammar allows after each node; None without a grammar."""
        return self._grammar.masks(tree, context) if self._grammar else None

    def _mask(self, context: Context, path: Sequence[int]) -> Mask | None:
        """The tokens that the grammar allows after the text and `path`; None where it forbids the path itself."""
        assert self._grammar is not None
        return self._grammar.mask(context, path)

    def survives(self, context: Context, tokens: Sequence[int]) -> bool:
        """Whether the text can go on under its grammar after these tokens, which are given and not chosen."""
        return self._grammar is None or not self._grammar.has_begun or self._grammar.survives(context, tokens)

    def _biased(self, logits: torch.Tensor, positions: Sequence[int],
                masks: Sequence[Mask | None] | None) -> torch.Tensor:
        """Logits [R, V] of the tokens at these positions, with `logit_bias` added and without banned tokens.

        masks  of each row, the tokens that the grammar allows; None for rows that the text cannot reach
        """
        tokens, values = self._bias
        has_ban = self._bans[0] in positions
        if not len(tokens) and not has_ban and masks is None:
            return logits
        logits = logits.detach().to(torch.float32, copy=True)
        logits[..., tokens.to(logits.device)] += values.to(logits.device)
        for row in range(len(positions) if has_ban else 0):
            if positions[row] == self._bans[0]:
                logits[row, self._bans[1]] = -torch.inf
        for row, mask in enumerate(masks or ()):
            if mask is not None:
                logits[row].masked_fill_(torch.from_numpy(~mask).to(logits.device), -torch.inf)
        return logits

    def ranker(self, context: Context, vocabulary: int, width: int, within: float = math.inf) -> Ranker | None:
        """What ranks the guesses of chains as `ranked` does, where their logits are computed; None for settings that
        need Python.

        vocabulary  number of logits
        """
        if self._bans[0] == len(context):
            return None
        if self.on_device:
            return self.on_device.ranker(context, width, within)
        if not self._is_fast or len(self._bias[0]) or self._grammar:
            return None
        return self._compiled(context, vocabulary).ranker(context, width, within)

    def _compiled(self, context: Context, vocabulary: int) -> FastSampler:
        """The compiled sampler; its penalties are up to date with the text."""
        penalties = self._updated_penalties(context, vocabulary)
        if self._fast is None:
            self._fast = FastSampler(self.params, self._banned, vocabulary, penalties)
        return self._fast

    def _updated_penalties(self, context: Context, vocabulary: int | None = None) -> PathPenalties | None:
        """The penalties by path, up to date with the text; None if there are none, or no vocabulary is known yet."""
        if self._path_penalties is None:
            if not self.params.has_path_penalties or vocabulary is None:
                return None
            self._path_penalties = new_path_penalties(self.params, vocabulary, context.prompt_length,
                                                      self._marked.breakers, self._settings[2])
        if len(self._path_penalties) < len(context):
            self._path_penalties.extend(context.slice(len(self._path_penalties), len(context)))
        return self._path_penalties

    def _filtered(self, row: NDArray[np.float32], position: int) -> Support:
        coin = noise.coin(self._seed, position) if self.params.has_xtc else 1.0
        return process.filtered(row, self.params, coin, self._marked.protected)

    def _penalised(self, logits: torch.Tensor, context: Context, paths: Sequence[Sequence[int]],
                   ahead: int = 0) -> NDArray[np.float32]:
        """Rows [R, V] after penalties and bans; row i is after the text and the tokens of paths[i]."""
        raw: NDArray[np.float32] = logits.detach().float().cpu().numpy()
        rows = self._window.penalised(raw, context, paths) if self._window else raw.copy()
        if (penalties := self._updated_penalties(context, rows.shape[1])) is not None:
            for i, path in enumerate(paths):
                tokens, amounts = penalties.edits(path, ahead == 0)
                np.subtract.at(rows[i], tokens, np.array(amounts, np.float32))
        for i, path in enumerate(paths):
            if context.num_new + ahead + len(path) < self.params.min_new_tokens:
                rows[i, self._banned] = -np.inf
        return rows


def _by_noise(kept: Support, seed: int, position: int) -> list[tuple[float, int]]:
    """Pairs of score + noise and id, best first."""
    total = kept.scores + noise.gumbel(seed, position, kept.ids)
    order = np.lexsort((kept.ids, -total))
    return list(zip(total[order].tolist(), kept.ids[order].tolist(), strict=True))


def gumbel_argmax(kept: Support, seed: int, position: int) -> int:
    """argmax of score + noise over a support; the smallest id among equals.

    With many tokens, noise is computed only where it could decide. The best sum among the highest scores sets a mark; a
    lower score s needs noise of at least mark - s, which few of the random bits reach.
    """
    if len(kept.ids) > _MAX_DIRECT:
        threshold = -np.partition(-kept.scores, _MAX_DIRECT - 1)[_MAX_DIRECT - 1]
        high = kept.scores >= threshold
        mark = float((kept.scores[high] + noise.gumbel(seed, position, kept.ids[high])).max())
        could = high | (noise.bits(seed, position, kept.ids) >= noise.bits_reaching(mark - threshold))
        kept = kept.keep(could)
    total = kept.scores + noise.gumbel(seed, position, kept.ids)
    return int(kept.ids[int(total.argmax())])
