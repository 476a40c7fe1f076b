"""Structured output: at every node of a draft tree, the tokens that a grammar allows after the node's path.

    rules = GrammarRules.compile(("json", schema), new_tokenizer(tokenizer_json, vocabulary, eos), eos_ids, vocabulary)
    text = Grammar(rules)
    text.mask(context, path)      # [V] bool: the tokens that may follow

The grammar covers the new text from its first token on, or after a text such as </think>. The end of the text is
possible only where the grammar is complete. The engine is llguidance (https://github.com/guidance-ai/llguidance; extra
`structured`).

A grammar is untrusted code: `GrammarCompiler` compiles it in a child process with limits, and this process does so
only when the child has survived that. The masks of a compiled grammar take bounded time and no deep stack.

    Illegal guesses are removed before the forward, so they cost nothing.
    Forced tokens: where the grammar leaves one way to go on, its tokens are free drafts; their source is "grammar".
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import UsageError, missing_extra
from longdraft.request.context import Context
from longdraft.request.structured import Structure
from longdraft.request.tools import closed_schema
from longdraft.request.tree import Tree
from longdraft.system.limited import LimitedProcess, LimitError, on_large_stack

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]  # [V]: the tokens that are allowed
FORCED = "grammar"  # the source of forced tokens in the statistics
_TAG = re.compile(r"<[^<>\s]+>")
GAP = "\0"  # for `after`: the grammar begins with at most two blanks or line breaks, which may follow a thought
# For `after`: the header of an answer in OpenAI's harmony format, with messages of other channels before it, or behind
# the end of a thought. Its markers are tokens of their own.
HEADER, HEADER_ONLY = "<|channel|>final<|message|>", "\1"
_MAX_FORCED_BYTES = 1 << 16  # that a grammar may demand from its first token on: each step would tokenise them
_MAX_KEPT_CHARACTERS = 1 << 24  # of grammars whose results are kept; the texts of a server's queue have fewer
MATCHER_BYTES = 160 << 20  # memory of a text's matcher, about: 250,000 states of the lexer, its limit, take 133 MB
_MAX_WARNINGS = 16  # about one grammar: replies have them
_OVERHEAD = 4096  # of a result, in characters
_HEAVY_S = 0.02  # that the beginning of a text takes, from which on its tokens may take long, too
_MISMATCH = "satisfy the grammar"  # in the engine's message about a token that is not allowed
_NOTHING = "no text matches it"
_WHITESPACE = r"[ \n]{0,2}"  # between the parts of JSON: unbounded white space can go on for ever


def version() -> str:
    """The version of llguidance. UsageError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise missing_extra("structured output", "llguidance", "structured", name="structured_outputs") from error
    return str(llguidance.__version__)


def new_tokenizer(tokenizer_json: str, vocabulary: int, eos_token: int) -> LLTokenizer:
    """llguidance's view of a tokenizer, for all texts of a model. Takes seconds for large vocabularies."""
    version()
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=eos_token)


@dataclass(frozen=True)
class GrammarRules:
    """A grammar for one model, which several texts can use.

    grammar     llguidance's own notation
    tokenizer   see `new_tokenizer`
    eos_ids     ids that end the text; the first is the tokenizer's
    vocabulary  number of logits of the model
    warnings    what the engine leaves out of the schemas of functions
    """

    grammar: str
    tokenizer: LLTokenizer
    eos_ids: tuple[int, ...]
    vocabulary: int
    warnings: tuple[str, ...] = ()

    @classmethod
    def compile(cls, structure: Structure, tokenizer: LLTokenizer, eos_ids: tuple[int, ...], vocabulary: int,
                after: str = "", child: LimitedProcess | None = None) -> GrammarRules:
        """UsageError, in one line, for a grammar that cannot be used.

        after  the text that comes before, if any
        child  of the function that `checker` returns: it tries the grammar first; None: there are no limits
        """
        version()
        try:
            grammar = child.call(*structure, after) if child else checked(tokenizer, *structure, after)
        except LimitError as error:
            name, word = _WORDS[structure[0]]
            raise UsageError(f"{name}: the {word} {error}; give a smaller one", name) from None
        except Exception as error:  # the converters raise their own errors for grammars that they cannot read
            line = " ".join(str(error).split())
            name, word = _WORDS[structure[0]]
            raise UsageError(f"{name}: the {word} cannot be used: {line[:300]}", name) from None
        return cls(grammar, tokenizer, eos_ids, vocabulary, _warnings(grammar) if structure[0] == "tools" else ())

    def new_matcher(self) -> LLMatcher:
        """The state at the beginning of a text, with its first mask, which may take far longer than the later ones.

        It is compiled anew: copies of a matcher share the states of its lexer, whose number is limited, so that one
        text could end another one.
        """
        matcher = on_large_stack(lambda: _new_matcher(self.tokenizer, self.grammar))
        matcher.compute_bitmask()
        return matcher

    @cached_property
    def end_only(self) -> Mask:
        """The mask after the end of a text."""
        mask = np.zeros(self.vocabulary, dtype=bool)
        mask[list(self.eos_ids)] = True
        return mask


_WORDS = {kind: ("structured_outputs", word) for kind, word in (
    ("json", "JSON schema"), ("regex", "regular expression"), ("grammar", "grammar"))} | {
        "tools": ("tools", "grammar of the functions")}  # the parameter and the words for it in messages


def checker(tokenizer_json: str, vocabulary: int, eos_token: int) -> Callable[[str, str, str], str]:
    """The function of the child process: `checked` for this tokenizer."""
    tokenizer = new_tokenizer(tokenizer_json, vocabulary, eos_token)
    return lambda kind, text, after: checked(tokenizer, kind, text, after)


def checked(tokenizer: LLTokenizer, kind: str, text: str, after: str) -> str:
    """The grammar in llguidance's own notation, tried out up to its first mask. Any exception if it cannot be used."""
    grammar = _translated(kind, text) if not after else _after_text(after, kind, text, is_token=True)
    matcher = _new_matcher(tokenizer, grammar)
    if after and "unknown special token" in matcher.get_error():
        grammar = _after_text(after, kind, text, is_token=False)
        matcher = _new_matcher(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if problem := _problem(matcher):
        raise ValueError(problem)
    if (forced := len(matcher.compute_ff_bytes())) > _MAX_FORCED_BYTES:
        raise ValueError(f"each text begins with the same {forced:,} bytes; allowed: {_MAX_FORCED_BYTES:,}")
    return grammar


def _warnings(grammar: str) -> tuple[str, ...]:
    """The engine's warnings about a grammar that was checked, each in one line."""
    from llguidance import LLMatcher

    _, warnings = on_large_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    return tuple(dict.fromkeys(f"tools: {' '.join(line.split())[:300]}" for line in warnings))[:_MAX_WARNINGS]


def _new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _ended_matcher(tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher that has failed, and refuses every token at once."""
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, "", log_level=0)


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(1)


def _problem(matcher: LLMatcher) -> str:
    """The engine's message about a matcher that has failed, in one line; "" for others."""
    line = " ".join(matcher.get_error().partition("\n<")[0].split())
    return _NOTHING if line == "NoExtensionBias" else line


def _translated(kind: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json":
        return str(LLMatcher.grammar_from_json_schema(_schema(text), overrides={"whitespace_pattern": _WHITESPACE}))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "tools":
        return str(LLMatcher.grammar_from_lark(text))
    return str(LLMatcher.grammar_from_lark(any_to_lark(text)))


def _schema(text: str) -> dict[str, Any]:
    """The JSON schema, as an object whose objects are closed."""
    schema = json.loads(text)  # its message names the place
    if schema is False:
        raise ValueError(_NOTHING)
    if schema is not True and not isinstance(schema, dict):
        raise ValueError(f"it is {text[:80]}; allowed: an object, or true")
    return {} if schema is True else dict(closed_schema(schema))


def _after_text(after: str, kind: str, text: str, *, is_token: bool) -> str:
    """The grammar of free text, `after`, and then what the structure allows, in Lark's notation. GAP: only the last.
    HEADER, HEADER_ONLY: the channels of an answer.

    is_token: the tokenizer has one token for `after`, as for </think>; llguidance does not match it as text then.
    """
    from llguidance import LLMatcher

    if after in (HEADER, HEADER_ONLY):
        begin = '<|start|> "assistant"'
        before = f"({begin})?" if after == HEADER_ONLY else "message*"
        message = f"message: <|channel|> OTHER <|message|> TEXT? <|end|> {begin}\nOTHER: /analysis|commentary/\n" + (
            "TEXT: /(.|\\n)*/\n")
        return str(LLMatcher.grammar_from_lark(
            f'start: {before} <|channel|> "final" <|message|> structure\n{message if after == HEADER else ""}'
            f"structure: {embedded(kind, text)}\n"))
    free = f"free: /(.|\\n)*/ {after}" if is_token and _TAG.fullmatch(after) else (
        f"free[suffix={json.dumps(after)}]: /(.|\\n)*/")
    start = "start: body\n" if after == GAP else f"start: free body\n{free}\n"
    return str(LLMatcher.grammar_from_lark(f"{start}body: BLANK? structure\n"
                                           f"BLANK: /[ \\n]{{1,2}}/\nstructure: {embedded(kind, text)}\n"))


def embedded(kind: str, text: str) -> str:
    """A structure as a part of a grammar, in Lark's notation. Any exception if it cannot be read."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json":
        schema = _schema(text)
        options = {"whitespace_pattern": _WHITESPACE} | schema.get("x-guidance", {})
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    if kind == "regex":
        return f"/{regex_to_lark(text, use_ascii='')}/"  # slashes and line breaks are escaped, once
    return f"%lark {{\n{text if kind == 'tools' else any_to_lark(text)}\n}}"


class GrammarCompiler:
    """The grammars of one model. Each is checked once, and the latest results are kept.

    Any thread may call it. A grammar that is known waits for no other one.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocabulary: int, eos_ids: tuple[int, ...]) -> None:
        """tokenizer_json returns the tokenizer.json; see `GrammarRules` for the others."""
        self._json, self._vocabulary, self._eos_ids = tokenizer_json, vocabulary, eos_ids
        self._child = LimitedProcess(__name__, "checker", lambda: (tokenizer_json(), vocabulary, eos_ids[0]))
        self._compiling = threading.Lock()
        self._changing = threading.Lock()  # guards the next field
        self._kept: OrderedDict[tuple[Structure, str], GrammarRules | UsageError] = OrderedDict()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        self._child.start()  # it makes a tokenizer at the same time
        return new_tokenizer(self._json(), self._vocabulary, self._eos_ids[0])

    def is_known(self, structure: Structure, after: str) -> bool:
        """Whether `rules` answers at once."""
        return self._known((structure, after)) is not None

    def rules(self, structure: Structure, after: str = "") -> GrammarRules:
        """The rules of a grammar. UsageError, in one line, for one that cannot be used."""
        key = structure, after
        if (result := self._known(key)) is None:
            with self._compiling:
                result = self._known(key) or self._compile(key)
        if isinstance(result, UsageError):
            raise UsageError(str(result), result.name)
        return result

    def _known(self, key: tuple[Structure, str]) -> GrammarRules | UsageError | None:
        with self._changing:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _compile(self, key: tuple[Structure, str]) -> GrammarRules | UsageError:
        structure, after = key
        result: GrammarRules | UsageError
        try:
            result = GrammarRules.compile(structure, self._tokenizer, self._eos_ids, self._vocabulary, after,
                                          self._child)
        except UsageError as error:
            result = error.with_traceback(None)
        with self._changing:
            self._kept[key] = result
            while sum(_OVERHEAD + len(text) for (_, text), _ in self._kept) > _MAX_KEPT_CHARACTERS:
                self._kept.popitem(last=False)
        return result


class Grammar:
    """The state of one text. It follows the text and walks draft trees from its end."""

    def __init__(self, rules: GrammarRules) -> None:
        self._rules = rules
        began = time.perf_counter()
        self._matcher = rules.new_matcher()
        is_heavy = time.perf_counter() - began > _HEAVY_S
        self._companion = _ended_matcher(rules.tokenizer) if is_heavy else None
        self._num_seen = 0  # new tokens
        self.has_begun = True
        self._is_ended = False
        self._walked: tuple[Tree, int, list[Mask | None]] | None = None

    @property
    def vocabulary(self) -> int:
        """Number of logits of the model."""
        return self._rules.vocabulary

    def wait(self) -> None:
        """Cover nothing before `begin`."""
        self.has_begun = False

    def begin(self, num: int) -> None:
        """Cover the text from its first `num` new tokens on."""
        self._num_seen, self.has_begun = num, True

    def mask(self, context: Context, path: Sequence[int]) -> Mask | None:
        """The tokens that may follow the text and `path`; None where the path itself is not allowed."""
        self._update(context)
        mask: Mask | None = self._mask()
        consumed = 0
        for token in path:
            if mask is None or not mask[token]:
                mask = None
                break
            if token in self._rules.eos_ids or self._is_ended:
                mask = self._rules.end_only
                break
            self._consume(token)
            consumed += 1
            mask = self._mask()
        self._matcher.rollback(consumed)
        return mask

    def survives(self, context: Context, tokens: Sequence[int]) -> bool:
        """Whether the text can go on under the grammar after these tokens, which are not chosen under it."""
        self._update(context)
        trial = self._matcher.deep_copy()
        for token in tokens:
            trial.consume_token(token)
        return not trial.is_error()

    def masks(self, tree: Tree, context: Context) -> list[Mask | None]:
        """The tokens that may follow each node; None for nodes that are not allowed themselves."""
        if self._walked and self._walked[0] is tree and self._walked[1] == len(context):
            return self._walked[2]
        self._update(context)
        masks = self.walk(tree)
        self._walked = tree, len(context), masks
        return masks

    def walk(self, tree: Tree) -> list[Mask | None]:
        """As `masks`, from the state that has been reached, which is that of the root."""
        children: list[list[int]] = [[] for _ in tree.tokens]
        for node in range(1, len(tree)):
            children[tree.parents[node]].append(node)
        masks: list[Mask | None] = [None] * len(tree)

        def walk(node: int) -> None:
            mask = masks[node] = self._mask()
            for child in children[node]:
                token = tree.tokens[child]
                if not mask[token]:
                    continue
                if self._is_ended or token in self._rules.eos_ids:
                    masks[child] = self._rules.end_only
                    continue
                self._consume(token)
                walk(child)
                self._matcher.rollback(1)

        walk(0)
        return masks

    def extended(self, tree: Tree, context: Context, max_depth: int) -> Tree:
        """A tree of allowed nodes with the forced tokens after its leaves. See `Tree.extended`."""
        self._update(context)

        def forced(leaf: int) -> Sequence[int]:
            path = [tree.tokens[node] for node in tree.path(leaf)[1:]]
            if self._is_ended or any(token in self._rules.eos_ids for token in path):
                return ()
            for token in path:
                self._consume(token)
            tokens: list[int] = self._matcher.compute_ff_tokens()
            self._matcher.rollback(len(path))
            return tokens

        return tree.extended(forced, max_depth, FORCED)

    def _update(self, context: Context) -> None:
        """Follow the tokens that the text has gained."""
        if not self.has_begun:
            return
        new = context.slice(context.prompt_length + self._num_seen, len(context)).tolist()
        self._num_seen += len(new)
        for token in new:
            self._is_ended = self._is_ended or token in self._rules.eos_ids
            if not self._is_ended:
                self._consume(token)

    def _consume(self, token: int) -> None:
        """UsageError where the grammar does not allow it: the text was written with another one.

        A token of a heavy grammar may take 40 ms. llguidance leaves the interpreter to other threads only where it is
        given the tokens of several matchers, which takes 80 microseconds more.
        """
        if self._companion is None:
            is_allowed = self._matcher.consume_token(token)
        else:
            is_allowed, _ = _executor().consume_token_par([(self._matcher, token), (self._companion, token)])
        if not is_allowed:
            self._require_no_problem()

    def _mask(self) -> Mask:
        """The tokens that may come next. Only the end of the text may follow a complete text."""
        if self._is_ended:
            return self._rules.end_only
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask: Mask = np.unpackbits(packed, bitorder="little")[: self._rules.vocabulary].astype(bool)
        self._require_no_problem()
        if len(self._rules.eos_ids) > 1:
            mask[list(self._rules.eos_ids)] = mask[self._rules.eos_ids[0]]
        return mask

    def _require_no_problem(self) -> None:
        """UsageError if the matcher has failed: at the text, or at one of the engine's limits."""
        if self._matcher.is_error():
            problem = _problem(self._matcher)
            raise UsageError(
                "the text does not match structured_outputs, so it cannot be continued" if _MISMATCH in problem
                else f"structured_outputs cannot be followed: {problem[:200]}", "structured_outputs")
