"""Sampling defaults from generation_config.json: which setting overrides which, and where a setting came from."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer

import longdraft
from helpers.checkpoints import make_checkpoint
from longdraft.__main__ import run
from longdraft.checkpoint import config_file, defaults, hub
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams

FILE = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.01,
        "eta_cutoff": 0.0003, "eos_token_id": [1, 2], "max_length": 4096, "transformers_version": "5.0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose generation_config.json has defaults and two end-of-text tokens, both likely."""
    path = tmp_path_factory.mktemp("defaults")
    make_checkpoint(path)
    (path / "generation_config.json").write_text(json.dumps(FILE))
    return path


@pytest.mark.parametrize("file, given, expected", [
    ({}, {}, {}),
    (FILE, {}, dict(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, min_p=0.01, eta_cutoff=0.0003)),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.8}, dict(temperature=0.8, top_p=0.9)),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": None, "top_p": 1.0}, dict(temperature=0.6, top_p=1.0)),
    ({"do_sample": False}, {}, dict(temperature=0.0)),
    ({"do_sample": False, "temperature": 0.6}, {}, dict(temperature=0.0)),
    ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.8}, dict(temperature=0.8)),
    ({"do_sample": False, "temperature": 0.6}, {"do_sample": True}, dict(temperature=0.6)),
    ({"do_sample": True, "temperature": 0.6}, {"do_sample": False}, dict(temperature=0.0)),
    ({"top_p": None, "top_k": None}, {}, {}),
    ({"stop_strings": ["END"]}, {}, dict(stop=("END",))),
    ({"do_sample": True, "temperature": 1e-6}, {}, dict(temperature=0.0)),  # greedy, and not the default of 1
    ({"temperature": 9e-4}, {}, dict(temperature=0.0)),
    ({"temperature": 1e-3}, {}, dict(temperature=1e-3)),
    ({"temperature": -1.0}, {}, {}),
    ({"top_p": 1.5, "typical_p": 2.0, "eta_cutoff": 3.0}, {}, {}),  # off, as in transformers
    ({"min_p": 1.0}, {}, dict(min_p=1 - 2**-24)),
    ({"stop_strings": "END"}, {"stop": ["x"]}, dict(stop=("x",))),
    ({"stop_strings": "END"}, {"stop_strings": ["x"], "max_tokens": 3}, dict(stop=("x",), max_new_tokens=3)),
])
def test_request_settings_override_the_file_and_the_file_overrides_built_in_defaults(file, given, expected):
    assert defaults.parse_defaults(file).params(given) == SamplingParams(**expected)


@pytest.mark.parametrize("given, expected", [
    ({}, ("temperature", "top_p")),
    ({"temperature": 0.6}, ("top_p",)),
    ({"do_sample": False}, ("top_p",)),
    ({"temperature": 1.0, "top_p": 0.5}, ()),
])
def test_settings_record_which_values_came_from_the_model(given, expected):
    params = defaults.parse_defaults({"do_sample": True, "temperature": 0.6, "top_p": 0.95}).params(given)
    assert params.from_model == expected


@pytest.mark.parametrize("file, message", [
    ({"top_p": 0.0}, "top_p 0.0; allowed: above 0"),
    ({"top_k": -1}, "top_k -1; allowed: 0 or more"),
    ({"temperature": "warm"}, "temperature 'warm'; allowed: a finite number"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"min_p": True}, "min_p True"),
    ({"stop_strings": 3}, "stop_strings 3"),
    ({"stop_strings": [""]}, "allowed: non-empty texts"),
    ({"do_sample": "yes"}, "do_sample 'yes'"),
    ({"num_beams": 4}, "num_beams 4 (not supported)"),
    ({"no_repeat_ngram_size": 300}, "no_repeat_ngram_size 300; allowed: 0 to 51"),
    ({"top_h": 0.4}, "top_h 0.4 (not supported)"),
    ({"suppress_tokens": [5]}, "suppress_tokens [5] (not supported)"),
])
def test_unsupported_settings_of_the_file_are_reported_and_ignored(file, message):
    found = defaults.parse_defaults(file)
    assert len(found.ignored) == 1 and message in found.ignored[0]
    assert found.params({}) == SamplingParams()


def test_settings_without_effect_are_not_reported():
    off = {"num_beams": 1, "top_h": 1.0, "guidance_scale": None, "suppress_tokens": [],
           "diversity_penalty": 0.0, "use_cache": True, "pad_token_id": 0, "max_length": 20, "penalty_alpha": None}
    assert defaults.parse_defaults(off) == defaults.Defaults()


def test_an_unknown_setting_is_refused():
    with pytest.raises(UsageError, match="unknown sampling setting 'temprature'"):
        defaults.Defaults().params({"temprature": 1})
    with pytest.raises(UsageError, match="unknown sampling setting 'from_model'"):
        defaults.Defaults().params({"from_model": ("top_p",)})


def test_the_bundled_model_uses_the_built_in_defaults():
    assert defaults.read_defaults(hub.resolve("novelist")).params({}) == SamplingParams()


@pytest.mark.parametrize("eos, expected", [(1, (1,)), ([1, 2], (1, 2)), ([2, -1, 320], (2,)), (-1, ()), ([], ())])
def test_a_model_can_have_one_several_or_no_end_of_text_tokens(folder, tmp_path, eos, expected):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert config_file.read_config(tmp_path).eos_token_ids == expected


CONFIG_EOS = {"none": None, "one": 1, "a list": [1, 5]}
GENERATION_EOS = {"no file": ..., "none": None, "an id": 9, "a list": [9, 7], "an empty list": [], "no token": -1}
TOKENIZER_EOS = {  # the token of id 258, by each place that may name it
    "none": {}, "tokenizer_config.json": {"tokenizer_config": {"eos_token": "<|im_end|>"}},
    "with flags": {"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "special": True}}},
    "special_tokens_map.json": {"special_tokens_map": {"eos_token": "<|im_end|>"}},
    "config.json's": {"tokenizer_config": {"eos_token": "</s>"}},
    "an unknown text": {"tokenizer_config": {"eos_token": "<nothing>"}},
}


@pytest.mark.parametrize("of_tokenizer", TOKENIZER_EOS)
@pytest.mark.parametrize("of_generation", GENERATION_EOS)
@pytest.mark.parametrize("of_config", CONFIG_EOS)
def test_the_tokenizers_end_ends_texts_unless_generation_config_json_names_the_ends(
        folder, tmp_path, of_config, of_generation, of_tokenizer, caplog):
    for path in folder.iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "generation_config.json").unlink()
    if (eos := GENERATION_EOS[of_generation]) is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": CONFIG_EOS[of_config]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in TOKENIZER_EOS[of_tokenizer].items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    ends = {"none": (), "one": (1,), "a list": (1, 5)}[of_config]
    own = {"none": (), "an unknown text": (), "config.json's": (1,)}.get(of_tokenizer, (258,))
    expected = (*ends, *(i for i in own if i not in ends))
    if of_generation in ("an id", "a list", "an empty list", "no token"):
        expected = {"an id": (9,), "a list": (9, 7)}.get(of_generation, ())
    with caplog.at_level("WARNING"):
        assert longdraft.load(str(tmp_path), drafter="plain").model.config.eos_token_ids == expected
    warnings = [line for line in caplog.messages if "names a token that ends a text" in line]
    assert len(warnings) == (0 if expected else 1)


def test_an_engine_uses_the_file_unless_disabled(folder):
    engine = longdraft.load(str(folder), drafter="plain")
    *_, last = engine.generate("It was", engine.params(max_new_tokens=5, seed=1, top_p=0.5))
    assert last.stats["sampling"]["temperature"] == 0.6 and last.stats["sampling"]["top_p"] == 0.5
    assert set(last.stats["sampling"]["from_model"]) == {
        "temperature", "top_k", "min_p", "eta_cutoff", "repetition_penalty"}
    with engine.generate("It was") as generation:
        assert generation.stats()["sampling"]["top_k"] == 20
    with engine.generate("It was", SamplingParams()) as generation:  # explicit settings are not changed
        assert generation.stats()["sampling"]["top_k"] == 0


def test_every_end_of_text_token_ends_the_text(folder, tmp_path):
    engine = longdraft.load(str(folder), drafter="plain")
    greedy = [token for event in engine.generate("It", engine.params(max_new_tokens=9, temperature=0, ignore_eos=True,
                                                                    repetition_penalty=2.0))
              for token in event.tokens]
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    ends = [310, greedy[4]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "repetition_penalty": 2.0,
                                                                 "eos_token_id": ends}))
    engine = longdraft.load(str(tmp_path), drafter="ngram")
    events = list(engine.generate("It", engine.params(max_new_tokens=9)))
    assert events[-1].finish_reason == "eos"
    assert [token for event in events for token in event.tokens] == greedy[: greedy.index(greedy[4]) + 1]


@pytest.mark.full
def test_the_command_prints_the_settings_from_the_model_once(folder, capfd, tmp_path, caplog):
    command = ["generate", "It", "--model", str(folder), "--max-new-tokens", "3", "--seed", "1", "--top-k", "5"]
    assert run([*command, "--stats", str(tmp_path / "stats.json")]) == 0
    assert capfd.readouterr().err == ("longdraft: sampling defaults of the model: eta-cutoff 0.0003, min-p 0.01, "
                                      "repetition-penalty 1.05, temperature 0.6, top-p 0.95\n")
    sampling = json.loads((tmp_path / "stats.json").read_text())["sampling"]
    assert sampling["top_k"] == 5 and "top_k" not in sampling["from_model"] and "top_p" in sampling["from_model"]
    assert run([*command, "--quiet"]) == 0
    assert capfd.readouterr().err == ""


def test_one_warning_names_all_ignored_settings(folder, tmp_path, caplog):
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7, "num_beams": 2}')
    longdraft.load(str(tmp_path), drafter="plain")
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "num_beams 2 (not supported); top_p 7" in record.getMessage()
