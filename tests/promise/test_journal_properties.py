"""The journal against a model, a list of tokens: random appends, kills and damage."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers.journals import (
    HEADER,
    RUN,
    RUN_PAYLOAD,
    check_one_line,
    lying,
)
from longdraft.errors import JournalError
from longdraft.journal import format as form
from longdraft.journal.format import FILE, read_journal
from longdraft.journal.writer import Journal


class Lives(RuleBasedStateMachine):
    """Random appends, kills, power cuts with torn or damaged sectors, and recoveries: each read is a true prefix."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self._keeper = tempfile.TemporaryDirectory()
        self.folder = Path(self._keeper.name) / "journal"
        self.journal: Journal | None = Journal.create(self.folder, HEADER, RUN, np.inf)
        self.tokens: list[int] = []
        self.is_finished = False
        self.floor = self.size()  # the header is on the disk from the beginning

    def size(self) -> int:
        return (self.folder / FILE).stat().st_size

    @rule(step=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
    def append(self, step: list[int]) -> None:
        if self.journal and not self.is_finished:
            self.journal.append(step, len(step), 0.5)
            self.tokens += step

    @rule()
    def finish(self) -> None:
        if self.journal and not self.is_finished and self.tokens:
            self.journal.finish("length")
            self.is_finished = True

    @rule()
    def kill(self) -> None:
        """Nothing is lost: all was handed to the system."""
        if self.journal:
            self.journal.close()
            self.journal = None

    @rule(data=st.data())
    def power_cut(self, data: st.DataObject) -> None:
        """Anything after the header may be missing, or be something else."""
        self.kill()
        cut = data.draw(st.integers(self.floor, self.size()))
        os.truncate(self.folder / FILE, cut)
        with (self.folder / FILE).open("ab") as file:
            file.write(data.draw(st.binary(max_size=40) | st.just(b"\0" * 64)))
        found = read_journal(self.folder)
        assert found.tokens.tolist() == self.tokens[: len(found.tokens)]
        self.tokens, self.is_finished = found.tokens.tolist(), found.finish is not None

    @rule()
    def resume(self) -> None:
        if self.journal is None and not self.is_finished:
            self.journal, found = Journal.open(self.folder, np.inf)
            assert found.tokens.tolist() == self.tokens
            self.journal.begin(replace(RUN, token=len(self.tokens)))

    @invariant()
    def a_reader_sees_what_was_written(self) -> None:
        if hasattr(self, "tokens"):
            found = read_journal(self.folder)
            assert found.tokens.tolist() == self.tokens
            assert (found.finish is not None) == self.is_finished

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.kill()
            self._keeper.cleanup()


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestLives = pytest.mark.full(Lives.TestCase)


@settings(max_examples=300, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_records_never_crash_the_reader(tmp_path, data):
    """The checksums are correct and the content is random."""
    values = st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=5) | st.just([])
    header = json.loads(form.dump_payload(HEADER))
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), max_size=2)):
        header[name] = data.draw(values | st.dictionaries(st.sampled_from(["seed", "top_p", "stop", "x"]), values))
    records = [(form.HEADER, json.dumps(header).encode())]
    records += data.draw(st.lists(st.tuples(st.integers(0, 255) | st.sampled_from(b"HRTF"),
                                            st.binary(max_size=40) | st.just(RUN_PAYLOAD)), max_size=4))
    lying(tmp_path, *records)
    try:
        read_journal(tmp_path)
    except JournalError as error:
        check_one_line(error)
