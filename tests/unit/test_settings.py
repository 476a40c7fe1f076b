"""A setting is declared once: the command line, request bodies, rows and documents follow from the declaration."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import longdraft
from longdraft.batch import requests
from longdraft.book import book
from longdraft.checkpoint import defaults
from longdraft.cli.options import OptionValues, sampling_options, with_option_groups
from longdraft.engine.settings import JOURNALING, SETTINGS
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import Range, SettingScope, names_of, setting, settings_of

TABLES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "packaging" / "settings_tables.py"))


@dataclass(frozen=True)
class MoreParams(SamplingParams):
    """One setting more."""

    sparkle: float = setting(0.5, "Sparkle of the prose; 0: off.", Range(0, 2), aliases=("glitter",),
                             scopes=SettingScope.ANY_REQUEST | SettingScope.MODEL)


def parse_options(*arguments: str) -> OptionValues:
    app = typer.Typer()
    given: OptionValues = {}

    @app.command()
    @with_option_groups
    def write(*, sampling: Annotated[OptionValues, sampling_options(MoreParams)]) -> None:
        given.update(sampling)

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return {**given, "output": result.output}


def test_a_new_setting_is_an_option_of_the_command_line():
    assert parse_options("--sparkle", "1.5")["sparkle"] == 1.5
    assert "sparkle" not in parse_options()
    shown = " ".join(re.sub(r"[^\w.,;:'()-]", " ", parse_options("--help")["output"]).split())
    assert "Sparkle of the prose; 0: off." in shown and "the model's, else 0.5" in shown


def test_a_new_setting_is_checked_and_has_its_other_names():
    assert MoreParams.from_names({"glitter": 1.5, "min_p": 0.1}) == MoreParams(sparkle=1.5, min_p=0.1)
    with pytest.raises(UsageError, match="sparkle is 3; allowed: 0 to 2"):
        MoreParams.from_names({"sparkle": 3})


def test_a_new_setting_is_a_member_of_request_bodies():
    body_types = pytest.importorskip("longdraft.server.body_types")
    body = body_types.settings_body("Body", SettingScope.BODY, MoreParams)
    schema = body.model_json_schema()["properties"]["glitter"]
    assert schema["anyOf"] == [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}]
    assert schema["description"] == "Sparkle of the prose; 0: off."
    assert body.model_validate({"sparkle": 1.5, "glitter": None}).sparkle == 1.5
    with pytest.raises(ValueError, match="sparkle"):
        body.model_validate({"sparkle": "much"})


def test_a_new_setting_may_be_in_rows_of_a_batch_and_in_a_book(monkeypatch):
    monkeypatch.setattr(requests, "SamplingParams", MoreParams)
    assert requests.parse({"id": "a", "prompt": "x", "sparkle": 1.5}, 1, "").settings == {"sparkle": 1.5}
    assert "allowed: 0 to 2" in requests.parse({"id": "a", "prompt": "x", "sparkle": 9}, 1, "").problem
    monkeypatch.undo()
    assert "unknown sampling setting" in requests.parse({"id": "a", "prompt": "x", "sparkle": 1.5}, 1, "").problem
    assert book._settings_of(MoreParams(sparkle=1.5))["sparkle"] == 1.5


def test_a_new_setting_is_in_the_tables_of_the_documents():
    row = "| `sparkle` | 0.5 | 0 to 2 | Sparkle of the prose; 0: off. Also `glitter`. |\n"
    assert row in TABLES["sampling_table"](settings_of(MoreParams).values())
    assert row not in TABLES["TABLES"]["sampling.md"]()
    assert "Keep the K likeliest tokens" in SamplingParams.__doc__


@pytest.mark.parametrize("name", TABLES["TABLES"])
def test_the_documents_have_the_tables_of_the_settings(name):
    document = (TABLES["DOCUMENTS"] / name).read_text(encoding="utf-8")
    assert TABLES["with_table"](document, TABLES["TABLES"][name]()) == document, "python packaging/settings_tables.py"


def test_the_defaults_of_the_tables_are_those_of_the_python_interface():
    loading = inspect.signature(longdraft.load).parameters
    for each in SETTINGS.values():
        if each not in JOURNALING:
            assert loading[each.name].default == each.default, each.name
    for method in (longdraft.Engine.generate, longdraft.Engine.resume):
        parameters = inspect.signature(method).parameters
        assert {each.name: float(each.default) if each.name == "fsync" else each.default for each in JOURNALING} == {
            each.name: parameters[each.name].default for each in JOURNALING}


def test_every_name_of_a_setting_is_the_name_of_one_setting():
    names = [name for each in settings_of(SamplingParams).values() for name in each.names]
    assert len(names) == len(set(names)) == len(names_of(SamplingParams))


def test_the_models_defaults_may_have_what_the_table_says():
    assert {"temperature", "top_p", "top_k", "min_p", "eta_cutoff", "repetition_penalty", "penalty_window", "typical_p",
            "no_repeat_ngram_size", "stop_strings"} <= set(defaults.SUPPORTED)
    assert "dry_multiplier" not in defaults.SUPPORTED and "seed" not in defaults.SUPPORTED


def test_null_means_that_an_optional_parameter_is_not_given():
    schemas = pytest.importorskip("longdraft.server.schemas")
    for model, needed in ((schemas.CompletionRequest, {"prompt": "a"}),
                          (schemas.ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
                          (schemas.ResumeRequest, {})):
        body = {**dict.fromkeys(model.model_fields), **needed}
        assert model.model_validate(body) == model.model_validate(needed)
        options = dict.fromkeys(schemas.LongdraftOptions.model_fields)
        if "longdraft" in model.model_fields:
            assert model.model_validate({**needed, "longdraft": options}) == model.model_validate(needed)
        schema = model.model_json_schema()
        assert all({"type": "null"} in member["anyOf"] for name, member in schema["properties"].items()
                   if name not in schema.get("required", ()))


@pytest.mark.parametrize("body", [{"prompt": None}, {"prompt": "a", "nonsense": None}])
def test_null_is_no_value_of_a_required_or_an_unknown_parameter(body):
    schemas = pytest.importorskip("longdraft.server.schemas")
    with pytest.raises(ValueError, match=r"prompt|nonsense"):
        schemas.CompletionRequest.model_validate(body)
