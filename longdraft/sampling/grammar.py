"""Structured output: at every node of a draft tree, the tokens that a grammar allows after the node's path.

    rules = GrammarRules.compile(("json", schema), new_tokenizer(tokenizer_json, vocabulary, eos), eos_ids, vocabulary)
    text = Grammar(rules)
    text.mask(context, path)      # [V] bool: the tokens that may follow

The grammar covers the new text from its first token on, or after a text such as </think>. The end of the text is
possible only where the grammar is complete. The engine is llguidance (https://github.com/guidance-ai/llguidance; extra
`structured`).

    Illegal guesses are removed before the forward, so they cost nothing.
    Forced tokens: where the grammar leaves one way to go on, its tokens are free drafts; their source is "grammar".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import UsageError
from longdraft.request.context import Context
from longdraft.request.structured import Structure
from longdraft.request.tree import Tree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]  # [V]: the tokens that are allowed
FORCED = "grammar"  # the source of forced tokens in the statistics
_MAX_FORCED = 32  # forced tokens that a step adds to a tree at most
_TAG = re.compile(r"<[^<>\s]+>")
_WHITESPACE = r"[ \n]{0,2}"  # between the parts of JSON: unbounded white space can go on for ever


def version() -> str:
    """The version of llguidance. UsageError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("structured output needs llguidance; install it with: pip install 'longdraft[structured]'",
                         "structured_outputs") from error
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
    """

    grammar: str
    tokenizer: LLTokenizer
    eos_ids: tuple[int, ...]
    vocabulary: int

    @classmethod
    def compile(cls, structure: Structure, tokenizer: LLTokenizer, eos_ids: tuple[int, ...], vocabulary: int,
                after: str = "") -> GrammarRules:
        """UsageError, in one line, for a grammar that cannot be used. after: the text that comes before, if any."""
        version()
        from llguidance import LLMatcher

        try:
            grammar = _translated(*structure) if not after else _after_text(after, *structure, is_token=True)
            problem = LLMatcher.validate_grammar(grammar, tokenizer)
            if after and problem.find("unknown special token") >= 0:
                grammar = _after_text(after, *structure, is_token=False)
                problem = LLMatcher.validate_grammar(grammar, tokenizer)
        except Exception as error:  # the converters raise their own errors for grammars that they cannot read
            problem = str(error)
        if problem:
            line = " ".join(problem.split())
            raise UsageError(f"structured_outputs: the {_WORDS[structure[0]]} cannot be used: {line[:300]}",
                             "structured_outputs")
        return cls(grammar, tokenizer, eos_ids, vocabulary)

    @cached_property
    def end_only(self) -> Mask:
        """The mask after the end of a text."""
        mask = np.zeros(self.vocabulary, dtype=bool)
        mask[list(self.eos_ids)] = True
        return mask


_WORDS = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def _translated(kind: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json":
        json.loads(text)  # its message names the place
        return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE}))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    return str(LLMatcher.grammar_from_lark(any_to_lark(text)))


def _after_text(after: str, kind: str, text: str, *, is_token: bool) -> str:
    """The grammar of free text, `after`, and then what the structure allows, in Lark's notation.

    is_token: the tokenizer has one token for `after`, as for </think>; llguidance does not match it as text then.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json":
        schema = json.loads(text)
        limits = {"whitespace_pattern": _WHITESPACE}
        own = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        body = f"%json {json.dumps({**own, 'x-guidance': limits | own.get('x-guidance', {})})}"
    elif kind == "regex":
        body = "/" + text.replace("/", r"\/").replace("\n", r"\n") + "/"
    else:
        body = f"%lark {{\n{any_to_lark(text)}\n}}"
    free = f"free: /(.|\\n)*/ {after}" if is_token and _TAG.fullmatch(after) else (
        f"free[suffix={json.dumps(after)}]: /(.|\\n)*/")
    return str(LLMatcher.grammar_from_lark(f"start: free body\n{free}\nbody: BLANK? structure\n"
                                           f"BLANK: /[ \\n]{{1,2}}/\nstructure: {body}\n"))


class Grammar:
    """The state of one text. It follows the text and walks draft trees from its end."""

    def __init__(self, rules: GrammarRules) -> None:
        from llguidance import LLMatcher

        self._rules = rules
        self._matcher: LLMatcher = LLMatcher(rules.tokenizer, rules.grammar)
        self._num_seen = 0  # new tokens
        self._is_ended = False
        self._walked: tuple[Tree, int, list[Mask | None]] | None = None

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

    def masks(self, tree: Tree, context: Context) -> list[Mask | None]:
        """The tokens that may follow each node; None for nodes that are not allowed themselves."""
        if self._walked and self._walked[0] is tree and self._walked[1] == len(context):
            return self._walked[2]
        self._update(context)
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
        self._walked = tree, len(context), masks
        return masks

    def extended(self, tree: Tree, context: Context, max_depth: int) -> Tree:
        """A tree of allowed nodes with the forced tokens after its leaves, within `max_depth`. New nodes are last."""
        self._update(context)
        tokens, parents, sources = list(tree.tokens), list(tree.parents), list(tree.sources)
        inner = set(tree.parents)
        for leaf in range(len(tree)):
            path = [tree.tokens[node] for node in tree.path(leaf)[1:]]
            if leaf in inner or self._is_ended or any(token in self._rules.eos_ids for token in path):
                continue
            for token in path:
                self._consume(token)
            room = min(max_depth - len(path), len(tree) + _MAX_FORCED - len(tokens))
            forced = self._matcher.compute_ff_tokens()[: max(0, room)]
            self._matcher.rollback(len(path))
            parent = leaf
            for token in forced:
                tokens.append(token)
                parents.append(parent)
                sources.append(FORCED)
                parent = len(tokens) - 1
        return tree if len(tokens) == len(tree) else Tree(tuple(tokens), tuple(parents), tuple(sources))

    def _update(self, context: Context) -> None:
        """Follow the tokens that the text has gained."""
        new = context.slice(context.prompt_length + self._num_seen, len(context)).tolist()
        self._num_seen += len(new)
        for token in new:
            self._is_ended = self._is_ended or token in self._rules.eos_ids
            if not self._is_ended:
                self._consume(token)

    def _consume(self, token: int) -> None:
        """UsageError where the grammar does not allow it: the text was written with another one."""
        if not self._matcher.consume_token(token):
            raise UsageError("the text does not match structured_outputs, so it cannot be continued",
                             "structured_outputs")

    def _mask(self) -> Mask:
        """The tokens that may come next. Only the end of the text may follow a complete text."""
        if self._is_ended:
            return self._rules.end_only
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask: Mask = np.unpackbits(packed, bitorder="little")[: self._rules.vocabulary].astype(bool)
        if self._matcher.is_error():
            line = " ".join(self._matcher.get_error().split())
            raise UsageError(f"structured_outputs cannot be followed: {line[:200]}", "structured_outputs")
        if len(self._rules.eos_ids) > 1:
            mask[list(self._rules.eos_ids)] = mask[self._rules.eos_ids[0]]
        return mask
