"""The tokenizer and the chat template in a GGUF file's metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from longdraft.checkpoint.gguf.container import Gguf
from longdraft.checkpoint.gguf.metadata import special_id
from longdraft.checkpoint.gguf.types import Array
from longdraft.text import sentencepiece
from longdraft.text.sentencepiece import SPACE, Kind, Piece

_PREFIX = "tokenizer.ggml."
_MAX_TOKENS = 1 << 21
_PADDING = re.compile(r"\[PAD\d+\]")  # names that converters give to ids without a token
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str, breaks: str = r"[\r\n]*") -> str:
    """The regular expression of Llama 3 and Qwen: contractions, words, numbers, punctuation, white space.

    breaks  line breaks that belong to the punctuation before them
    """
    return (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+{breaks}|{_SPACES}")


def _cased_words(digits: str, contractions: str) -> str:
    """The regular expression of o200k and Tekken, which cuts words where lower case becomes upper case."""
    other, upper, lower = r"\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}", r"\p{Ll}"
    return (rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}{other}]*[{lower}{other}]+{contractions}"
            rf"|[^\r\n\p{{L}}\p{{N}}]?[{upper}{other}]+[{lower}{other}]*{contractions}"
            rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")


@dataclass(frozen=True)
class _Split:
    """How a pre-tokenizer cuts a text before pairs are merged.

    regexes         each cuts the parts that those before it left over; none: the one of GPT-2
    ignores_merges  a part that is a token is taken whole
    adds_bos        texts begin with the BOS token unless the file says otherwise
    single_digits   digits are cut off one by one
    """

    regexes: tuple[str, ...] = ()
    ignores_merges: bool = False
    adds_bos: bool = False
    single_digits: bool = False


_LLAMA3 = _words(r"\p{L}", r"\p{N}{1,3}")
_QWEN2 = _Split((_words(r"\p{L}", r"\p{N}"),))
_O200K = _Split((_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+")
_SPLITS: Mapping[str, _Split] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
                    _Split((_LLAMA3,), True, True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _Split((_LLAMA3,))),
    "glm4": _Split((_LLAMA3,), True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo"), _QWEN2),
    "qwen35": _Split((_words(r"\p{L}\p{M}", r"\p{N}"),)),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": _Split((_cased_words(r"\p{N}", ""),), True, True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "mellum", "a.x-4.0", "trillion"), _Split()),
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r", "minerva-7b"), _Split(single_digits=True)),
    "minicpm5": _Split((r"\p{N}{1,3}", _words(r"\p{L}", r"\p{N}+")), True),
    "seed-coder": _Split((_words(r"\p{L}", r"\p{N}", breaks=""),)),
    "deepseek-coder": _Split(_DEEPSEEK_CODER, single_digits=True),
}


def tokenizer_of(model: Gguf) -> HFTokenizer:
    """The tokenizer. Raises ModelError if it is missing, damaged, or of a kind that longdraft does not have."""
    kind = model.values.get(f"{_PREFIX}model")
    pieces = _pieces(model)
    if kind == "llama":
        tokenizer, adds_bos = _sentencepiece(model, pieces), True
    elif kind == "gemma4":
        # Files say that texts begin with BOS, but the tokenizer of the model adds none: its chat template writes it.
        return _merged_pieces(model, pieces)
    elif kind == "gpt2":
        split = _split(model)
        tokenizer, adds_bos = _byte_level(model, pieces, split), split.adds_bos
    else:
        model.fail(f"{_PREFIX}model is {kind!r}; supported: llama (SentencePiece BPE), gpt2 (byte-level BPE) and "
                   "gemma4; give the original tokenizer with --tokenizer")
    first = _end(model, "bos", adds_bos, len(pieces))
    sentencepiece.add_ends(tokenizer, first, _end(model, "eos", False, len(pieces)))
    return tokenizer


def template_of(model: Gguf) -> tuple[object, dict[str, str]]:
    """The chat template, or a list of named ones, or None; and the texts of the special tokens by their names."""
    source: object = model.values.get("tokenizer.chat_template")
    named = [{"name": key.removeprefix("tokenizer.chat_template."), "template": value}
             for key, value in model.values.items()
             if key.startswith("tokenizer.chat_template.") and isinstance(value, str)]
    if source is None and named:
        source = named
    tokens = model.array(f"{_PREFIX}tokens") if isinstance(model.values.get(f"{_PREFIX}tokens"), Array) else []
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {ours: special_id(model, theirs, len(tokens)) for theirs, ours in names.items()}
    return source, {name: tokens[i] for name, i in ids.items() if i is not None}


def twins_of(model: Gguf) -> dict[int, int]:
    """Of tokens with equal texts, which official files of Gemma 4 have: each id but the last -> the last.

    As in llama.cpp, a text becomes the last one, and each of them becomes the text.
    """
    last: dict[str, int] = {}
    tokens = _list(model, "tokens")
    for i, token in enumerate(tokens):
        last[token] = i
    return {i: last[token] for i, token in enumerate(tokens) if token and last[token] != i}


def _pieces(model: Gguf) -> list[Piece]:
    """The vocabulary, checked: as many scores and types as tokens. Of equal texts all but the last become padding."""
    tokens = _list(model, "tokens")
    if not 1 <= len(tokens) <= _MAX_TOKENS or not isinstance(tokens[0], str):
        model.fail(f"{_PREFIX}tokens has {len(tokens):,} values; allowed: 1 to {_MAX_TOKENS:,} texts")
    twins = twins_of(model)
    tokens = [f"[PAD{i}]" if i in twins or not token else token for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        model.fail(f"{_PREFIX}tokens has tokens with the names of its padding, [PAD0] and so on; get the file again")
    scores, kinds = _list(model, "scores", len(tokens), 0.0), _list(model, "token_type", len(tokens), int(Kind.NORMAL))
    pieces = (Piece(token, float(score), int(kind)) for token, score, kind in zip(tokens, scores, kinds, strict=True))
    return [piece._replace(kind=int(Kind.UNUSED)) if i in twins else piece for i, piece in enumerate(pieces)]


def _list(model: Gguf, name: str, count: int | None = None, default: object = None) -> list[Any]:
    """An array of the tokenizer. With `count`: numbers, so many of them, or the default if there are none."""
    key = _PREFIX + name
    value = model.values.get(key)
    if value is None and count is not None:
        return [default] * count
    if not isinstance(value, Array):
        model.fail(f"{key} is {'missing' if value is None else 'no list'}; give the original tokenizer with "
                   "--tokenizer")
    values = model.array(key)
    if count is not None and (len(values) != count or isinstance(values[0], str)):
        model.fail(f"{key} has {len(values):,} values for {count:,} tokens; get the file again")
    return values


def _sentencepiece(model: Gguf, pieces: list[Piece]) -> HFTokenizer:
    name = model.values.get("general.architecture")
    is_gemma = isinstance(name, str) and name.startswith("gemma")  # which adds no space in front
    if is_gemma:
        # Merges follow the ids, not the scores, and tokens of spaces alone are spelt with real spaces.
        pieces = [Piece(SPACE * len(piece.text) if not piece.text.strip(" ") else piece.text, -float(i), piece.kind)
                  for i, piece in enumerate(pieces)]
        if len({piece.text for piece in pieces}) != len(pieces):
            model.fail(f"{_PREFIX}tokens has the same run of spaces twice; get the file again")
    pieces = _without_padding(pieces)
    has_bytes = any(piece.kind == Kind.BYTE for piece in pieces)
    try:
        return sentencepiece.new_tokenizer(pieces, _flag(model, "add_space_prefix", not is_gemma), has_bytes)
    except ValueError as error:
        model.fail(f"its tokenizer cannot be made: {error}; give the original tokenizer with --tokenizer")


def _without_padding(pieces: list[Piece]) -> list[Piece]:
    """The pieces without the unused ones at the end, which only fill the vocabulary up."""
    count = len(pieces)
    while count and pieces[count - 1].kind == Kind.UNUSED:
        count -= 1
    return pieces[:count]


def _split(model: Gguf) -> _Split:
    name = model.values.get(f"{_PREFIX}pre")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        model.fail(f"{_PREFIX}pre, the pre-tokenizer, is {name!r}; supported: {', '.join(_SPLITS)}; give the original "
                   "tokenizer with --tokenizer")
    return split


def _merged_pieces(model: Gguf, pieces: list[Piece]) -> HFTokenizer:
    """The tokenizer of Gemma 4: pieces of SentencePiece, merged over a whole text in the order of the file."""
    vocabulary = {piece.text: i for i, piece in enumerate(_without_padding(pieces))}
    unknown = next((piece.text for piece in pieces if piece.kind == Kind.UNKNOWN), None)
    tokenizer = HFTokenizer(models.BPE(vocab=vocabulary, merges=_merges(model, vocabulary), unk_token=unknown,
                                       fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    sentencepiece.add_tokens(tokenizer, pieces)
    return tokenizer


def _merges(model: Gguf, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of the file. ModelError for one whose parts or result are no tokens."""
    merges = []
    for merge in _list(model, "merges"):
        text = str(merge)
        cut = text.find(" ", 1)
        pair = text[:cut], text[cut + 1 :]
        if cut < 0 or any(part not in vocabulary for part in (*pair, pair[0] + pair[1])):
            model.fail(f"the merge {text[:80]!r} does not join two tokens to a third; get the file again")
        merges.append(pair)
    return merges


def _byte_level(model: Gguf, pieces: list[Piece], split: _Split) -> HFTokenizer:
    vocabulary = {piece.text: i for i, piece in enumerate(pieces)
                  if piece.kind != Kind.UNUSED and not _PADDING.fullmatch(piece.text)}
    merges = _merges(model, vocabulary)
    tokenizer = HFTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignores_merges))
    parts: list[pre_tokenizers.PreTokenizer] = [
        *(pre_tokenizers.Split(Regex(regex), "isolated") for regex in split.regexes),
        *([pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.regexes)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    sentencepiece.add_tokens(tokenizer, [piece for piece in pieces if piece.text in vocabulary])
    return tokenizer


def _end(model: Gguf, name: str, default: bool, size: int) -> int | None:
    """The id of the token that texts begin or end with; None: with none."""
    return special_id(model, name, size) if _flag(model, f"add_{name}_token", default) else None


def _flag(model: Gguf, name: str, default: bool) -> bool:
    value = model.values.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        model.fail(f"{_PREFIX}{name} is {value!r}; allowed: true or false")
    return value
