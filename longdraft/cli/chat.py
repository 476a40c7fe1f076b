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
from longdraft.request.openai_body import parse_json
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tools import FORM_NAMES, ToolRequest, parse_tools
from longdraft.system.console import Interrupt, Interrupted, replace_unencodable, stdout_lost
from longdraft.system.files import OutputFile, read_text, require_text

if TYPE_CHECKING:
    from longdraft.engine.engine import Engine
    from longdraft.engine.generation import Generation
    from longdraft.request.events import Event
    from longdraft.text.tools.model_tools import ModelTools
    from longdraft.text.tools.reader import Call, Part, ToolAnswers, ToolReader

_HELP = """\
/help        show this list
/reset       forget the conversation, except the system prompt
/save FILE   write the conversation to a JSON file
/quit        leave, like Ctrl-D
End a line with \\ to continue on the next one. Start a message with // to send a /. Ctrl-C stops an answer.
After a call of a function, the next message is its result."""


@with_option_groups
def chat(
    system: Annotated[str | None, option("System prompt.", FILES)] = None,
    chat_option: options.ChatOption = None,
    stats: Annotated[bool, option("Print a summary of each answer on stderr, if that is a terminal. It is always "
                                  "printed if stdin is a terminal too.", FILES, "--stats")] = False,
    reasoning_format: Annotated[str, option("The model's thinking, if it marks it: auto: on stderr (with --quiet, "
                                            "nowhere), apart from the answer; none: on stdout as it is written.",
                                            FILES)] = "auto",
    tools: Annotated[str | None, option("Functions that the model may call: a file with OpenAI's JSON list. None is "
                                        "run: a call is shown, and you type its result.", FILES,
                                        metavar="FILE")] = None,
    tool_form: Annotated[str, option("How the model writes calls, if the chat template does not show it.",
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
    request = _read_tools(tools) if tools is not None else None
    check(tool_form in FORM_NAMES, "--tool-form", tool_form, ", ".join(FORM_NAMES))
    check(request is not None or tool_form == "auto", "--tool-form", tool_form, "auto without --tools")
    from longdraft.cli.display import load_with_bar
    from longdraft.text.tools.model_tools import ModelTools

    engine = load_with_bar(loading, quiet=quiet)
    params = engine.params(**sampling)
    effort = engine.effort(params, chat_options)
    params = effort.applied(params)
    model = ModelTools(engine.tokenizer, engine.loaded.answer_format, tool_form)
    answers = model.answers(request, shows_thinking=reasoning_format == "auto")
    conversation = Conversation(engine, params, system, effort.variables, model, answers)
    first = conversation.prompt(_user("Hello"))  # fail before the first message without a template, an unknown option
    conversation.settings(engine.encode(first))
    options.print_model_defaults(params, quiet=quiet)
    replace_unencodable()
    return _loop(conversation, stats or sys.stdin.isatty(), quiet)


def _read_tools(file: str) -> ToolRequest | None:
    """The functions of a file, each as OpenAI has it, or the function itself."""
    try:
        given = parse_json(read_text(file, "--tools"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--tools: {file} is not valid JSON: {error}", "tools") from None
    if not isinstance(given, list) or not given:
        raise UsageError(f"--tools: {file} has no list of functions; write [{{\"name\": ..., \"parameters\": ...}}]",
                         "tools")
    wrapped = [{"type": "function", "function": each} if isinstance(each, dict) and "function" not in each else each
               for each in given]
    return parse_tools({"tools": wrapped})


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@dataclass
class Conversation:
    """The messages so far, and the generation of the next answer.

    model    how the model calls functions
    answers  how answers show their thinking and calls
    waiting  calls without a result
    """

    engine: Engine
    params: SamplingParams
    system: str | None
    options: dict[str, Any]
    model: ModelTools
    answers: ToolAnswers
    turns: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)  # of the other calls of the last answer
    written: tuple[str, list[int]] = ("", [])  # the last prompt and its answer, as text and as token ids

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns, *self.results]

    def prompt(self, new: list[dict[str, Any]]) -> str:
        """The conversation and new messages, in the chat template."""
        return self.model.prompt([*self.messages, *new], self.answers.tools, self.options)

    def next_messages(self, text: str) -> list[dict[str, Any]] | None:
        """The messages that a text makes; None while other calls wait for their results."""
        if not self.waiting:
            return _user(text)
        self.results.append({"role": "tool", "tool_call_id": self.waiting.pop(0).id, "content": text})
        return None if self.waiting else []

    def forget(self) -> None:
        self.turns.clear()
        self.waiting.clear()
        self.results.clear()
        self.written = "", []

    def ask(self, prompt: str, on_prefill: Callable[[int, int], None]) -> Generation:
        """Start the answer to a prompt, limited by the room in the context."""
        ids = self._ids(prompt)
        room = self.engine.model.config.max_positions - len(ids)
        if room < 1:
            raise UsageError(f"the conversation has {len(ids)} tokens, the model's context limit is "
                             f"{self.engine.model.config.max_positions}; /reset starts again")
        params = replace(self.settings(ids), max_new_tokens=min(self.params.max_new_tokens, room))
        return self.engine.generate(ids, params, on_prefill=on_prefill)

    def settings(self, prompt: Sequence[int]) -> SamplingParams:
        """The settings of an answer to a prompt, with the grammar of calls."""
        return self.model.applied(self.params, self.answers.tools, prompt)

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

    def remember(self, new: list[dict[str, Any]], answer: AnswerDisplay, prompt: str, generation: Generation) -> None:
        thinking = {"reasoning_content": answer.thinking.rstrip("\n")} if answer.thinking else {}
        calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                 for call in answer.calls]
        self.turns += [*self.results, *new, {"role": "assistant", **thinking, "content": answer.content.rstrip("\n"),
                                             **({"tool_calls": calls} if calls else {})}]
        self.waiting, self.results = list(answer.calls), []
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
            message = _read(is_typed, conversation.waiting[0].name if conversation.waiting else "")
            if message is None or message.split()[:1] in (["/quit"], ["/exit"]):
                return 0
            if message.startswith("/") and not message.startswith("//"):
                _command(conversation, message)
            elif message.strip() or conversation.waiting:
                new = conversation.next_messages(message.removeprefix("/"))
                if new is not None and (status := _answer(conversation, new, stats, quiet)):
                    return status
        except (UsageError, OutputError) as error:
            if not is_typed:
                raise
            _print(str(error))
        except KeyboardInterrupt:
            if not is_typed:
                raise
            _print("\npress Ctrl-D or enter /quit to leave")


def _read(is_typed: bool, function: str) -> str | None:
    """The next message, of one line or several; None at the end of the input. function: whose result it is"""
    lines: list[str] = []
    while True:
        if is_typed:
            print("... " if lines else f"{function}> ", end="", file=sys.stderr, flush=True)
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
        conversation.forget()
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


def _answer(conversation: Conversation, new: list[dict[str, Any]], stats: bool, quiet: bool) -> int:
    """Stream the answer to new messages and remember all. Returns an exit status that ends the program if it is not 0.
    """
    try:
        return _stream(conversation, new, stats, quiet)
    except OSError as error:
        return stdout_lost(error)


class AnswerDisplay:
    """Shows an answer while it is written, and collects its parts. A call is one line: the function and its arguments.

    opened  what the template has already written of the answer, and its reader does not divide from it
    quiet   show no thinking
    """

    def __init__(self, reader: ToolReader, opened: str, *, quiet: bool) -> None:
        self._reader, self._quiet, self._opened = reader, quiet, opened
        self.thinking = self.content = ""
        self._begun: list[Call] = []
        self._end = ""  # of the shown answer: its last character
        self._show("", opened)

    @property
    def calls(self) -> list[Call]:
        """The calls that are complete."""
        return [call for call in self._begun if _is_json(call.arguments)]

    @property
    def is_empty(self) -> bool:
        return not self.thinking and not self.calls and self.content.rstrip("\n") == self._opened.rstrip("\n")

    def show(self, event: Event) -> None:
        self._show_parts(self._reader.read([event], is_end=False))

    def finish(self, rest: str) -> None:
        """rest: text that no event had"""
        self._show_parts(self._reader.push((), rest) + self._reader.finish())
        if self._begun:
            self._write(")\n")
        elif not self.content:
            self._end_thinking()
        self._write("" if self._end == "\n" else "\n")

    def _show_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.kind == "call":
                from longdraft.text.tools.reader import Call

                if not self._begun and not self.content:
                    self._end_thinking()
                self._write(")\n" if self._begun else "\n" if self._end not in ("", "\n") else "")
                self._begun.append(Call(part.id, part.text, ""))
                self._write(f"{part.text}(")
            elif part.kind == "arguments":
                self._begun[-1] = self._begun[-1]._replace(arguments=self._begun[-1].arguments + part.text)
                self._write(part.text)
            else:
                self._show(*((part.text, "") if part.kind == "thought" else ("", part.text)))

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
        self._end = content[-1:] or self._end
        sys.stdout.write(content)
        sys.stdout.flush()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _stream(conversation: Conversation, new: list[dict[str, Any]], stats: bool, quiet: bool) -> int:
    from longdraft.cli.stream import show_summary
    from longdraft.text.thinking import opened_thinking

    prompt, answers, rest = conversation.prompt(new), conversation.answers, ""
    with Interrupt() as interrupt:
        generation = conversation.ask(prompt, lambda done, total: interrupt.check())
        reader = answers.reader(generation.prompt, seed=generation.params.seed)
        answer = AnswerDisplay(reader, "" if answers.thinking else opened_thinking(prompt), quiet=quiet)
        try:
            for event in generation:
                answer.show(event)
                interrupt.check()
        except Interrupted:
            generation.close()
            rest = generation.stream.flush()
    answer.finish(rest)
    if not answer.is_empty:
        conversation.remember(new, answer, prompt, generation)
    if stats:
        show_summary(generation, quiet=quiet)
    return 128 + interrupt.number if interrupt.number == signal.SIGTERM else 0


def _print(text: str) -> None:
    print(text, file=sys.stderr)
