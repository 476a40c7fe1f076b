"""What the requests of an engine share for `auto`: costs, acceptance, how fast the machine is now, what probes lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from longdraft.drafters.auto.acceptance import AcceptanceByDepth
from longdraft.drafters.auto.costs import Costs, DraftCosts, FloatArray, ForwardCosts
from longdraft.drafters.auto.pace import Pace
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.request.tree import Tree
from longdraft.speculation.decayed_rate import DecayedRate

MOVING_RATE = 0.05  # how much of a new value the moving averages below take over


class Rating(NamedTuple):
    """What to expect of a candidate.

    seconds  for each token at its best depth
    depth    that depth; 0 for plain decoding
    least    seconds for each token if all guesses were right
    tokens   expected of a step
    short    seconds of a step with a draft of two tokens, and the tokens expected of it
    """

    seconds: float
    depth: int
    least: float
    tokens: float
    short: tuple[float, float]

    @classmethod
    def of_plain(cls, seconds: float) -> Rating:
        return cls(seconds, 0, seconds, 1.0, (seconds, 1.0))

    @classmethod
    def of_reader(cls, seconds: float) -> Rating:
        """The rating of a candidate that reads the text alone: it is never probed, and drafts as deep as it can."""
        return cls(seconds, AUTO_SETTINGS.max_depth, seconds, 1.0, (seconds, 1.0))


class Guesser(NamedTuple):
    """What guesses for a candidate.

    model  candidates of one model are right equally often
    prior  share of right guesses to expect before it has drafted
    """

    model: str
    prior: float


class Losses:
    """Seconds that probes lost, and those that requests reserved for the probes that they make now. What a request
    reserved goes with it if it ends during its probe."""

    def __init__(self) -> None:
        self.past = 0.0
        self.reserved = WeakKeyDictionary[object, float]()

    @property
    def seconds(self) -> float:
        return self.past + sum(self.reserved.values())


class Candidate:
    """What the requests of an engine share about one drafter.

    costs       as they were measured on this machine
    acceptance  of its guesses; candidates that guess with the same model share it
    losses      of its probes
    per_token   of a candidate that reads the text alone: plain steps that its steps take, for each of their tokens
    """

    def __init__(self, costs: DraftCosts, acceptance: AcceptanceByDepth) -> None:
        self.per_token = DecayedRate(AUTO_SETTINGS.watch_decay)
        self.costs = costs
        self.acceptance = acceptance
        self.losses = Losses()
        self._depths = np.arange(1.0, 1 + (costs.depth or AUTO_SETTINGS.max_depth))
        self._nodes = costs.nodes  # guesses that are verified, for each token of depth

    def add(self, tree: Tree, allowed: int, accepted: int) -> None:
        """A step that could draft `allowed` deep and verified `tree`."""
        self.acceptance.add(allowed, accepted)
        self._nodes += MOVING_RATE * ((len(tree) - 1) / max(1, allowed) - self._nodes)

    def rate(self, steps: FloatArray, draft_factor: float, reached: list[float], requests: int = 1) -> Rating:
        """The best depth d, by the seconds for each token:

            (steps[1 + nodes * d] + draft_factor * (base + token * d))  /  (1 + P(1) + ... + P(d))

        steps         seconds of a step without its draft, by rows from 0 on
        draft_factor  of the seconds of a draft
        reached       P(1), P(2), ...
        requests      that draft together
        """
        depths = self._depths
        rows = np.minimum(len(steps) - 1, (1.5 + self._nodes * depths).astype(np.int64))
        seconds = steps[rows] + draft_factor * (self.costs.base + self.costs.token_of(requests) * depths)
        tokens = 1 + np.cumsum(reached[: len(depths)])
        best = int((seconds / tokens).argmin())
        two = min(2, len(depths)) - 1
        return Rating(float(seconds[best] / tokens[best]), best + 1, float((seconds / (1 + depths)).min()),
                      float(tokens[best]), (float(seconds[two]), float(tokens[two])))


class SharedStatistics:
    """What the requests of an engine share, and what their probes may lose. One thread runs the requests of an engine.

    weights_in_tokens  tokens of context whose KV cache is as large as the model's weights
    between            seconds of a request between two steps, for its events and their text
    after_plain        the same after a step of plain decoding, whose text is one token; None: it is not known
    ahead              seconds of a step of plain decoding that is computed ahead, with what passes between two steps,
                       as a share of those of a single one without that
    sharing            share of the requests of a batch that verify drafts in one forward, while the rest still draft
    num_known          how often the acceptance or the costs of a candidate became known: then all requests decide anew
    seconds            of all steps
    losses             of all probes
    """

    def __init__(self, weights_in_tokens: float = 1.0) -> None:
        self.forward = ForwardCosts.by_size(weights_in_tokens)
        self.candidates: dict[str, Candidate] = {}
        self.pace = Pace()
        self.between = 0.0
        self.after_plain: float | None = None
        self.ahead = DecayedRate(AUTO_SETTINGS.delivery_decay)
        self.sharing = 1.0
        self.num_known = 0
        self.seconds = 0.0
        self.losses = Losses()

    def begin(self, costs: Costs, guessers: Mapping[str, Guesser]) -> None:
        """Take over the measured costs. guessers: of each candidate"""
        self.forward = costs.forward
        of_model = {model: AcceptanceByDepth(AUTO_SETTINGS.max_depth, prior) for model, prior in guessers.values()}
        self.candidates = {name: Candidate(drafts, of_model[guessers[name].model])
                           for name, drafts in costs.drafts.items()}
