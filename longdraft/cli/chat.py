"""`longdraft chat`: a conversation in the terminal. Answers go to stdout, thinking and everything else to stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from longdraft.cli import options
from longdraft.cli.options import FILES, OptionValues, engine_options, option, sampling_options, with_option_groups
from longdraft.engine.settings import CACHE_RAM, LOADING
from longdraft.errors import OutputError, UsageError, check
from longdraft.request.sampling_params import SamplingParams
from longdraft.system.console import Interrupt, Interrupted, replace_unencodable, stdout_lost
from longdraft.system.files import OutputFile, require_text

if TYPE_CHECKING:
    from longdraft.engine.engine import Engine
    from longdraft.engine.generation import Generation
    from longdraft.text.thinking import AnswerFormat

_HELP = """\
/help        show this list
/reset       forget the conversation, except the system prompt
/save FILE   write the conversation to a JSON file
/quit        leave, like Ctrl-D
End a line with \\ to continue on the next one. Start a message with // to send a /. Ctrl-C stops an answer."""


@with_option_groups
def chat(
    system: Annotated[str | None, option("System prompt.", FILES)] = None,
    chat_option: options.ChatOption = None,
    stats: Annotated[bool, option("Print a summary of each answer on stderr, if that is a terminal. It is always "
                                  "printed if stdin is a terminal too.", FILES, "--stats")] = False,
    reasoning_format: Annotated[str, option("The model's thinking, if it marks it: auto: on stderr (with --quiet, "
                                            "nowhere), apart from the answer; none: on stdout as it is written.",
                                            FILES)] = "auto",
    quiet: options.Quiet = False,
    *,
    loading: Annotated[OptionValues, engine_options((*LOADING, CACHE_RAM))],
    sampling: Annotated[OptionValues, sampling_options(
        without=("min_new_tokens", "logit_bias", "ignore_eos", "on_loop"),
        max_new_tokens=dict(help="Maximum number of tokens per answer.", default=4096))],
) -> int:
    """Chat with a model that has a chat template. Messages are lines of stdin; /help lists the commands."""
    SamplingParams.from_names(sampling)  # fail before the model is loaded
    check(reasoning_format in ("auto", "none"), "--reasoning-format", reasoning_format, "auto or none")
    require_text(system or "", "--system", "give it in UTF-8")
    chat_options = options.chat_options(chat_option or ())
    from longdraft.cli.display import load_with_bar
    from longdraft.text.thinking import find_format

    engine = load_with_bar(loading, quiet=quiet)
    params = engine.params(**sampling)
    form = find_format(engine.tokenizer) if reasoning_format == "auto" else None
    effort = engine.effort(params, chat_options)
    params = effort.applied(params)
    conversation = Conversation(engine, params, system, effort.variables, form)
    conversation.prompt("Hello")  # fail before the first message without a template, or for an unknown option
    options.print_model_defaults(params, quiet=quiet)
    replace_unencodable()
    return _loop(conversation, stats or sys.stdin.isatty(), quiet)


@dataclass
class Conversation:
    """The messages so far, and the generation of the next answer.

    form  how answers show their thinking; None: all of an answer is its content
    """

    engine: Engine
    params: SamplingParams
    system: str | None
    options: dict[str, Any]
    form: AnswerFormat | None
    turns: list[dict[str, str]] = field(default_factory=list)
    written: tuple[str, list[int]] = ("", [])  # the last prompt and its answer, as text and as token ids

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def prompt(self, message: str) -> str:
        """The conversation and one more user message, in the chat template."""
        return self.engine.tokenizer.chat([*self.messages, {"role": "user", "content": message}], **self.options)

    def ask(self, prompt: str, on_prefill: Callable[[int, int], None]) -> Generation:
        """Start the answer to a prompt, limited by the room in the context."""
        ids = self._ids(prompt)
        room = self.engine.model.config.max_positions - len(ids)
        if room < 1:
            raise UsageError(f"the conversation has {len(ids)} tokens, the model's context limit is "
                             f"{self.engine.model.config.max_positions}; /reset starts again")
        params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))
        return self.engine.generate(ids, params, on_prefill=on_prefill)

    def _ids(self, prompt: str) -> list[int]:
        """The prompt's token ids. What the model wrote keeps its ids, so its rows are found in the prefix tree: the
        tokenizer might cut the same text otherwise."""
        tokenizer, (text, known) = self.engine.tokenizer, self.written
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        if text and prompt.startswith(text):
            kept = known + tokenizer.encode(prompt[len(text) :], add_special_tokens=False)
            if tokenizer.decode(kept) == tokenizer.decode(ids):
                return kept
        return ids

    def remember(self, message: str, answer: AnswerDisplay, prompt: str, generation: Generation) -> None:
        thinking = {"reasoning_content": answer.thinking.rstrip("\n")} if answer.thinking else {}
        self.turns += [{"role": "user", "content": message},
                       {"role": "assistant", **thinking, "content": answer.content.rstrip("\n")}]
        tokens = generation.tokens.tolist()
        if generation.finish_reason == "eos":
            del tokens[-1:]
        self.written = prompt + self.engine.tokenizer.decode(tokens), [*generation.prompt, *tokens]


def _loop(conversation: Conversation, stats: bool, quiet: bool) -> int:
    """Answer messages until the input ends; returns the exit status. An error ends a script, not a typed session."""
    is_typed = sys.stdin.isatty()
    if is_typed and not quiet:
        _print("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            message = _read(is_typed)
            if message is None or message.split()[:1] in (["/quit"], ["/exit"]):
                return 0
            if message.startswith("/") and not message.startswith("//"):
                _command(conversation, message)
            elif message.strip() and (status := _answer(conversation, message.removeprefix("/"), stats, quiet)):
                return status
        except (UsageError, OutputError) as error:
            if not is_typed:
                raise
            _print(str(error))
        except KeyboardInterrupt:
            if not is_typed:
                raise
            _print("\npress Ctrl-D or enter /quit to leave")


def _read(is_typed: bool) -> str | None:
    """The next message, of one line or several; None at the end of the input."""
    lines: list[str] = []
    while True:
        if is_typed:
            print("... " if lines else "> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin is not UTF-8 text (byte {error.start}); convert it first") from error
        if not line:
            return "\n".join(lines) if lines else None
        require_text(line, "stdin", "convert it first")
        line = line.rstrip("\r\n")
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _command(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/help":
        print(_HELP, file=sys.stderr)
    elif name == "/reset":
        conversation.turns.clear()
        conversation.written = "", []
    elif name == "/save" and rest.strip():
        file = OutputFile(Path(os.path.expanduser(rest.strip())), "/save")
        try:
            file.write((json.dumps({"messages": conversation.messages}, indent=2, ensure_ascii=False) + "\n").encode())
            file.finish()
        finally:
            file.abandon()
    else:
        raise UsageError(f"the command is {line!r}; allowed: /help, /reset, /save FILE, /quit; start with // to "
                         "send a /")


def _answer(conversation: Conversation, message: str, stats: bool, quiet: bool) -> int:
    """Stream the answer to a message and remember both. Returns an exit status that ends the program if it is not 0."""
    try:
        return _stream(conversation, message, stats, quiet)
    except OSError as error:
        return stdout_lost(error)


class AnswerDisplay:
    """Shows an answer while it is written, and collects its parts. opened: what the template has already written of it

    A `quiet` display shows no thinking.
    """

    def __init__(self, form: AnswerFormat | None, prompt: Sequence[int], opened: str, *, quiet: bool) -> None:
        self._reader = form.reader(prompt) if form else None
        self._quiet = quiet
        self._opened = opened if form is None else ""
        self.thinking = self.content = ""
        self._show("", self._opened)

    @property
    def is_empty(self) -> bool:
        return not self.thinking and self.content.rstrip("\n") == self._opened.rstrip("\n")

    def show(self, tokens: Sequence[int], text: str) -> None:
        self._show(*self._reader.push(tokens, text) if self._reader else ("", text))

    def finish(self) -> None:
        if self._reader:
            self._show(*self._reader.finish())
        if not self.content:
            self._end_thinking()
        self._write("" if self.content.endswith("\n") else "\n")

    def _show(self, thinking: str, content: str) -> None:
        if thinking and not self._quiet:
            sys.stderr.write(thinking if self.thinking else f"Thinking:\n{thinking}")
            sys.stderr.flush()
        self.thinking += thinking
        if content and not self.content:
            self._end_thinking()
        self.content += content
        self._write(content)

    def _end_thinking(self) -> None:
        """An empty line before the answer."""
        if self.thinking and not self._quiet:
            sys.stderr.write("\n\n")
            sys.stderr.flush()

    def _write(self, content: str) -> None:
        sys.stdout.write(content)
        sys.stdout.flush()


def _stream(conversation: Conversation, message: str, stats: bool, quiet: bool) -> int:
    from longdraft.cli.stream import show_summary
    from longdraft.text.thinking import opened_thinking

    prompt = conversation.prompt(message)
    with Interrupt() as interrupt:
        generation = conversation.ask(prompt, lambda done, total: interrupt.check())
        answer = AnswerDisplay(conversation.form, generation.prompt, opened_thinking(prompt), quiet=quiet)
        try:
            for event in generation:
                answer.show(event.tokens, event.text)
                interrupt.check()
        except Interrupted:
            generation.close()
            answer.show((), generation.stream.flush())
    answer.finish()
    if not answer.is_empty:
        conversation.remember(message, answer, prompt, generation)
    if stats:
        show_summary(generation, quiet=quiet)
    return 128 + interrupt.number if interrupt.number == signal.SIGTERM else 0


def _print(text: str) -> None:
    print(text, file=sys.stderr)
