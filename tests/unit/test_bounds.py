"""Bounds on what users, programs and files give are errors of one line, not assertions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import longdraft
from helpers.gguf_files import write_gguf
from helpers.journals import check_one_line
from longdraft.book.book import Book
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.drafters.draft_model import windowed
from longdraft.engine.huggingface import hf_generate
from longdraft.errors import LongdraftError
from longdraft.server.settings import ServerSettings

SMALL = SimpleNamespace(config=SimpleNamespace(max_positions=5, vocab_size=9))


def gguf_without_tokens(folder, tiny):
    write_gguf(folder / "m.gguf", {"general.architecture": "llama", "tokenizer.ggml.tokens": "a"}, {})
    return open_gguf(folder / "m.gguf").array("tokenizer.ggml.tokens")


CALLS = {
    "a text instead of an array in a GGUF file": (gguf_without_tokens, "tokenizer.ggml.tokens is no array"),
    "a book without a seed": (lambda folder, tiny: Book.open(folder, None, None, longdraft.SamplingParams()), "seed"),
    "keys with too few labels": (lambda folder, tiny: ServerSettings(api_keys=("a", "b"), key_labels=("x",)), "label"),
    "a draft model with a context of a few tokens": (lambda folder, tiny: windowed(SMALL, SMALL, 5, 4, 1, None),
                                                     "budget"),
    "an engine that is no rank": (lambda folder, tiny: longdraft.load(str(tiny["gqa"]), drafter="plain").follow(),
                                  "ranks"),
    "hf_generate by itself": (lambda folder, tiny: hf_generate(None, None), "generation_config"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bound_is_one_clear_line(tiny, tmp_path, name):
    call, part = CALLS[name]
    with pytest.raises(LongdraftError) as caught:
        call(tmp_path, tiny)
    check_one_line(caught.value, part)
