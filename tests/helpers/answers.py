"""Answers of models that think, as a server receives them."""

from __future__ import annotations

import random

from longdraft.request.sampling_params import SamplingParams
from longdraft.text.harmony import ChannelText
from longdraft.text.stream import TextStream
from longdraft.text.thinking import AnswerReader
from longdraft.text.tokenizer import Tokenizer


def streamed_parts(tokenizer: Tokenizer, reader: AnswerReader, answer: str, stop: tuple[str, ...], seed: int,
                   limit: int | None) -> tuple[ChannelText, ChannelText]:
    """The parts of the first `limit` tokens of an answer, in steps of one to four tokens, and what was held back."""
    tokens, draw = tokenizer.encode(answer, add_special_tokens=False), random.Random(seed)
    stream = TextStream(tokenizer, SamplingParams(max_new_tokens=limit or len(tokens), stop=stop, on_loop="off"), [])
    reasoning = content = ""
    while stream.finish_reason is None:
        count = draw.randint(1, 4)
        new = stream.push(tokens[:count])
        part = reader.push(new.tokens, new.text)
        reasoning, content, tokens = reasoning + part.reasoning, content + part.content, tokens[count:]
    return ChannelText(reasoning, content), reader.finish()
