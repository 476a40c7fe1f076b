"""Sampling defaults from a model's `generation_config.json` or GGUF metadata.

They apply where a request sets nothing else:

    defaults = read_defaults(folder)
    defaults.params({"max_new_tokens": 1000, "temperature": 0.8})    # top_p and the others from the file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.gguf.metadata import sampling_of
from longdraft.errors import UsageError
from longdraft.request.sampling_params import ALIASES, SamplingParams
from longdraft.request.settings import SettingScope, names_of

GENERATION_CONFIG = "generation_config.json"
# Names in the file of the settings that it may have.
SUPPORTED = [name for name, each in names_of(SamplingParams).items() if SettingScope.MODEL in each.scopes]
# Settings that would change the text and that longdraft does not have, with the values that turn them off.
FOREIGN: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (), "begin_suppress_tokens": (), "constraints": (), "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,),
    "exponential_decay_length_penalty": (), "force_words_ids": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "guidance_scale": (1,), "num_beam_groups": (1,),
    "num_beams": (1,), "penalty_alpha": (0,), "sequence_bias": (), "suppress_tokens": (), "top_h": (1,),
    "watermarking_config": (),
}
# Values that transformers takes and longdraft does not have (least, most), with one that gives the same text.
_LIMITS = {"temperature": (5e-324, 9.99e-4, 0.0), "min_p": (1.0, 1.0, 1 - 2**-24)}


@dataclass(frozen=True)
class Defaults:
    """The sampling defaults of a model.

    settings  longdraft's name -> value, and `do_sample` if the file has it
    ignored   settings of the file that longdraft cannot use, each with the reason
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters: `given`, else these defaults, else the built-in ones.

        given  by longdraft's names, Hugging Face's or OpenAI's; None counts as not given
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        names = {ALIASES.get(name, name) for name in chosen}
        if "temperature" in names:
            names.add("do_sample")  # an explicit temperature overrides the file's do_sample
        if chosen.get("do_sample") is False:
            names.add("temperature")
        kept = {name: value for name, value in self.settings.items() if name not in names}
        params = SamplingParams.from_names(kept | chosen)
        is_greedy = kept.get("do_sample") is False
        used = (set(kept) - {"do_sample"}) | ({"temperature"} if is_greedy else set())
        return replace(params, from_model=tuple(sorted(used)))


def read_defaults(folder: Path) -> Defaults:
    """The defaults of a model folder or a GGUF file; empty if it has none."""
    if folder.is_file():
        found, foreign = sampling_of(open_gguf(folder))
        defaults = parse_defaults(found)
        return replace(defaults, ignored=(*defaults.ignored, *foreign))
    path = folder / GENERATION_CONFIG
    return parse_defaults(read_json(path)) if path.exists() else Defaults()


def parse_defaults(config: Mapping[str, Any]) -> Defaults:
    """Translate the dictionary of a `generation_config.json`. Settings that cannot be used are listed as ignored."""
    settings: dict[str, Any] = {}
    ignored = [f"{name} {config[name]!r} (not supported)" for name, off in FOREIGN.items()
               if not is_off(config.get(name), off)]
    for name in SUPPORTED:
        if (value := config.get(name)) is None:
            continue
        try:
            settings[ALIASES.get(name, name)] = _validated(name, within_limits(name, value))
        except UsageError as error:
            ignored.append(str(error).replace(" is ", " ", 1))
    if isinstance(do_sample := config.get("do_sample"), bool):
        settings["do_sample"] = do_sample
    elif do_sample is not None:
        ignored.append(f"do_sample {do_sample!r}; allowed: true or false")
    return Defaults(settings, tuple(ignored))


def within_limits(name: str, value: Any) -> Any:
    """The value of a setting, or one within longdraft's limits that gives the same text: temperature 1e-6 is greedy."""
    least, most, same = _LIMITS.get(name, (1, 0, None))
    is_beyond = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    return same if is_beyond else value


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether an unsupported setting has no effect: it is not given, empty, or one of the values `off`."""
    return value is None or value is False or value in ([], {}, *off)


def describe_defaults(params: SamplingParams) -> str:
    """The settings that came from the model, as text: `temperature 0.6, top-p 0.95`."""
    return ", ".join(f"{name.replace('_', '-')} {_format(getattr(params, name))}" for name in params.from_model)


def _validated(name: str, value: Any) -> Any:
    """The value as SamplingParams takes it. Raises UsageError if it is out of range or of the wrong type."""
    return getattr(SamplingParams.from_names({name: value}), ALIASES.get(name, name))


def _format(value: object) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else f"{value:g}"
