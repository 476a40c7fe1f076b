"""Long pieces of a text: tokenizers take quadratic time for some of them, so that they are read in a child process.

    child = LimitedProcess("longdraft.text.pieces", "encoder", lambda: (tokenizer_json,))
    child.call(text, True)    # "17 4 2": the token ids

This module imports nothing but `tokenizers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tokenizers import Tokenizer

_LONG = 2048  # characters; the longest words of languages, addresses and lines of CJK text have a fifth
_SAME = re.compile(rf"\w{{{_LONG}}}|\s{{{_LONG}}}|[^\w\s]{{{_LONG}}}")


def has_long_piece(text: str) -> bool:
    """Whether a text has 4,096 letters, blanks or other characters in a row: it may be so from half of that on.

    Looks at every 2,048th character only, from which on a shorter piece ends soon.
    """
    return any(_SAME.match(text, start) for start in range(0, len(text), _LONG))


def encoder(tokenizer_json: str) -> Callable[[str, bool], str]:
    """The function of the child process."""
    tokenizer = Tokenizer.from_str(tokenizer_json)

    def encode(text: str, add_special_tokens: bool) -> str:
        encoding, = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return " ".join(map(str, encoding.ids))

    return encode
