"""A draft vocabulary: the tokens that a self-drafting chain can guess, those that are likely in the text.

A draft token multiplies the head's row of every token of the vocabulary. With 152,000 tokens that is 40 % of what an
int4 copy of a 0.5B model reads. A head of some tokens' rows alone reads less (FR-Spec, arXiv 2502.14856, with the most
frequent tokens of a corpus). A token outside the draft vocabulary cannot be guessed; verification adds it as it adds
any other token, so the text does not change.

    tokens of the text, most frequent first  |  then those with the highest mean logit over verified rows

The mean logit tells which tokens fit into such a text. A prior is added, because BPE gives the lowest ids to its first
merges. With 32,768 of 262,144 tokens, the draft vocabulary lacks a fifth to a half of the new tokens that one without
the logits would lack (notebook/2026-11.md). The rows are packed once and again from time to time, where the text has
tokens that they lack. The work of a step does not grow with the text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
_RENEW_AFTER = 32, 256  # tokens: as many as the text had when the rows were packed, between these
_PROMPT_ROWS = 16  # last rows of a prompt whose logits are computed
_DECAY = 0.98  # weight of the logits of earlier rows at each new one
_OF_TEXT = 1e6  # above all logits
_PRIOR = 4.0  # nats by which the first id is likelier than the last one, before any row is known


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
        total = model.config.vocab_size
        self._model, self._size = model, size
        self._counts = torch.zeros(total, dtype=torch.float64)  # of the text's tokens
        self._num_counted = 0
        self._prompt: Tensor | None = None  # its last rows, until they are used
        self._logits, self._weight = torch.zeros(total), 0.0  # decayed sums, of logits and of 1, over rows
        self._limited: Transformer | None = None
        self._is_in = torch.zeros(0, dtype=torch.bool)
        self._renewal = 0  # tokens of the text at which the vocabulary may be renewed
        self._lacks_tokens = False

    @property
    def nbytes(self) -> int:
        limited = self._limited
        made = limited.part.nbytes + limited.weights.head.nbytes if limited and limited.part else 0
        return sum(part.nbytes for part in (self._counts, self._logits, self._is_in)) + made

    def learn(self, verified: Verified) -> None:
        """Learn from the last verified row which tokens are likely. All rows take a tenth of a small model's time."""
        if len(logits := verified.result.logits):
            self._add(logits[verified.rows[-1]][None])
        else:  # a prompt
            self._prompt = verified.hidden[-_PROMPT_ROWS:]

    def _add(self, logits: Tensor) -> None:
        decay = _DECAY ** len(logits)
        self._logits.mul_(decay).add_(logits.sum(0))
        self._weight = decay * self._weight + len(logits)

    def model(self, context: Context) -> Transformer:
        """The model with the head of the tokens that are likely now."""
        new = torch.from_numpy(context.slice(self._num_counted, len(context)).astype(np.int64))
        self._counts.index_add_(0, new, torch.ones(len(new), dtype=torch.float64))
        self._num_counted = len(context)
        if self._limited is not None:
            self._lacks_tokens |= not self._is_in[new].all()
            if not self._lacks_tokens or len(context) < self._renewal:
                return self._limited
        part = PartOfVocabulary(self._likely(), len(self._counts))
        head = rows_of_head(self._model.kernels, self._model.weights.head, part)
        self._limited = self._model.with_part_of_vocabulary(part, head)
        least, most = _RENEW_AFTER
        self._renewal, self._lacks_tokens = len(context) + min(max(len(context), least), most), False
        return self._limited

    def _likely(self) -> Tensor:
        """The ids of the draft vocabulary [N] int64, ascending."""
        if self._prompt is not None:
            self._add(self._model.logits(self._prompt))
            self._prompt = None
        total = len(self._counts)
        fit = self._logits / max(self._weight, 1.0) - torch.arange(total) * (_PRIOR / total) + _OF_TEXT * self._counts
        ids = fit.topk(self._size).indices.sort().values
        self._is_in = torch.zeros(total, dtype=torch.bool).index_fill_(0, ids, True)
        return ids
