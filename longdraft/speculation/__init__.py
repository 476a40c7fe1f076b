"""One decoding step (step.py): draft a tree, verify it in one forward, accept the tokens that the target chooses.

    drafter.py       the interface of drafters; the drafters themselves are in longdraft/drafters/
    abilities.py     what a drafter can be able to do beyond that interface
    step.py          one step of one request
    verify.py        the path of the tree that the target's own choices follow
    logprobs.py      log-probabilities of the accepted tokens
    prefill.py       the prompt's forwards before the first step
    reuse.py         rows of a prompt that an earlier text computed
    routine.py       generators that yield the forwards they need
    cost_clock.py    what a text costs, alone and in a batch
    ahead.py         tokens of plain decoding that are computed ahead
    plain_speed.py   how fast plain decoding would write a text
    decayed_rate.py  a rate whose later outcomes weigh more
"""
