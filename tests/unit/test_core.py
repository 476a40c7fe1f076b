"""The tests of the tests: the core (`make test`) meets every drafter, sampling setting, kernel, family, and way of
reading the cache. What the core leaves out is the product of these, which `make test-all` runs.

The promise factorises: each family and each kernel is row-invariant, and each drafter on each way of reading the cache
takes nothing from the drafts into the text. The two imply equality for each combination.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import equality, families
from helpers.import_graph import affected_tests
from longdraft import kernels
from longdraft.drafters import DRAFTERS
from longdraft.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
# The files of tests that are named below.
READ = {"test_equality", "test_families", "test_every_family", "test_cuda_attention", "test_cuda_kernels",
        "test_cuda_drafting"}


@pytest.fixture(scope="module")
def core(request) -> list[tuple[str, str, dict[str, Any]]]:
    """File, function and parameters of every test of these files that the core has."""
    collected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    if not {item.path.stem for item in collected} >= READ:
        pytest.skip("the tests of tests/promise and tests/unit are not collected; make test collects them")
    return [(item.path.stem, item.originalname, item.callspec.params if hasattr(item, "callspec") else {})
            for item in collected if item.path.stem in READ and not item.get_closest_marker("full")]


def values(core: list[tuple[str, str, dict[str, Any]]], file: str, function: str, name: str) -> set[str]:
    """The values of one parameter of one test in the core; those of a fixture count."""
    found = {str(parameters[name]) for where, what, parameters in core if (where, what) == (file, function)}
    assert found, f"{file}.py has no {function} in the core"
    return found


def test_the_core_meets_every_drafter_and_every_lie(core):
    def met(function, name):
        return values(core, "test_equality", function, name)

    assert met("test_every_drafter_writes_the_plain_text", "drafter") == set(equality.DRAFTERS)
    assert met("test_a_lying_drafter_changes_nothing", "kind") == set(equality.LIARS)
    assert {name for name, _ in equality.DRAFTERS.values()} == DRAFTERS.keys() - {"plain"}


def test_the_core_meets_every_sampling_setting(core):
    assert "three settings" in values(core, "test_equality", "test_every_drafter_writes_the_plain_text", "extent")
    met = [setting for drafter in equality.DRAFTERS for setting in equality.settings_for(drafter)]
    assert {*met} == equality.SETTINGS.keys() and min(map(met.count, equality.SETTINGS)) >= 4


def test_the_core_meets_every_kernel(core):
    assert values(core, "test_equality", "test_every_kernel_keeps_the_promise", "name") == {*kernels.available()}
    assert {"test_cuda_attention", "test_cuda_kernels", "test_cuda_drafting"} <= {file for file, *_ in core}


def test_the_core_meets_every_family(core):
    ours = {kind for kind, _ in (families.FAMILIES | families.MIXTURES | families.HYBRIDS | families.CPU_FAMILIES
                                 | families.GEMMA4 | families.UNIFIED).values()}
    assert set(FAMILIES) <= ours
    dense = values(core, "test_families", "test_logits_agree_over_prefill_and_decode_at_far_positions", "made")
    special = values(core, "test_every_family", "test_the_models_are_those_of_transformers", "name")
    rows = values(core, "test_every_family", "test_rows_have_the_same_bits_one_by_one_together_and_in_a_tree", "made")
    assert dense == set(families.FAMILIES) and rows <= special
    assert special == {*families.CPU_FAMILIES, *families.GEMMA4, *families.UNIFIED, *families.MIXTURES,
                       *families.HYBRIDS}


def test_the_core_meets_every_pair_of_a_family_and_a_way_of_reading_the_cache(core):
    for file, made in (("test_families", families.FAMILIES), ("test_every_family", None)):
        met = {parameters["made"] for where, what, parameters in core
               if (where, what) == (file, "test_drafters_write_the_plain_text")
               and parameters["drafters"] == [*equality.READING.values()]}
        assert met == set(made) if made else len(met) >= 10
    assert {*equality.READING.values()} <= equality.DRAFTERS.keys()


@pytest.mark.full
def test_changes_select_the_tests_that_reach_them():
    def names(*changed):
        return {path.name for path in affected_tests(ROOT, map(Path, changed))}

    assert "test_server.py" in names("longdraft/server/replies.py") > names("docs/index.md") == {"test_documents.py"}
    assert "test_suffix.py" not in names("longdraft/server/replies.py") & names("longdraft/train/eagle.py")
    assert {"test_suffix.py", "test_kernels.py"} <= names("csrc/suffix.cpp")
    assert names("tests/unit/test_suffix.py") == {"test_suffix.py"}
    assert affected_tests(ROOT, [Path("pyproject.toml")]) is None
