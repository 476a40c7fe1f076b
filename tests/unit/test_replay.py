"""`longdraft bench replay`: the drafts for a text that is written already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import load
from helpers.equality import prompt_of
from helpers.generation import by_name, generate
from longdraft.__main__ import run
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally
from longdraft_bench.texts import replay


@pytest.mark.parametrize("name, options", [
    ("suffix", {"min_match": 1, "min_probability": 0}), ("ngram", {"seen": 1}),
    ("suffix", {"budget": 3, "delay": 5, "min_match": 1, "min_probability": 0})])
def test_a_replay_takes_the_steps_of_the_real_run(tiny, name, options):
    prompt, tally = prompt_of(90), Tally()
    params = SamplingParams(max_new_tokens=150, temperature=0.0)
    written = generate(load(tiny["mha"]), prompt, params, by_name(name, **options), tally=tally)
    result = replay.replay(prompt + written, name, options, prefill=90)
    assert result.steps == tally.steps and result.tokens == 150
    assert result.drafted_per_step * result.steps == pytest.approx(tally.drafted.total())
    assert 0 < result.acceptance_rate == pytest.approx(tally.accepted.total() / tally.drafted.total())
    assert result.memory_bytes > 0 and result.host_us_slowest >= result.host_us_median > 0


def test_the_replay_command_writes_a_table_and_data(tmp_path, capsys):
    np.save(tmp_path / "text.npy", np.array(prompt_of(300), np.int32))
    status = run(["bench", "replay", str(tmp_path / "text.npy"), "--drafter", "suffix,depth=4", "--drafter", "ngram",
                  "--prefill", "100", "--penalty-window", "5", "--output", str(tmp_path / "out.json")])
    assert status == 0
    assert "suffix,depth=4 " in capsys.readouterr().out
    assert '"setting": "suffix,depth=4"' in (tmp_path / "out.json").read_text()


def test_bad_input_of_the_replay_gets_a_clear_error(tmp_path):
    (tmp_path / "bad.npy").write_text("text")
    with pytest.raises(UsageError, match=r"not a \.npy file"):
        replay.read_tokens(tmp_path / "bad.npy")
    with pytest.raises(UsageError, match="prefill is 9; allowed: 1 to 4"):
        replay.replay([1, 2, 3, 4, 5], "suffix", prefill=9)
    for setting, message in (("tokenswift", "drafter is 'tokenswift'; allowed: ngram or suffix with options"),
                             ("suffix,depth", "drafter is 'suffix,depth'; allowed: a name with options")):
        with pytest.raises(UsageError, match=message):
            replay.parse_settings([setting])


def test_replayed_files_of_the_same_name_get_distinct_labels(tmp_path, capsys):
    for place, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "text.npy", np.array(prompt_of(40 + place), np.int32))
    files = [tmp_path / folder / "text.npy" for folder in ("a", "b", "b")]
    figures = replay.replay_files(files, ["ngram"], 30, 0, "unused")
    assert {name: [figure["tokens"] for figure in found] for name, found in figures.items()} == {
        "a/text.npy": [10], "b/text.npy": [11]}
    assert "b/text.npy: 41 tokens" in capsys.readouterr().out
    assert list(replay.labels([Path("x"), Path("/y/x"), Path("y/x")]).values()) == ["x", "/y/x", "y/x"]
    assert list(replay.labels([Path("/far/one"), Path("/far/two")]).values()) == ["one", "two"]
