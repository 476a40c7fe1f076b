"""`longdraft book`: from a premise to an outline, chapters, and a book as Markdown and EPUB."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import options
from longdraft.cli.options import FILES, OptionValues, engine_options, option, sampling_options, with_option_groups
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.system.console import Interrupt, Interrupted
from longdraft.system.files import read_prompt

if TYPE_CHECKING:
    from longdraft.engine.generation import Generation


@with_option_groups
def book(
    premise: Annotated[str | None, typer.Argument(help="What the book is about.", show_default=False)] = None,
    premise_file: Annotated[str | None, option("Read the premise from a UTF-8 file; '-' is stdin.", FILES)] = None,
    folder: Annotated[Path, options.folder_option("Folder for the outline, the journals and the book.",
                                                  FILES)] = Path("book"),
    chapters: Annotated[int, option("Number of chapters, 1 to 200.", FILES)] = 10,
    words: Annotated[int, option("Approximate number of words in a chapter, 50 to 20000.", FILES)] = 1500,
    outline_only: Annotated[bool, option("Stop after the outline, which you can edit in BOOK.json. The same command "
                                         "without this option continues.", FILES, "--outline-only")] = False,
    chat_option: options.ChatOption = None,
    quiet: options.Quiet = False,
    *,
    loading: Annotated[OptionValues, engine_options()],
    sampling: Annotated[OptionValues, sampling_options(
        without=("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "logit_bias", "ignore_eos", "on_loop"),
        seed=dict(help="0 to 2**64-1. Each chapter has a seed of its own, which follows from this one.", default=0,
                  shown=""))],
) -> int:
    """Write a book from PREMISE. Start the same command again to continue after an interruption.

    The folder has BOOK.json with the outline, a journal for each chapter, book.md and book.epub. The same premise,
    model, settings and seed give the same book.
    """
    from longdraft.book.book import Book, BookPlan
    from longdraft.cli.display import load_with_bar

    if SamplingParams.from_names(sampling).structured_outputs:
        raise UsageError("a book is prose; leave --json-schema, --regex and --grammar out")
    plan = BookPlan(read_prompt(premise, premise_file, "premise"), chapters, words)
    chat_options = options.chat_options(chat_option or ())
    engine = load_with_bar(loading, quiet=quiet)
    params = engine.params(**sampling)
    options.print_model_defaults(params, quiet=quiet)
    with engine, Interrupt() as interrupt:
        written = Book.open(folder, engine, plan, params, chat_options)
        follow = _Follower(interrupt, quiet)
        try:
            for progress in (written.outline if outline_only else written.write)(follow):
                if not quiet and progress.state == "outlined":
                    print(f"longdraft: outline of {len(written.state.chapters)} chapters in {folder / 'BOOK.json'}",
                          file=sys.stderr)
        except Interrupted:
            print(f"longdraft: interrupted; the same command continues the book in {folder}", file=sys.stderr)
            return 128 + interrupt.number
    if not quiet and not outline_only:
        print(f"longdraft: the book is in {folder / 'book.md'} and {folder / 'book.epub'}", file=sys.stderr)
    return 0


class _Follower:
    """Runs the generations of a book and prints a line for each."""

    def __init__(self, interrupt: Interrupt, quiet: bool) -> None:
        self._interrupt, self._quiet = interrupt, quiet

    def __call__(self, generation: Generation, part: str) -> str:
        """The text of a generation. Interrupted at the first signal; the journal holds what was written."""
        texts: list[str] = []
        start = time.perf_counter()
        with generation:
            self._interrupt.check()
            for event in generation:
                texts.append(event.text)
                self._interrupt.check()
            tokens, seconds = len(generation.tokens) - generation.num_resumed, time.perf_counter() - start
        if not self._quiet:
            speed = f", {tokens / seconds:.1f} tokens/s" if tokens else ", kept"
            print(f"longdraft: {part}: {len(generation.tokens):,} tokens{speed}", file=sys.stderr)
        return "".join(texts)
