"""Text to token ids and back, and incremental decoding that emits whole characters only."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE

from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.memory import require_content
from longdraft.errors import ModelError, UsageError, translate_panics
from longdraft.sampling.grammar import GrammarCompiler
from longdraft.system.files import lone_surrogate
from longdraft.system.limited import CallError, LimitedProcess, LimitError
from longdraft.text import sentencepiece_file
from longdraft.text.chat_template import ChatTemplate, Message
from longdraft.text.gguf_vocabulary import template_of, tokenizer_of, twins_of
from longdraft.text.pieces import has_long_piece
from longdraft.text.tokenizer_config import SideFiles, add_tokens

_REPLACEMENT = "\ufffd"  # what a decoder returns for bytes that do not form a character
_MAX_LISTED = 3  # differing tokens that an error message lists
_MAX_CHARACTER = 4  # bytes, and therefore tokens, of one character
_MAX_PENDING = 16  # tokens held back; a longer sequence is not a character
_MAX_FILE = 1 << 28  # bytes; the largest known have a sixth of this
_BLOCK = 1 << 18  # characters; tokenising them takes some 30 MB
_MAX_CUT = 256  # tokens that cutting a text may add
_LIMIT_S = 10  # of processor time for a text with long pieces: some 20 MB where the time is linear
_LIMIT_BYTES = 1 << 32  # of memory for the same
_LETTERS = 0x110000  # characters of Unicode
_LONG_TEXT = 1 << 14  # characters or tokens; for more, the calls that leave the interpreter to other threads
_MANY_MISSING = 12  # ids without a row; models with image input, and their tokenizers, may differ by a few
_MAX_REMEMBERED = 64  # texts whose tokens are remembered
_PANIC = "the model's tokenizer fails"
_OTHER_FORMATS = ("tekken.json", "vocab.json")
# What the library takes from a file unchecked, or letters that are escaped without need, which may spell it.
_TRUSTED = re.compile(rb'precompiled_charsmap|continuing_subword_prefix"\s*:\s*"|\\u00[4-7]')
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# GPT-2's byte-level alphabet: printable bytes are written as themselves, all other bytes as characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)}
_CONVERT = ("`pip install transformers sentencepiece tiktoken protobuf`, then `python -c \"from transformers import "
            "AutoTokenizer as T; T.from_pretrained('MODEL').save_pretrained('FOLDER')\"`")


class Tokenizer:
    """The tokenizer and the chat template, if there is one, of a model folder or a GGUF file.

    `sha256` is the hash of tokenizer.json, or of what the other formats would be as a tokenizer.json. Tokens that the
    files beside tokenizer.json add to it count too.
    """

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        """Raises ModelError if the tokenizer is missing or malformed. template: a file with another chat template"""
        self._folder = folder
        self._template = template
        self._beside = SideFiles(folder)
        self._tokenizer, self.sha256 = read_tokenizer(folder, self._beside)
        self._twins = twins_of(open_gguf(folder)) if folder.is_file() else {}

    _grammars: GrammarCompiler | None = None

    @property
    def size(self) -> int:
        """The largest token id plus one."""
        return max(self.vocabulary().values(), default=-1) + 1

    @cached_property
    def begin_id(self) -> int | None:
        """The token that `encode` puts before every text; None: it puts none."""
        ids, own = self.encode("a"), self.encode("a", add_special_tokens=False)
        return ids[0] if len(ids) > len(own) and ids[: len(own)] != own else None

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that the tokenizer's own files name, by their names, such as eos_token."""
        return template_of(open_gguf(self._folder))[1] if self._folder.is_file() else self._beside.special

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, as the tokenizer's own files say; None: they name none."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary; None: it has no such token. Unlike `vocabulary`, it reads no
        other entry."""
        try:
            found: int | None = self._tokenizer.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair, which no name contains
            return None
        return found

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added tokens included."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return ids

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The id of each token that is matched as a whole before a text is cut: special tokens and other added ones."""
        return {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def longest_token(self) -> int:
        """The length in characters of the longest token."""
        return max(map(len, self.vocabulary()), default=1)

    def vocabulary_sha256(self) -> str:
        """Hash of the vocabulary; see `vocabulary_sha256`."""
        return vocabulary_sha256(self.vocabulary())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises UsageError for a text with half of a surrogate pair, which is not a character."""
        if (index := lone_surrogate(text)) is not None:
            raise UsageError(f"the text has half of a surrogate pair, {text[index]!a}, as character {index + 1}; "
                             "allowed: whole characters")
        if len(text) >= _LONG_TEXT and has_long_piece(text):
            return self._encode_limited(text, add_special_tokens)
        with translate_panics(_PANIC):
            if len(text) < _LONG_TEXT:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:
                encoding, = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _encode_limited(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same token ids, from a child process that can be ended."""
        try:
            return [int(token) for token in self._limited.call(text, add_special_tokens).split()]
        except (LimitError, CallError) as error:
            raise UsageError(f"the text has thousands of characters without a break, and tokenising it {error}; break "
                             "it up by blanks, line breaks or punctuation") from None

    @cached_property
    def _limited(self) -> LimitedProcess:
        return LimitedProcess("longdraft.text.pieces", "encoder", lambda: (self._tokenizer.to_str(),),
                              cpu_s=_LIMIT_S, memory_bytes=_LIMIT_BYTES)

    def has_more_tokens(self, text: str, limit: int) -> bool:
        """Whether a text has more than `limit` tokens, tokenising no more of it than that takes.

        May be false for texts with slightly more: blocks of the text are tokenised one by one, and the cuts add tokens.
        """
        count = 0
        for start in range(0, len(text), _BLOCK):
            count += len(self.encode(text[start : start + _BLOCK], add_special_tokens=False)) - _MAX_CUT
            if count > limit:
                return True
        return False

    def decode(self, ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Text, without special tokens if they are not shown. Bytes that do not form a character become U+FFFD."""
        if self._twins:
            ids = [self._twins.get(i, i) for i in ids]
        with translate_panics(_PANIC):
            if len(ids) < _LONG_TEXT:
                return str(self._tokenizer.decode(list(ids), skip_special_tokens=not shows_special))
            return str(self._tokenizer.decode_batch([list(ids)], skip_special_tokens=not shows_special)[0])

    def text_of(self, token: int) -> str:
        """The text that a token adds after another token.

        This is not always its own decoding: decoders may drop the space before the first token.
        """
        ids, before = self._context
        both = self.decode([*ids, token])
        return both[len(before) :] if both.startswith(before) else self.decode([token])

    def bytes_of(self, token: int, text: str | None = None) -> list[int] | None:
        """A token's bytes, also where they are part of a character; None if the tokenizer does not reveal them.

        text  of the token, if it is known
        """
        text = self.text_of(token) if text is None else text
        if _REPLACEMENT not in text:
            return list(text.encode())
        letters = self.letters(token)
        if token in self.byte_fallbacks:
            return [int(letters[3:5], 16)]  # <0xE2>
        return [_BYTE_OF[letter] for letter in letters] if all(letter in _BYTE_OF for letter in letters) else None

    @cached_property
    def texts(self) -> list[str]:
        """The text that each token adds after another token, by its id; "" for special tokens and unused ids.

        Tokens that are part of a character have U+FFFD in their place. Takes a second for the largest vocabularies.
        """
        ids, before = self._context
        with translate_panics(_PANIC):
            both = self._tokenizer.decode_batch([[*ids, self._twins.get(token, token)] for token in range(self.size)],
                                                skip_special_tokens=True)
        return [text[len(before) :] if text.startswith(before) else self.decode([token])
                for token, text in enumerate(both)]

    @cached_property
    def tokens_with(self) -> Callable[[str], frozenset[int]]:
        """The tokens whose text contains a text. It remembers the latest texts."""
        return lru_cache(_MAX_REMEMBERED)(lambda text: frozenset(i for i, own in enumerate(self.texts) if text in own))

    def grammars(self, vocabulary: int, eos_ids: tuple[int, ...]) -> GrammarCompiler:
        """The compiler of grammars for the model with this tokenizer (longdraft/sampling/grammar.py)."""
        def content() -> str:
            whole = self._tokenizer.to_str()
            if self.size <= vocabulary:
                return whole
            parts = json.loads(whole)  # grammars must not ask for tokens that the model has no row for
            parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < vocabulary]
            return json.dumps(parts)

        if self._grammars is None:
            self._grammars = GrammarCompiler(content, vocabulary, eos_ids)
        return self._grammars

    @cached_property
    def _context(self) -> tuple[list[int], str]:
        """A token to decode another one after, and its text."""
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids, self.decode(ids)

    def letters(self, token: int) -> str:
        """A token as spelled in the vocabulary; empty for ids without a token."""
        is_id = 0 <= token < 2**32  # those that the library can be asked for
        return (self._tokenizer.id_to_token(self._twins.get(token, token)) or "") if is_id else ""

    def is_silent(self, token: int) -> bool:
        """Whether `decode` skips it: special tokens, and ids without a token."""
        return self._twins.get(token, token) in self._special or not self.letters(token)

    @cached_property
    def characters(self) -> Callable[[int], int]:
        """The number of characters of a token that is decoded alone. It remembers each token."""
        return cache(lambda token: len(self.decode([token])))

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_fallbacks(self) -> frozenset[int]:
        """Ids of tokens such as `<0xE2>`, each of which is one byte; empty unless the decoder supports them."""
        if "ByteFallback" not in repr(self._tokenizer.decoder):
            return frozenset()
        return frozenset(i for token, i in self.vocabulary().items() if _BYTE_TOKEN.fullmatch(token))

    def stream(self) -> IncrementalDecoder:
        """A decoder for tokens that arrive one by one."""
        return IncrementalDecoder(self)

    def chat(self, messages: str | Sequence[Message], variables: Mapping[str, Any] | None = None, /,
             **options: Any) -> str:
        """The prompt for messages, in the model's chat template. A text is one message of the user.

        Raises UsageError if the model has no template, for unknown options, and for messages that it refuses.
        """
        if self.chat_template is None:
            raise UsageError(f"the model in {self._folder} has no chat template; use an instruction-tuned model, "
                             "give a template with --chat-template, or a plain text to continue")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.chat_template.render(messages, variables, **options)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.find(self._folder, self._template, self._beside)


def read_tokenizer(folder: Path, beside: SideFiles | None = None) -> tuple[HFTokenizer, str]:
    """The tokenizer of a model folder or a GGUF file, and its hash (see `Tokenizer`). beside: the folder's small files

    The settings of tokenizer.json that cut texts, fill them up, or merge at random (dropout) are left out.

    Raises ModelError if it is missing or malformed.
    """
    path = folder / "tokenizer.json"
    if folder.is_file() or (not path.is_file() and (folder / sentencepiece_file.NAME).is_file()):
        tokenizer = tokenizer_of(open_gguf(folder)) if folder.is_file() else sentencepiece_file.read_tokenizer(folder)
        return tokenizer, hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    if not path.is_file():  # pipes and devices, which may never end, are not opened
        other = next((name for name in _OTHER_FORMATS if (folder / name).is_file()), None)
        raise ModelError(f"{path} is missing" + (f" (the folder has {other})" if other else "")
                         + "; longdraft reads tokenizer.json and tokenizer.model; give another tokenizer with "
                         f"--tokenizer, or create the file: {_CONVERT}")
    try:
        if (size := path.stat().st_size) > _MAX_FILE:
            raise ValueError(f"the file has {size:,} bytes; allowed: {_MAX_FILE:,}")
        content = path.read_bytes()
        _require_sound(content)
        with translate_panics("it cannot be read"):
            tokenizer = HFTokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for every malformed file
        require_content(path)
        raise ModelError(f"{path} is not a valid tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None
    if changes := add_tokens(tokenizer, beside or SideFiles(folder)):
        content += json.dumps(changes).encode()
    return tokenizer, hashlib.sha256(content).hexdigest()


def _require_sound(content: bytes) -> None:
    """Raise ValueError for a tokenizer.json that would end the process inside the library: a table of normalised
    characters that claims gigabytes, or merges whose second part is cut within a character."""
    if not _TRUSTED.search(content):
        return
    data = json.loads(content)
    normalizer, model = (data.get(name) for name in ("normalizer", "model")) if isinstance(data, dict) else (None, None)
    if isinstance(model, dict) and model.get("type", "BPE") == "BPE" and model.get("continuing_subword_prefix"):
        raise ValueError("it has a continuing_subword_prefix, which longdraft supports for WordPiece only")
    parts = [normalizer]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        table = part.get("precompiled_charsmap") if isinstance(part, dict) else None
        if isinstance(table, str):
            numbers = base64.b64decode(table)
            if (claimed := int.from_bytes(numbers[:4], "little")) > len(numbers):
                raise ValueError(f"its precompiled_charsmap claims {claimed:,} bytes and has {len(numbers):,}")


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Hash of the tokens and their ids. Files that are trained for a model record it."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def require_ids_in_vocabulary(vocabulary: Mapping[str, int], vocab_size: int, folder: Path) -> None:
    """ModelError if many tokens of a vocabulary have ids that the model in `folder` has no row for.

    A few are accepted, such as the one of image input that Gemma 3 1B lacks. Prompts with them are refused.
    """
    missing = sum(i >= vocab_size for i in vocabulary.values())
    if missing >= _MANY_MISSING:
        raise ModelError(f"the tokenizer in {folder} has ids up to {max(vocabulary.values())}, and the model has a "
                         f"vocabulary of {vocab_size}, which lacks {missing} of them; give a folder whose tokenizer "
                         "and model belong together")


def require_same_vocabulary(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise UsageError unless both have the same tokens and ids. name: the draft model, for the message."""
    first, second = target.vocabulary(), draft.vocabulary()
    if first == second:
        return
    differing = sorted((token for token in first.keys() | second.keys() if first.get(token) != second.get(token)),
                       key=lambda token: first.get(token, second.get(token, 0)))
    shown = ", ".join(f"{token!r} is {first.get(token, 'missing')} in the target and {second.get(token, 'missing')} in "
                      "the draft model" for token in differing[:_MAX_LISTED])
    raise UsageError(f"draft model {name!r} has another vocabulary than the target, {len(differing)} tokens differ: "
                     f"{shown}; choose a draft model with the same tokenizer")


class IncrementalDecoder:
    """Decodes token by token, and holds tokens back while they may end in the middle of a character.

    The results of `push` and the final `flush`, joined, are the decoded text; only a character that is cut at the end
    may differ. The work per token is bounded: the latest tokens are decoded again with each new one, because decoders
    treat the first token of a text differently (they drop the space before it).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._emitted: list[int] = []
        self._pending: list[int] = []
        self._num_emitted = 0  # characters of `_emitted + _pending`, decoded, that were returned

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        if self._tokenizer.is_silent(token):  # it would make the next token the first of a text
            return ""
        self._pending.append(token)
        if token in self._tokenizer.byte_fallbacks:  # one invalid byte changes the whole run of bytes: wait for its end
            return ""
        text = self._tokenizer.decode(self._emitted + self._pending)
        is_whole = not text.endswith(_REPLACEMENT)  # otherwise later bytes may complete the last character
        new = text[self._num_emitted : len(text) if is_whole else -1]
        if is_whole:
            self._num_emitted = (self._tokenizer.characters(token) if len(self._pending) == 1
                                 else len(self._tokenizer.decode(self._pending)))
            self._emitted, self._pending = self._pending, []
        elif len(self._pending) > _MAX_PENDING:  # not a character; the first byte of one may be among the last four
            self._emitted, self._pending = [], self._pending[-_MAX_CHARACTER:]
            self._num_emitted = len(self._tokenizer.decode(self._pending)) - 1
        else:
            self._num_emitted += len(new)
        return new

    def copy(self) -> IncrementalDecoder:
        """A decoder in the same state."""
        other = IncrementalDecoder(self._tokenizer)
        other._emitted = [*self._emitted]
        other._pending = [*self._pending]
        other._num_emitted = self._num_emitted
        return other

    def flush(self) -> str:
        """The text held back, at the end of the tokens. An incomplete character at its end is dropped if possible."""
        held, self._pending = self._pending, []
        for cut in range(min(_MAX_CHARACTER, len(held) + 1)):
            text = self._tokenizer.decode(self._emitted + held[: len(held) - cut])
            if not text.endswith(_REPLACEMENT):
                return text[self._num_emitted :]
        return self._tokenizer.decode(self._emitted + held)[self._num_emitted :]


class StopText:
    """Finds stop texts in a stream of text. Holds back what may be the beginning of one.

    The text ends where the first stop text is complete; of several that are complete there, the longest counts. Each
    character takes constant time on average, however many stop texts there are (Aho and Corasick 1975).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._states = stop_states(tuple(stops))
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text to emit, and whether a stop text was found. The stop text and what follows are dropped."""
        states, state = self._states, self._state
        if len(states.depths) == 1:
            return text, False
        for count, letter in enumerate(text, 1):
            state = states.after(state, letter)
            if length := states.stop_lengths[state]:
                emitted = (self._held + text[:count])[:-length]
                self._state, self._held = 0, ""
                return emitted, True
        text = self._held + text
        depth = states.depths[state]
        self._state, self._held = state, text[len(text) - depth :]
        return text[: len(text) - depth], False

    def flush(self) -> str:
        """The text held back, at the end of the stream or while stop texts do not apply yet."""
        held, self._held = self._held, ""
        self._state = 0
        return held


class StopStates:
    """What a text so far may be the beginning of, for some stop texts. State 0 is the start.

    A state is the longest end of the text that begins a stop text. Its fields are arrays, because 200,000 objects would
    take hundreds of megabytes, and seconds of each collection of garbage.

    depths        length of that end in characters
    fallbacks     the state of the next shorter such end
    stop_lengths  length of the longest stop text that ends here; 0: none does
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes time in proportion to the length of the texts."""
        self.depths, self.fallbacks, self.stop_lengths = array("i", [0]), array("i", [0]), array("i", [0])
        self._next: dict[int, int] = {}  # state x _LETTERS + letter -> state
        levels: list[array[int]] = []  # by depth - 1, the states and how each is reached: keys of `_next`
        for stop in stops:
            state = 0
            for depth, letter in enumerate(stop, 1):
                key = state * _LETTERS + ord(letter)
                if (following := self._next.get(key)) is None:
                    following = self._next[key] = len(self.depths)
                    self.depths.append(depth)
                    self.fallbacks.append(0)
                    self.stop_lengths.append(0)
                    if len(levels) < depth:
                        levels.append(array("q"))
                    levels[depth - 1].append(key)
                state = following
            self.stop_lengths[state] = len(stop)
        for level in levels:  # shorter states come first, and fallbacks are shorter
            for key in level:
                before, state = key // _LETTERS, self._next[key]
                fallback = self.after(self.fallbacks[before], chr(key % _LETTERS)) if before else 0
                self.fallbacks[state] = fallback
                self.stop_lengths[state] = self.stop_lengths[state] or self.stop_lengths[fallback]

    def after(self, state: int, letter: str) -> int:
        """The state after one more character of the text."""
        code = ord(letter)
        while (following := self._next.get(state * _LETTERS + code)) is None and state:
            state = self.fallbacks[state]
        return following or 0


def stop_states(stops: tuple[str, ...]) -> StopStates:
    """The states of stop texts. The texts of one request, which have the same ones, share them."""
    if (known := _STATES.get(stops)) is None:
        known = _STATES[stops] = StopStates(stops)
    return known


_STATES: WeakValueDictionary[tuple[str, ...], StopStates] = WeakValueDictionary()
