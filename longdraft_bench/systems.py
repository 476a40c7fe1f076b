"""A system of an experiment: what writes a text, as data, and the engine that it writes with.

    System("tokenswift", {"tree": "1,3,3,3"}, rule="per-path", version="published")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longdraft import drafters
from longdraft.checkpoint import hub
from longdraft.engine.engine import Engine
from longdraft.engine.loaded_model import DrafterChoice
from longdraft.errors import check
from longdraft.parts.heads import load_heads
from longdraft_bench.paper import published, weak_loop

RULES = ("keyed", "independent", "per-path")
VERSIONS = ("ours", "published", "weak")


@dataclass(frozen=True)
class System:
    """A drafter with its options, and the verification rule (paper/rules.py).

    version   ours; published: drafting as in TokenSwift's code (paper/published.py); weak: plain decoding
              without our kernels (paper/weak_loop.py)
    sampling  settings of all texts that it writes, such as the published code's smallest number of tokens
    heads     medusa: drafts with the heads that --medusa-heads gives; "": with the model's
    """

    drafter: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "keyed"
    version: str = "ours"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    heads: str = ""

    def __post_init__(self) -> None:
        check(self.rule in RULES, "rule", self.rule, ", ".join(RULES))
        check(self.drafter in drafters.DRAFTERS, "drafter", self.drafter, ", ".join(drafters.DRAFTERS))
        check(self.version in VERSIONS, "version", self.version, ", ".join(VERSIONS))
        check(self.version != "weak" or self.drafter == "plain", "drafter", self.drafter, "plain, with version weak")
        check(self.heads in ("", "medusa"), "heads", self.heads, "medusa, or none")

    @property
    def has_own_text(self) -> bool:
        """Whether its text may differ from the reference's: its rule is not exact, or its arithmetic is another."""
        return self.rule == "per-path" or self.version == "weak"

    def choice(self, prefill: int) -> DrafterChoice:
        """Its drafter with parsed options. Raises UsageError."""
        return published.new_choice(self.drafter, self.version, self.options_for(prefill))

    @classmethod
    def named(cls, setting: str) -> System:
        """ "magicdec,chain=6" -> the drafter and its options. Raises UsageError for anything else."""
        name, *pairs = setting.split(",")
        check(all("=" in pair for pair in pairs), "drafter", setting, "a name with options, such as magicdec,chain=6")
        return cls(name, dict(pair.split("=", 1) for pair in pairs))

    def options_for(self, prefill: int) -> dict[str, Any]:
        """The options, with "prefill" and "prefill/N" replaced by numbers of tokens."""
        return {name: _resolved(value, prefill) for name, value in self.options.items()}


def systems_named(settings: Sequence[str]) -> dict[str, System]:
    """The system of each setting. The same setting again is a control, whose ratio to the first shows the noise: its
    name is then "plain (2)". Raises UsageError."""
    systems: dict[str, System] = {}
    for index, setting in enumerate(settings):
        again = settings[: index + 1].count(setting)
        systems[setting if again == 1 else f"{setting} ({again})"] = System.named(setting)
    return systems


def _resolved(value: Any, prefill: int) -> Any:
    if not isinstance(value, str) or not value.startswith("prefill"):
        return value
    divisor = value.removeprefix("prefill").removeprefix("/") or "1"
    check(divisor.isdecimal() and int(divisor) > 0, "option", value, "prefill or prefill/NUMBER")
    return prefill // int(divisor)


class Engines:
    """The engines of an experiment's systems: the one that is measured, and variants of it, loaded when needed.

    medusa_heads  folder or hub id of heads trained as Medusa's, for systems that draft with them; None: these systems
                  draft with the model's own heads
    """

    def __init__(self, engine: Engine, medusa_heads: str | None = None) -> None:
        self.engine = engine
        self._weak: Engine | None = None
        self._medusa = engine
        self.provenance: dict[str, Any] = {}  # beside that of the engine
        if medusa_heads:
            loaded = engine.loaded
            folder = hub.resolve(medusa_heads, loaded.hub_options)
            self._medusa = Engine(replace(loaded, heads=load_heads(folder, engine.model)), engine.choice)
            self.provenance = {"medusa_heads": folder.name}

    def of(self, system: System) -> Engine:
        if system.version == "weak":
            self._weak = self._weak or weak_loop.weak_engine(self.engine)
            return self._weak
        return self._medusa if system.heads == "medusa" else self.engine
