"""The Python API: events, stopping, statistics, settings."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

import longdraft
from longdraft.drafters.auto.policy import Policy
from longdraft.engine import run_statistics
from longdraft.errors import ModelError, UsageError
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams

PROMPT = "It was a dark and stormy night, and"


@pytest.fixture(scope="module")
def engine() -> longdraft.Engine:
    return longdraft.load("novelist", drafter="ngram", drafter_options={"delay": 0})


def run(engine: longdraft.Engine, prompt=PROMPT, **settings):
    generation = engine.generate(prompt, SamplingParams(**({"seed": 3, "min_p": 0.1, "max_new_tokens": 40} | settings)))
    events = list(generation)
    return generation, events, "".join(event.text for event in events)


def test_the_tokens_of_all_events_are_the_generated_text(engine):
    generation, events, text = run(engine)
    tokens = [token for event in events for token in event.tokens]
    assert tokens == generation.tokens.tolist()
    assert len(tokens) == 40
    assert engine.tokenizer.decode(tokens).startswith(text)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert events[-1].stats == generation.stats()


def test_statistics_have_the_documented_names_and_consistent_sums(engine):
    _, events, _ = run(engine)
    stats = events[-1].stats
    names = [  # users' scripts read these names: renaming one is a breaking change
        "prompt_tokens", "new_tokens", "finish_reason", "seed", "prefill_seconds", "decode_seconds",
        "tokens_per_second", "steps", "draft_tokens", "accepted_tokens", "mean_accepted_length", "by_source",
        "timings", "sha256_tokens", "distinct_1", "distinct_2", "distinct_3", "distinct_4", "exactness", "kernels",
        "device", "dtype", "threads", "peak_memory_bytes", "model", "drafter", "sampling", "longdraft_version",
    ]
    assert set(names) <= set(stats)
    assert stats["steps"] == len(events)
    assert stats["accepted_tokens"] + stats["steps"] == stats["new_tokens"] == 40
    assert stats["mean_accepted_length"] == 40 / len(events)
    assert sum(source["drafted"] for source in stats["by_source"].values()) == stats["draft_tokens"]
    assert sum(source["accepted"] for source in stats["by_source"].values()) == stats["accepted_tokens"]
    assert set(stats["timings"]) == {"draft", "verify", "sample", "commit", "other"}
    assert sum(stats["timings"].values()) == pytest.approx(stats["decode_seconds"])
    assert stats["exactness"] == "bit-exact"
    assert stats["sampling"]["min_p"] == 0.1


def test_the_token_hash_and_distinct_n_equal_direct_computations(engine):
    _, events, _ = run(engine)
    tokens = [token for event in events for token in event.tokens]
    stats = events[-1].stats
    assert stats["sha256_tokens"] == hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).hexdigest()
    pairs = list(itertools.pairwise(tokens))
    assert stats["distinct_2"] == len(set(pairs)) / len(pairs)


def test_the_same_seed_gives_the_same_text_and_another_seed_a_different_one(engine):
    assert run(engine)[2] == run(engine)[2]
    assert run(engine)[2] != run(engine, seed=4)[2]


def test_a_missing_seed_is_drawn_and_reported(engine):
    _, events, text = run(engine, seed=None)
    assert run(engine, seed=events[-1].stats["seed"])[2] == text


def test_a_prompt_of_token_ids_equals_a_text_prompt(engine):
    ids = np.array(engine.encode(PROMPT))
    assert run(engine, prompt=ids)[2] == run(engine)[2]


def long_run(engine):
    """A text in which some steps accept several tokens."""
    _, events, text = run(engine, temperature=0.0, max_new_tokens=150)
    assert any(len(event.tokens) > 2 for event in events)
    return [list(event.tokens) for event in events], text


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), np.array([5, 6], np.uint16), torch.tensor([5, 6])], ids=type)
def test_a_row_of_token_ids_may_be_a_list_an_array_or_a_tensor(engine, prompt):
    assert engine.encode(prompt) == [5, 6]


@pytest.mark.parametrize("prompt", [None, 5, 1.5, [1.5, 2], [True], [[5, 6]], [[5], [6, 7]], ["a", "b"], b"It was",
                                    {5: 6}, torch.tensor([[5, 6]]), [2**70]], ids=str)
def test_a_prompt_that_is_neither_a_text_nor_a_row_of_ids_is_refused(engine, prompt):
    with pytest.raises(UsageError, match="allowed: a text, or one row of token ids"):
        engine.generate(prompt)


def test_settings_of_another_type_and_a_single_text_for_many_are_refused(engine):
    with pytest.raises(UsageError, match="params is 'dict'; allowed: SamplingParams"):
        engine.generate("It was", {"max_new_tokens": 3})
    with pytest.raises(UsageError, match="prompts is a single text"):
        engine.generate_many("It was")
    with pytest.raises(UsageError, match="batch_size is '2'; allowed: a whole number, 1 to 4096 texts"):
        engine.generate_many(["It was"], batch_size="2")


@pytest.mark.parametrize("options, message", [
    (dict(logprobs="2"), "logprobs is '2'; allowed: a whole number, 0 to 4096"),
    (dict(snapshot_max="8"), "snapshot_max is '8'; allowed: a finite number"),
    (dict(journal=""), "the folder's path is ''; allowed: a path such as work; '.' is the current folder"),
    (dict(journal=3), "the folder's path is 3"),
])
def test_options_of_another_type_and_a_folder_without_a_name_are_refused(engine, options, message):
    with pytest.raises(UsageError, match=message):
        engine.generate("It was", **options)


def test_a_batch_admits_only_a_generation_that_can_go_on(engine):
    begun, closed, finished = (engine.generate("It was", SamplingParams(max_new_tokens=2)) for _ in range(3))
    closed.close()
    list(finished)
    with engine.batch() as batch:
        batch.admit(begun)
        for wrong in (begun, closed, finished, 3):
            with pytest.raises(UsageError, match="allowed: one that has not ended and is not in the batch"):
                batch.admit(wrong)


def test_a_stop_token_among_accepted_tokens_ends_the_text(engine):
    """With any accepted token as stop token, no token after its first occurrence is returned or counted."""
    steps, _ = long_run(engine)
    flat = [token for step in steps for token in step]
    for stop in {step[0] for step in steps if len(step) > 2} | {step[1] for step in steps if len(step) > 2}:
        generation, events, text = run(engine, temperature=0.0, max_new_tokens=150, stop_token_ids=(stop,))
        upto = flat[: flat.index(stop) + 1]
        assert generation.tokens.tolist() == upto
        assert [t for event in events for t in event.tokens] == upto
        assert events[-1].finish_reason == "stop"
        assert events[-1].stats["new_tokens"] == len(upto)
        by_source = events[-1].stats["by_source"].values()
        assert sum(source["accepted"] for source in by_source) == events[-1].stats["accepted_tokens"] <= len(upto)
        assert engine.tokenizer.decode(upto[:-1]).startswith(text)


def test_an_end_of_text_token_ends_the_text_unless_ignored(engine, monkeypatch):
    steps, _ = long_run(engine)
    run_of_three = next(step for step in steps if len(step) > 2)
    config = engine.model.config
    from dataclasses import replace

    monkeypatch.setattr(engine.model, "config", replace(config, eos_token_ids=(run_of_three[1],)))
    flat = [token for step in steps for token in step]
    upto = flat[: flat.index(run_of_three[1]) + 1]
    generation, events, _ = run(engine, temperature=0.0, max_new_tokens=150)
    assert generation.tokens.tolist() == upto and events[-1].finish_reason == "eos"
    generation, events, _ = run(engine, temperature=0.0, max_new_tokens=150, ignore_eos=True)
    assert generation.tokens.tolist() == flat and events[-1].finish_reason == "length"
    generation, events, _ = run(engine, temperature=0.0, max_new_tokens=150, min_new_tokens=len(upto) + 5)
    assert len(generation.tokens) > len(upto) + 4


def test_a_stop_string_ends_the_text_and_is_left_out(engine):
    _, whole = long_run(engine)
    for start in range(5, 60, 7):
        stop = whole[start : start + 6]
        generation, events, text = run(engine, temperature=0.0, max_new_tokens=150, stop=(stop,))
        assert text == whole[: whole.index(stop)]
        assert events[-1].finish_reason == "stop"
        written = engine.tokenizer.decode(generation.tokens.tolist())
        assert stop in written and stop not in engine.tokenizer.decode(generation.tokens.tolist()[:-1])


def test_a_stop_string_is_ignored_before_the_minimum_length(engine):
    _, whole = long_run(engine)
    _, _, text = run(engine, temperature=0.0, max_new_tokens=150, stop=(whole[5:8],), min_new_tokens=150)
    assert text == whole


def test_closing_a_generation_early_stops_it(engine):
    generation = engine.generate(PROMPT, SamplingParams(max_new_tokens=4000, seed=1))
    next(generation)
    with generation:
        next(generation)
    assert generation.stats()["finish_reason"] == "cancelled"
    assert list(generation) == []
    assert generation.stats()["new_tokens"] == len(generation.tokens) >= 2


def test_a_prompt_can_have_a_single_token(engine):
    generation, _, _ = run(engine, prompt=[17], max_new_tokens=5)
    assert len(generation.tokens) == 5


def test_tokenswift_writes_the_plain_text_after_a_prompt_of_one_token(tiny):
    engine = longdraft.load(str(tiny["gqa"]), drafter="tokenswift")
    plain = longdraft.load(str(tiny["gqa"]), drafter="plain")
    assert run(engine, prompt=[17])[0].tokens.tolist() == run(plain, prompt=[17])[0].tokens.tolist()


@pytest.mark.parametrize("prompt, settings, message", [
    ("", {}, "prompt is empty"),
    ([], {}, "prompt is empty"),
    ([5000], {}, "token id is 5000; allowed: 0 to 4095"),
    ([-1], {}, "token id is -1"),
    (PROMPT, {"max_new_tokens": 131_072}, "context limit"),
    (PROMPT, {"stop_token_ids": (4096,)}, "stop_token_ids is 4096"),
])
def test_invalid_requests_raise_an_error_with_the_reason(engine, prompt, settings, message):
    with pytest.raises(UsageError, match=message):
        engine.generate(prompt, SamplingParams(**settings))


@pytest.mark.parametrize("settings, message", [
    (dict(temperature=-1), "temperature is -1; allowed: 0, or 0.001 and more"),
    (dict(temperature=float("nan")), "a finite number"),
    (dict(top_p=0), "top_p is 0"),
    (dict(top_p=1.1), "top_p is 1.1"),
    (dict(min_p=1), "min_p is 1"),
    (dict(top_k=-1), "top_k is -1"),
    (dict(top_k=1.5), "a whole number"),
    (dict(eta_cutoff=-0.1), "eta_cutoff is -0.1"),
    (dict(repetition_penalty=0), r"repetition_penalty is 0; allowed: 0\.001 to 1000"),
    (dict(repetition_penalty=1e-50), "0.001 to 1000"),
    (dict(penalty_window=0), "set repetition_penalty to 1"),
    (dict(max_new_tokens=-1), "max_new_tokens is -1"),
    (dict(max_new_tokens=5, min_new_tokens=6), r"at most max_new_tokens \(5\)"),
    (dict(seed=-1), "seed is -1"),
    (dict(seed=2**64), "0 to 2"),
    (dict(stop="x"), "a list of non-empty texts"),
    (dict(stop=("",)), "non-empty"),
    (dict(stop_token_ids=(-3,)), "token ids"),
    (dict(stop_token_ids=5), "a list of token ids"),
    (dict(temperature=1e-8), "0, or 0.001 and more"),
    (dict(min_tokens_to_keep=0), "min_tokens_to_keep is 0"),
])
def test_settings_out_of_range_raise_an_error_with_value_and_range(settings, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**settings)


def test_setting_names_of_other_libraries_are_accepted():
    assert SamplingParams.from_names({"max_tokens": 5, "stop": "x"}) == SamplingParams(max_new_tokens=5, stop=("x",))
    assert SamplingParams.from_names({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert SamplingParams.from_names({"temperature": 0.7, "do_sample": True}).temperature == 0.7
    assert SamplingParams.from_names({"repeat_last_n": 64}).penalty_window == 64
    assert SamplingParams.from_names({"stop": None, "max_tokens": None}) == SamplingParams()
    with pytest.raises(UsageError, match="unknown sampling setting 'temprature'; known: "):
        SamplingParams.from_names({"temprature": 1})
    with pytest.raises(UsageError, match="contradicts"):
        SamplingParams.from_names({"max_tokens": 5, "max_new_tokens": 6})


def test_settings_may_be_lists_and_numbers_of_numpy():
    given = SamplingParams(seed=np.uint64(3), min_p=np.float32(0.5), ignore_eos=np.bool_(True), stop=["x", "y"],
                           logit_bias=[[np.int64(5), np.float64(1)]])
    assert given == SamplingParams(seed=3, min_p=0.5, ignore_eos=True, stop=("x", "y"), logit_bias=((5, 1.0),))
    assert hash(given)
    assert json.loads(json.dumps(asdict(given)))["seed"] == 3  # as journals and statistics write them


@pytest.mark.parametrize("settings, error, message", [
    (dict(model="no-such-model"), ModelError, "no model 'no-such-model' exists; give a bundled name"),
    (dict(drafter="psychic"), UsageError, "unknown drafter 'psychic'; known: auto, plain, ngram, suffix, tokenswift"),
    (dict(dtype="float8"), UsageError, "dtype is 'float8'"),
    (dict(device="abacus"), UsageError, "device is 'abacus'"),
    (dict(threads=0), UsageError, "threads is 0; allowed: 1 to 1024"),
    (dict(threads="2"), UsageError, "threads is '2'; allowed: a whole number, 1 to 1024"),
    (dict(cache_ram="5"), UsageError, "cache_ram is '5'; allowed: a whole number, 0 to 1073741824 MiB"),
    (dict(tensor_parallel=1.5), UsageError, "tensor_parallel is 1.5; allowed: a whole number, 1 to 1024"),
    (dict(model=None), UsageError, "model is None; allowed: a name, or the path of a file or folder"),
    (dict(tokenizer=3), UsageError, "tokenizer is 3; allowed: a name, or the path"),
    (dict(drafter="ngram", drafter_options={"x": 1}), UsageError, "no option 'x'; known"),
])
def test_a_failed_load_raises_an_error_with_the_reason(settings, error, message):
    with pytest.raises(error, match=message):
        longdraft.load(**settings)


def test_heads_for_a_drafter_without_heads_are_refused():
    with pytest.raises(UsageError, match="drafter 'ngram' uses no heads"):
        longdraft.load(drafter="ngram", heads="novelist")


def test_auto_uses_the_heads_it_finds_and_reports_its_choices(tiny):
    engine = longdraft.load(str(tiny["gqa"]))
    stats = run(engine, max_new_tokens=100)[1][-1].stats
    assert set(stats["tokens_by_choice"]) == {"plain", "suffix", "tokenswift", "medusa", "magicdec", "glide", "eagle"}
    assert sum(stats["tokens_by_choice"].values()) == 100


def test_tokenswift_without_heads_raises_an_error_with_the_cure(tmp_path):
    from helpers.checkpoints import make_checkpoint

    make_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="needs trained heads"):
        longdraft.load(str(tmp_path), drafter="tokenswift")


def test_auto_ignores_heads_trained_on_other_weights(tiny, tmp_path, caplog):
    from helpers.checkpoints import make_checkpoint, make_heads

    base = make_checkpoint(tmp_path)
    make_heads(tmp_path / "heads", base, base_sha256="0" * 64)
    engine = longdraft.load(str(tmp_path))
    assert engine.heads is None and "trained on other weights" in caplog.text
    with pytest.raises(ModelError, match="trained on other weights"):
        longdraft.load(str(tmp_path), drafter="tokenswift")


def test_a_chat_prompt_has_only_the_special_tokens_of_its_template(tmp_path):
    import json

    from tokenizers import Tokenizer, processors

    from helpers.checkpoints import make_checkpoint

    make_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": "{{ bos_token }}[{{ messages[0].content }}]", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = longdraft.load(str(tmp_path))
    assert engine.chat("hi").count(0) == engine.encode("hi").count(0) == 1


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    from helpers.checkpoints import make_checkpoint

    make_checkpoint(tmp_path, vocab_size=200)
    with pytest.raises(ModelError, match="whose tokenizer and model belong together"):
        longdraft.load(str(tmp_path))


def test_a_context_grows_and_its_views_are_read_only():
    context = Context([1, 2, 3])
    context.extend(range(5000))
    assert len(context) == 5003 and context.last == 4999 and context.num_new == 5000
    assert context.slice(-5, 4).tolist() == [1, 2, 3, 0]
    with pytest.raises(ValueError, match="read-only"):
        context.slice(0, 2)[0] = 9


@pytest.mark.parametrize("drafter", ["plain", "ngram", "suffix"])
def test_a_penalty_window_longer_than_the_text_covers_the_whole_text(tiny, drafter):
    """Fuzzing found a window that overflows C++ integers. A large window must not allocate memory in advance."""
    before = run_statistics.peak_memory_bytes()
    engine = longdraft.load(str(tiny["mha"]), drafter=drafter)
    hashes = set()
    for window in (4000, 2 * 10**9, 10**20):
        params = longdraft.SamplingParams(max_new_tokens=40, seed=1, repetition_penalty=1.2, penalty_window=window)
        *_, last = engine.generate("It was", params)
        hashes.add(last.stats["sha256_tokens"])
    assert len(hashes) == 1 and run_statistics.peak_memory_bytes() - before < 1 << 30


def test_accepted_tokens_after_the_end_are_not_counted(tiny, monkeypatch):
    """A text may end among the accepted tokens of a step; `auto` counts only the tokens of the text."""
    monkeypatch.setattr(Policy, "_seconds", lambda self, name: float(name != "magicdec"))  # it leads
    monkeypatch.setattr(Policy, "num_guesses", lambda self, name, reach: len(reach))
    engine = longdraft.load(str(tiny["mha"]), drafter="auto")
    _, events, _ = run(engine, temperature=0.0, max_new_tokens=150)
    steps = [list(event.tokens) for event in events]
    flat = [token for step in steps for token in step]
    stops = {step[len(step) // 2] for step in steps if len(step) > 2}
    assert stops
    for stop in stops:
        _, events, _ = run(engine, temperature=0.0, max_new_tokens=150, stop_token_ids=(stop,))
        stats = events[-1].stats
        assert stats["new_tokens"] == flat.index(stop) + 1 == sum(stats["tokens_by_choice"].values())
        assert sum(sum(counts.values()) for counts in stats["choices"]) == stats["new_tokens"]


@pytest.mark.parametrize("token", [-1, 2**31, 2**32, 2**62])
def test_a_token_id_outside_the_vocabulary_is_refused(engine, token):
    """Those that no tokenizer can be asked for, too."""
    with pytest.raises(UsageError, match=f"a prompt token id is {token}; allowed: 0 to"):
        engine.encode([5, token])
