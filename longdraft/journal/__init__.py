"""A text's journal: what began it, and every token before it was shown. Enough to go on after any end.

    with Journal.create(folder, header, run) as journal:     # the writer; nobody else may write meanwhile
        journal.append(tokens, drafted, seconds)

    found = read(folder)                                     # whatever happened to the file: a valid prefix, or refusal
"""

from longdraft.journal.format import FILE, Found, Header, Run, StepRecord, is_there, read
from longdraft.journal.writer import Journal, is_being_written, parse_fsync, resume_hint

__all__ = ["FILE", "Found", "Header", "Journal", "Run", "StepRecord", "is_being_written", "is_there",
           "parse_fsync", "read", "resume_hint"]
