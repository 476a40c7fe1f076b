"""`longdraft chat`: a conversation in the terminal. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from longdraft.cli import options
from longdraft.cli.option_groups import Loading, Sampling, with_option_groups
from longdraft.cli.options import FILES, SAMPLING, option
from longdraft.console import Interrupt, Interrupted, replace_unencodable, stdout_lost
from longdraft.core import SamplingParams
from longdraft.errors import OutputError, UsageError
from longdraft.files import OutputFile, require_text

if TYPE_CHECKING:
    from longdraft.engine import Engine
    from longdraft.generation import Generation

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
    quiet: options.Quiet = False,
    *,
    loading: Loading,
    cache_ram: options.CacheRam = None,
    max_new_tokens: Annotated[int, option("Maximum number of tokens per answer.", SAMPLING)] = 4096,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    sampling: Sampling,
) -> int:
    """Chat with a model that has a chat template. Messages are lines of stdin; /help lists the commands."""
    given = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop or None,
             "stop_token_ids": stop_token_id or None, **sampling}
    SamplingParams.from_names(given)  # fail before the model is loaded
    require_text(system or "", "--system", "give it in UTF-8")
    chat_options = options.chat_options(chat_option or ())
    from longdraft.cli.display import load_with_bar

    engine = load_with_bar({**loading, "cache_ram": cache_ram}, quiet=quiet)
    params = engine.params(**given)
    conversation = Conversation(engine, params, system, chat_options)
    conversation.prompt("Hello")  # fail before the first message without a template, or for an unknown option
    options.print_model_defaults(params, quiet=quiet)
    replace_unencodable()
    return _loop(conversation, stats or sys.stdin.isatty(), quiet)


@dataclass
class Conversation:
    """The messages so far, and the generation of the next answer."""

    engine: Engine
    params: SamplingParams
    system: str | None
    options: dict[str, Any]
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

    def remember(self, message: str, answer: str, prompt: str, generation: Generation) -> None:
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
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


def _stream(conversation: Conversation, message: str, stats: bool, quiet: bool) -> int:
    from longdraft.cli.stream import show_summary
    from longdraft.model.chat_template import opened_thinking

    prompt = conversation.prompt(message)
    opened = opened_thinking(prompt)  # the template starts the answer with a thinking tag
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    with Interrupt() as interrupt:
        generation = conversation.ask(prompt, lambda done, total: interrupt.check())
        try:
            show(opened)
            for event in generation:
                show(event.text)
                interrupt.check()
        except Interrupted:
            generation.close()
            show(generation.held_text)
    show("" if "".join(pieces).endswith("\n") else "\n")
    if (answer := "".join(pieces).rstrip("\n")) != opened.rstrip("\n"):
        conversation.remember(message, answer, prompt, generation)
    if stats:
        show_summary(generation, quiet=quiet)
    return 128 + interrupt.number if interrupt.number == signal.SIGTERM else 0


def _print(text: str) -> None:
    print(text, file=sys.stderr)
