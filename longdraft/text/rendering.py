"""The work of a chat template, which is untrusted code of the model: jinja's sandbox, for a child process with limits.

    child = LimitedProcess("longdraft.text.rendering", "renderer")
    child.call(source, {"messages": messages, ...})    # the prompt
    child.call(source, None)                           # the variables that the template reads, one a line

longdraft/text/chat_template.py has the templates of models. This module imports nothing but jinja.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def renderer() -> Callable[[str, Mapping[str, Any] | None], str]:
    """The function of the child process. It raises any error of the template, and RefusedError."""
    environment = new_environment()

    @lru_cache(maxsize=8)
    def compiled(source: str) -> Template:
        return environment.from_string(source)

    def render(source: str, variables: Mapping[str, Any] | None) -> str:
        if variables is None:
            return "\n".join(sorted(meta.find_undeclared_variables(environment.parse(source))))
        return compiled(source).render(variables)

    return render


def new_environment() -> ImmutableSandboxedEnvironment:
    """Jinja's sandbox with what `transformers` adds to it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class RefusedError(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training. It has no effect on rendering."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as a mutable attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise RefusedError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON without escapes for HTML, which jinja's own filter adds and models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
