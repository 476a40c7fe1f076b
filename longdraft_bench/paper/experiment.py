"""An experiment as data: which texts are written, by which systems, and which tables are read from them.

    name = "paper"
    reference = "plain"                         # the system that all systems are compared with
    [scales.small]                              # length of the texts; the command selects one
    prefix = 0.5                                # of the prompt lengths below
    turn = 256                                  # new tokens of a system's turn
    lengths = [2048, 4096]                      # new tokens at which the tables are read
    [base]                                      # defaults of all cases
    prefill = 4096
    sampling = { min_p = 0.1 }
    [profiles."8B"]                              # settings of one model, chosen by --profile
    sampling = { top_p = 0.9 }
    [systems.medusa]
    drafter = "medusa"
    options = { tree = "3,3,3" }                # "prefill" or "prefill/2": the prompt's length
    [[tables]]
    id = "3"
    measures = ["alpha", "speedup"]
    [[tables.cases]]
    name = "Medusa, prefix {prefill}"
    system = "medusa"
    prefill = 2048
    paper = { "8B" = { alpha = [0.35] } }       # published values at the table's lengths

Cases with equal texts share them: each text is written once, by all its systems in turns.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from longdraft.errors import UsageError, check
from longdraft.request.sampling_params import SamplingParams
from longdraft_bench.systems import System

FOLDER = Path(__file__).parent / "experiments"
MEASURES = ("alpha", "beta", "speedup", "speedup_weak", "tau", "minutes", "minutes_reference",
            "tokens_per_second", "distinct_1", "distinct_2", "distinct_3", "distinct_4", "distinct_mean")

Published = Mapping[str, Mapping[str, Sequence[float]]]  # paper's model -> measure -> values


@dataclass(frozen=True)
class Scale:
    """The length of the texts.

    lengths  new tokens at which the tables are read; the last one ends the text
    turn     new tokens of a turn
    prefix   factor of the prompt lengths
    """

    lengths: tuple[int, ...]
    turn: int = 1000
    prefix: float = 1.0

    def __post_init__(self) -> None:
        check(bool(self.lengths) and list(self.lengths) == sorted(set(self.lengths)) and self.lengths[0] >= 1,
              "lengths", list(self.lengths), "numbers that rise")
        check(self.turn >= 1, "turn", self.turn, "1 or more")
        check(self.prefix > 0, "prefix", self.prefix, "above 0")


@dataclass(frozen=True)
class Case:
    """A row of a table: one system on one type of text.

    name    {prefill} is replaced by the prompt's length
    at      new tokens at which it is read; 0: the table's lengths
    paper   published values
    """

    name: str
    system: str
    prefill: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    at: int = 0
    paper: Published = field(default_factory=dict)


@dataclass(frozen=True)
class TableSpec:
    """A table. Layout `lengths` has a column per length; `final` has a column per measure, read at the end.

    figure  of `bench report`. sweep: each measure by the cases; repeats: the texts, with repeated passages highlighted
    """

    id: str
    title: str
    measures: tuple[str, ...]
    cases: tuple[Case, ...]
    layout: str = "lengths"
    note: str = ""
    figure: str = ""

    def __post_init__(self) -> None:
        check(self.figure in ("", "sweep", "repeats"), f"figure of table {self.id}", self.figure, "sweep or repeats")
        check(not self.figure or self.layout == "final", f"layout of table {self.id}", self.layout,
              "final, with a figure")
        check(self.layout in ("lengths", "final"), f"layout of table {self.id}", self.layout, "lengths or final")
        for measure in self.measures:
            check(measure in MEASURES, f"a measure of table {self.id}", measure, ", ".join(MEASURES))


@dataclass(frozen=True)
class TextSpec:
    """The properties that determine a text, apart from the model."""

    prefill: int
    sampling: SamplingParams
    stretch: int  # which part of the prompt file is the prompt

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def about(self) -> dict[str, Any]:
        """The entries of its record in the results."""
        found = json.loads(json.dumps(asdict(self)))
        del found["sampling"]["from_model"]
        return dict(found)

    def is_of(self, about: Mapping[str, Any]) -> bool:
        """Whether a record is of this text. Settings that an old record lacks had their default values."""
        defaults = {entry.name: entry.default for entry in fields(SamplingParams)}
        sampling = self.about["sampling"]
        old = {name: about["sampling"].get(name, _as_json(defaults[name])) for name in sampling}
        return (self.prefill, self.stretch, sampling) == (about["prefill"], about["stretch"], old)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Profile:
    """The settings with which the paper measured one model (its table 10). `published` are those that only systems of
    version `published` have."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """weak: the name of the system that `speedup_weak` compares with; "": there is none."""

    name: str
    title: str
    reference: str
    scales: Mapping[str, Scale]
    systems: Mapping[str, System]
    tables: tuple[TableSpec, ...]
    prefill: int
    sampling: Mapping[str, Any]
    default_scale: str = "default"
    marks: tuple[int, ...] = ()  # `at` of all cases, including those of tables that are not chosen
    weak: str = ""
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    profile: str = ""  # of `profiles`; "": none is chosen

    def scale(self, name: str) -> Scale:
        check(name in self.scales, "--scale", name, ", ".join(self.scales))
        return self.scales[name]

    def chosen(self, ids: Sequence[str]) -> Experiment:
        """The experiment with only these tables, or with all if none is named."""
        known = [table.id for table in self.tables]
        for wanted in ids:
            check(wanted in known, "--tables", wanted, ", ".join(known))
        return replace(self, tables=tuple(table for table in self.tables if not ids or table.id in ids))

    def with_profile(self, name: str) -> Experiment:
        """The experiment with one model's settings; of the published values, only that model's."""
        known = {key.lower(): key for key in self.profiles}
        check(name.lower() in known, "--profile", name, ", ".join(self.profiles) or "none for this experiment")
        key = known[name.lower()]

        def only(case: Case) -> Case:
            return replace(case, paper={key: case.paper[key]} if key in case.paper else {})

        return replace(self, profile=key, tables=tuple(
            replace(table, cases=tuple(map(only, table.cases))) for table in self.tables))

    def with_draft_model(self, name: str) -> Experiment:
        """The experiment with a smaller model for the drafters that use one."""
        systems = {key: replace(system, options={**system.options, "model": name})
                   if system.drafter in ("triforce", "draft-model") else system for key, system in self.systems.items()}
        return replace(self, systems=systems)

    def name_of(self, case: Case, scale: Scale) -> str:
        """The case's name with the prompt's length at this scale."""
        return case.name.replace("{prefill}", f"{self.prefill_of(case, scale):,}")

    def prefill_of(self, case: Case, scale: Scale) -> int:
        return max(2, round((case.prefill or self.prefill) * scale.prefix))

    def text_of(self, case: Case, scale: Scale, seed: int, stretch: int) -> TextSpec:
        system, profile = self.systems[case.system], self.profiles.get(self.profile, Profile())
        published = profile.published if system.version == "published" else {}
        settings = {**self.sampling, **profile.sampling, **published, **system.sampling, **case.sampling}
        params = SamplingParams.from_names({**settings, "max_new_tokens": scale.lengths[-1], "seed": seed,
                                            "ignore_eos": True, "on_loop": "off"})
        return TextSpec(self.prefill_of(case, scale), params, stretch)

    def plan(self, scale: Scale, seeds: Sequence[int], stretches: int) -> dict[TextSpec, list[str]]:
        """The texts to write, each with the names of its systems, the reference first."""
        found: dict[TextSpec, list[str]] = {}
        for seed, stretch in ((seed, stretch) for stretch in range(stretches) for seed in seeds):
            for table in self.tables:
                for case in table.cases:
                    names = found.setdefault(self.text_of(case, scale, seed, stretch), [self.reference])
                    wanted = [self.weak] if self.weak and "speedup_weak" in table.measures else []
                    names += [name for name in (*wanted, case.system) if name not in names]
        return found

    def ends(self, scale: Scale) -> list[int]:
        """New tokens at which turns end."""
        asked = {mark for mark in self.marks if mark < scale.lengths[-1]}
        return sorted({*range(scale.turn, scale.lengths[-1], scale.turn), *scale.lengths, *asked})


def load_experiment(name: str) -> Experiment:
    """Read an experiment that comes with longdraft, or a .toml file. Raises UsageError that names the fault."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
        raise UsageError(f"no experiment {name!r}; give a .toml file, or one of: {known}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    try:
        return parse_experiment(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def parse_experiment(data: Mapping[str, Any]) -> Experiment:
    rest = dict(data)
    scales = {name: _make(Scale, f"scale {name}", given) for name, given in _taken(rest, "scales", dict).items()}
    systems = {name: _make(System, f"system {name}", given) for name, given in _taken(rest, "systems", dict).items()}
    profiles = {name: _make(Profile, f"profile {name}", given)
                for name, given in _taken(rest, "profiles", dict).items()}
    base = _taken(rest, "base", dict)
    tables = tuple(_table(given) for given in _taken(rest, "tables", list))
    found: Experiment = _make(Experiment, "experiment", {
        **rest, "scales": scales, "systems": systems, "tables": tables, "profiles": profiles,
        "prefill": base.get("prefill", 4096), "sampling": base.get("sampling", {}),
        "marks": tuple(case.at for table in tables for case in table.cases if case.at)})
    check(bool(scales), "scales", list(scales), "at least one")
    weak = [found.weak] if found.weak else []
    for name in (found.reference, *weak, *(case.system for table in tables for case in table.cases)):
        check(name in systems, "system", name, ", ".join(systems))
    check(not systems[found.reference].has_own_text, "reference", found.reference, "a system with rule keyed")
    needs_weak = any("speedup_weak" in table.measures for table in tables)
    check(not needs_weak or bool(found.weak), "weak", found.weak, "a system of version weak, for speedup_weak")
    for table in tables:  # report a wrong setting now, not after hours
        for case in table.cases:
            text = found.text_of(case, next(iter(scales.values())), 0, 0)
            for name in (found.reference, case.system):
                systems[name].choice(text.prefill)
    return found


def _table(given: Mapping[str, Any]) -> TableSpec:
    rest = dict(given)
    where = f"table {rest.get('id', '?')}"
    cases = tuple(_make(Case, f"a case of {where}", case) for case in _taken(rest, "cases", list))
    found: TableSpec = _make(TableSpec, where, {**rest, "cases": cases, "measures": tuple(rest.get("measures", ()))})
    return found


def _taken(data: dict[str, Any], key: str, kind: type) -> Any:
    value = data.pop(key, kind())
    check(isinstance(value, kind), key, value, "a table" if kind is dict else "tables [[...]]")
    return value


def _make(kind: type[Any], what: str, given: Mapping[str, Any]) -> Any:
    """Build a dataclass from a TOML table. Raises UsageError that names unknown and missing keys."""
    known = {entry.name: entry for entry in fields(kind)}
    for key in given:
        check(key in known, f"a key of {what}", key, ", ".join(known))
    given = {key: tuple(value) if key == "lengths" else value for key, value in given.items()}
    try:
        return kind(**given)
    except TypeError as error:
        raise UsageError(f"{what} is incomplete or of the wrong kind: {str(error).partition(') ')[2] or error}; it has "
                         f"{', '.join(known)}") from error
