"""The constants of the drafter `auto`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AutoSettings:
    """The constants of `auto`. They set how fast it learns and what it may spend on that; none changes a text.

    max_depth              deepest draft
    max_rows               most rows of a verification
    switch_ratio           another candidate must take at most this share of the leader's time for each token
    batch_ratio            the same between plain decoding and a candidate in a batch, whose forwards are charged to the
                           requests by their expected costs, so that errors in these show late
    steps_per_decision     steps between two decisions while plain decoding leads; they are short
    steps_per_look         steps between two looks for news from other requests while plain decoding leads; a divisor of
                           `steps_per_decision`
    drafts_per_decision    steps between two decisions while another candidate leads
    decision_share         share of the time that decisions may take
    watch_share            share of the time that watching a candidate that reads the text alone may take
    watch_decay            weight of its earlier drafts at each new one: about the last 25 count
    exploration_depth      once in `steps_per_decision` steps a draft is so many tokens deeper than the best depth
    first_steps            steps that a candidate is probed before it may be chosen, and times of its drafts before its
                           costs are no longer in doubt
    probe_steps            steps of a later probe, and of one with drafts of two tokens: its last one times the drafter
    untypical_steps        first steps of a text, and steps after a switch, that do not time the drafter: it catches up,
                           and its weights and caches are not in the processor's caches
    doubt                  costs that are in doubt may be so many times too high: those in the user's cache folder may
                           come from a busy machine, and those of plain decoding were not checked while others draft
    near                   a candidate may well be the fastest if it takes at most so many times the leader's time
    probe_budget           share of the time that probes may lose
    hopeful_budget         share of the time that the probes of one candidate may lose, whatever others lost, while it
                           is expected to be the fastest
    allowance              steps of plain decoding that first probes may lose besides
    least_loss             steps of plain decoding that each step of a probe is expected to lose at least
    batch_loss             a step of a probe in a batch loses so many times what its request expects to lose: the other
                           requests wait for it as well
    delivery_decay         weight of what earlier steps delivered at each new one: about the last 33 count
    delivery_prior         steps of plain decoding that a candidate is trusted with before what it delivers counts
    """

    max_depth: int = 16
    max_rows: int = 64
    switch_ratio: float = 0.97
    batch_ratio: float = 0.95
    steps_per_decision: int = 32
    steps_per_look: int = 8
    drafts_per_decision: int = 2
    decision_share: float = 0.002
    watch_share: float = 0.005
    watch_decay: float = 0.96
    exploration_depth: int = 2
    first_steps: int = 4
    probe_steps: int = 3
    untypical_steps: int = 2
    doubt: float = 3.0
    near: float = 1.3
    probe_budget: float = 0.005
    hopeful_budget: float = 0.0025
    allowance: float = 4.0
    least_loss: float = 0.5
    batch_loss: float = 2.0
    delivery_decay: float = 0.97
    delivery_prior: float = 8.0


AUTO_SETTINGS = AutoSettings()
