"""A draft vocabulary: the tokens that a self-drafting chain can guess, those that are frequent in the text.

A draft token multiplies the head's row of every token of the vocabulary. With 152,000 tokens that is 40 % of what an
int4 copy of a 0.5B model reads. A head of the frequent tokens' rows alone reads less (FR-Spec, arXiv 2502.14856, with
the frequencies of a corpus). A token outside the draft vocabulary cannot be guessed; verification adds it as it adds
any other token, so the text does not change.

    tokens of the text and candidates, most frequent first  |  then the lowest ids, which BPE gives to its first merges

Candidates are tokens to which verification gave at least a fiftieth of the best token's probability. They halve the
number of new tokens that a draft vocabulary lacks (notebook/2026-11.md). The rows are packed once and again from time
to time, where the text has tokens that they lack. The work of a step does not grow with the text.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from longdraft.errors import UsageError, check
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary, can_take_rows, rows_of_head
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.speculation.drafter import Verified

AUTO_VOCABULARY, ALL = "auto", "all"
VocabularySize = int | str  # auto | all | number of tokens
LEAST_SIZE = 64
_AUTO_SIZE = 32_768
_AUTO_MIN_VOCABULARY = 65_536
_AUTO_MIN_SAVED = 0.2  # share of the bytes that a draft token reads
_RENEW_AFTER = 256  # tokens
_WEIGHT = 10  # of a token of the text; that of a candidate is 1
_CANDIDATE = math.log(0.02)  # of the best token's probability
_MAX_CANDIDATES = 256  # of a row; a row with more of them tells little


def check_draft_vocabulary(value: VocabularySize) -> None:
    """UsageError unless `value` is auto, all, or a number of tokens that some vocabulary can have."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= LEAST_SIZE
    check(is_size or value in (AUTO_VOCABULARY, ALL), "draft_vocabulary", value,
          f"auto, all, or {LEAST_SIZE} to the model's number of tokens")


def vocabulary_size(asked: VocabularySize, model: Transformer) -> int | None:
    """Number of tokens of the draft vocabulary of `model`, which drafts; None: the whole vocabulary.

    UsageError for a number larger than the vocabulary, and for one that these kernels cannot serve.
    """
    total, head = model.config.vocab_size, model.weights.head
    if asked in (ALL, total):
        return None
    is_possible = can_take_rows(model.kernels, head)
    if asked == AUTO_VOCABULARY:
        saved = head.nbytes * (1 - _AUTO_SIZE / total) / model.weights_bytes
        pays = total > _AUTO_MIN_VOCABULARY and saved >= _AUTO_MIN_SAVED
        return _AUTO_SIZE if pays and is_possible else None
    check(isinstance(asked, int) and asked <= total, "draft_vocabulary", asked,
          f"auto, all, or {LEAST_SIZE} to {total} (the model's number of tokens)")
    if not is_possible:
        raise UsageError(f"draft_vocabulary is {asked!r}, which needs the compiled CPU kernels, and weights that are "
                         "not divided among ranks; allowed here: auto, all")
    return int(asked)


class DraftVocabulary:
    """The draft vocabulary of one text.

    model  drafts; its head is that of the whole vocabulary
    size   number of tokens
    """

    def __init__(self, model: Transformer, size: int) -> None:
        self._model, self._size = model, size
        self._counts = np.zeros(model.config.vocab_size, dtype=np.int64)
        self._num_counted = 0
        self._limited: Transformer | None = None
        self._is_in: np.ndarray = np.zeros(0, dtype=bool)
        self._made_at = 0
        self._lacks_tokens = False

    @property
    def nbytes(self) -> int:
        limited = self._limited
        made = limited.part.nbytes + limited.weights.head.nbytes if limited and limited.part else 0
        return self._counts.nbytes + self._is_in.nbytes + made

    def learn(self, verified: Verified) -> None:
        """Count the candidates of verified rows."""
        logits = verified.result.logits
        if not len(logits):  # the last rows of a prompt have none
            return
        for row in (logits[node].numpy() for node in verified.rows):  # NumPy takes a sixth of PyTorch's time here
            candidates = np.flatnonzero(row >= row.max() + _CANDIDATE)
            if len(candidates) <= _MAX_CANDIDATES:
                self._counts[candidates] += 1

    def model(self, context: Context) -> Transformer:
        """The model with the head of the tokens that are frequent now."""
        new = context.slice(self._num_counted, len(context))
        np.add.at(self._counts, new, _WEIGHT)
        self._num_counted = len(context)
        if self._limited is not None:
            self._lacks_tokens |= not self._is_in[new].all()
            if not self._lacks_tokens or len(context) < self._made_at + _RENEW_AFTER:
                return self._limited
        part = PartOfVocabulary(self._frequent(), len(self._counts))
        head = rows_of_head(self._model.kernels, self._model.weights.head, part)
        self._limited = self._model.with_part_of_vocabulary(part, head)
        self._made_at, self._lacks_tokens = len(context), False
        return self._limited

    def _frequent(self) -> torch.Tensor:
        """The ids of the draft vocabulary [N] int64, ascending."""
        total = len(self._counts)
        score = self._counts * total + np.arange(total, 0, -1)  # no two are equal
        ids = np.sort(np.argpartition(-score, self._size - 1)[: self._size])
        self._is_in = np.zeros(total, dtype=bool)
        self._is_in[ids] = True
        return torch.from_numpy(ids)
