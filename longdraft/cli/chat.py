"""`longdraft chat`: a conversation, line by line. Answers go to stdout, everything else to stderr."""

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
from longdraft.cli.options import FILES, SAMPLING, option, parse_pairs
from longdraft.console import Interrupt, Interrupted, any_letter, stdout_lost
from longdraft.core import SamplingParams
from longdraft.errors import OutputError, UsageError
from longdraft.files import OutputFile, require_text

if TYPE_CHECKING:
    from longdraft.engine import Engine
    from longdraft.generation import Generation

_HELP = """\
/help        this list
/reset       forget the conversation (the system prompt stays)
/save FILE   write the conversation to a JSON file
/quit        leave (so does the end of the input, Ctrl-D)
A line that ends in \\ goes on in the next. //text says /text. Ctrl-C stops an answer."""


def chat(
    system: Annotated[str | None, option("What the model is told before the conversation.", FILES)] = None,
    chat_option: options.ChatOption = None,
    stats: Annotated[bool, option("Print a summary of each answer on stderr, if it is a terminal. Typed conversations "
                                  "always have it.", FILES, "--stats")] = False,
    quiet: Annotated[bool, option("No remarks on stderr.", FILES, "--quiet")] = False,
    model: options.Model = "novelist",
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = False,
    drafter: options.Drafter = "auto",
    drafter_option: options.DrafterOption = None,
    heads: options.Heads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = "none",
    threads: options.Threads = None,
    max_new_tokens: Annotated[int, option("Tokens of one answer at most.", SAMPLING)] = 4096,
    seed: options.Seed = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    eta_cutoff: options.EtaCutoff = None,
    min_tokens_to_keep: options.MinTokensToKeep = 1,
    repetition_penalty: options.RepetitionPenalty = None,
    penalty_window: options.PenaltyWindow = SamplingParams.penalty_window,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
) -> int:
    """Talk with a model that has a chat template. Messages are lines of stdin; /help lists the commands."""
    given = {
        "max_new_tokens": max_new_tokens, "seed": seed, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "min_p": min_p, "eta_cutoff": eta_cutoff, "min_tokens_to_keep": min_tokens_to_keep,
        "repetition_penalty": repetition_penalty, "penalty_window": penalty_window, "stop": stop or None,
        "stop_token_ids": stop_token_id or None}
    SamplingParams.from_names(given)  # a mistake shows before the model is read
    require_text(system or "", "--system", "give it in UTF-8")
    drafting = parse_pairs("--drafter-option", drafter_option or ())
    chat_options = options.chat_options(chat_option or ())
    from longdraft.cli.display import LoadBar
    from longdraft.loading import load

    with LoadBar(quiet=quiet) as bar:
        engine = load(model, drafter=drafter, drafter_options=drafting, heads=heads, device=device, dtype=dtype,
                      quantize=quantize, threads=threads, revision=revision, cache_dir=cache_dir, offline=offline,
                      on_load=bar.show)
    params = engine.params(**given)
    talk = Conversation(engine, params, system, chat_options)
    talk.prompt("Hello")  # no template, an unknown option: known before the first message
    options.tell_defaults(params, quiet=quiet)
    any_letter()
    return _loop(talk, stats or sys.stdin.isatty(), quiet)


@dataclass
class Conversation:
    """What was said so far, and how the next answer is asked for."""

    engine: Engine
    params: SamplingParams
    system: str | None
    options: dict[str, Any]
    said: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.said

    def prompt(self, message: str) -> str:
        """The text of the conversation with one more message of the user's, in the template."""
        return self.engine.tokenizer.chat([*self.messages, {"role": "user", "content": message}], **self.options)

    def ask(self, prompt: str, on_prefill: Callable[[int, int], None]) -> Generation:
        """The answer to a prompt, as long as the context has room."""
        ids = self.engine.tokenizer.encode(prompt, add_special_tokens=False)
        room = self.engine.model.config.max_positions - len(ids)
        if room < 1:
            raise UsageError(f"the conversation has {len(ids)} tokens, the model's context limit is "
                             f"{self.engine.model.config.max_positions}; /reset begins anew")
        params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))
        return self.engine.generate(ids, params, on_prefill=on_prefill)

    def remember(self, message: str, answer: str) -> None:
        self.said += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]


def _loop(talk: Conversation, stats: bool, quiet: bool) -> int:
    """Until the input ends; returns the exit status. Who types may go on after a mistake, a script may not."""
    is_typed = sys.stdin.isatty()
    if is_typed and not quiet:
        _remark("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            message = _read(is_typed)
            if message is None or message.split()[:1] in (["/quit"], ["/exit"]):
                return 0
            if message.startswith("/") and not message.startswith("//"):
                _command(talk, message)
            elif message.strip() and (status := _answer(talk, message.removeprefix("/"), stats, quiet)):
                return status
        except (UsageError, OutputError) as error:
            if not is_typed:
                raise
            _remark(str(error))
        except KeyboardInterrupt:
            if not is_typed:
                raise
            _remark("\nCtrl-D or /quit leaves")


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


def _command(talk: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/help":
        print(_HELP, file=sys.stderr)
    elif name == "/reset":
        talk.said.clear()
    elif name == "/save" and rest.strip():
        file = OutputFile(Path(os.path.expanduser(rest.strip())), "/save")
        try:
            file.write((json.dumps({"messages": talk.messages}, indent=2, ensure_ascii=False) + "\n").encode())
            file.finish()
        finally:
            file.abandon()
    else:
        raise UsageError(f"the command is {line!r}; allowed: /help, /reset, /save FILE, /quit; //text says /text")


def _answer(talk: Conversation, message: str, stats: bool, quiet: bool) -> int:
    """Stream the answer to one message and remember both. An exit status where the program is to end, else 0."""
    try:
        return _stream(talk, message, stats, quiet)
    except OSError as error:
        return stdout_lost(error)


def _stream(talk: Conversation, message: str, stats: bool, quiet: bool) -> int:
    from longdraft.cli.stream import show_summary
    from longdraft.model.chat_template import opened_thinking

    prompt = talk.prompt(message)
    opened = opened_thinking(prompt)  # the template wrote the beginning of the answer
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    with Interrupt() as interrupt:
        generation = talk.ask(prompt, lambda done, total: interrupt.check())
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
        talk.remember(message, answer)
    if stats:
        show_summary(generation, quiet=quiet)
    return 128 + interrupt.number if interrupt.number == signal.SIGTERM else 0


def _remark(text: str) -> None:
    print(text, file=sys.stderr)
