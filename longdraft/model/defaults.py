"""What a model's `generation_config.json` says of sampling: request over file over built-in.

    defaults = read_defaults(folder)
    defaults.params({"max_new_tokens": 1000, "temperature": 0.8})    # top-p and the rest as the file says
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longdraft.core import ALIASES, SamplingParams
from longdraft.errors import UsageError
from longdraft.model.config import read_json

FILE = "generation_config.json"
_TAKEN = ("temperature", "top_p", "top_k", "min_p", "eta_cutoff", "repetition_penalty", "stop_strings")
# What would change the text and is not ours, with the values that mean "off".
FOREIGN: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (), "begin_suppress_tokens": (), "constraints": (), "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,),
    "exponential_decay_length_penalty": (), "force_words_ids": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "guidance_scale": (1,), "no_repeat_ngram_size": (0,), "num_beam_groups": (1,),
    "num_beams": (1,), "penalty_alpha": (0,), "sequence_bias": (), "suppress_tokens": (), "top_h": (1,),
    "typical_p": (1,), "watermarking_config": (),
}


@dataclass(frozen=True)
class Defaults:
    """The sampling defaults of a model.

    settings  name -> value, of our names; `do_sample` among them where the file has it
    ignored   what the file says and longdraft does not do, each with its reason
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """`given` (our names, Hugging Face's or OpenAI's; None: left out) over these over the built-in ones."""
        chosen = {name: value for name, value in given.items() if value is not None}
        names = {ALIASES.get(name, name) for name in chosen}
        if "temperature" in names:
            names.add("do_sample")  # the file's: a temperature is asked for, whether or not it would sample
        if chosen.get("do_sample") is False:
            names.add("temperature")
        kept = {name: value for name, value in self.settings.items() if name not in names}
        params = SamplingParams.from_names(kept | chosen)
        is_greedy = kept.get("do_sample") is False
        used = (set(kept) - {"do_sample"}) | ({"temperature"} if is_greedy else set())
        return replace(params, from_model=tuple(sorted(used)))


def read_defaults(folder: Path) -> Defaults:
    """The defaults of a model folder; none where it has no file of them."""
    path = folder / FILE
    return parse_defaults(read_json(path)) if path.exists() else Defaults()


def parse_defaults(config: Mapping[str, Any]) -> Defaults:
    """Translate the dictionary of a `generation_config.json`. What cannot be used is named, not followed."""
    settings: dict[str, Any] = {}
    ignored = [f"{name} {config[name]!r} (not supported)" for name, off in FOREIGN.items()
               if not is_off(config.get(name), off)]
    for name in _TAKEN:
        if (value := config.get(name)) is None:
            continue
        try:
            settings[ALIASES.get(name, name)] = _checked(name, value)
        except UsageError as error:
            ignored.append(str(error).replace(" is ", " ", 1))
    if isinstance(do_sample := config.get("do_sample"), bool):
        settings["do_sample"] = do_sample
    elif do_sample is not None:
        ignored.append(f"do_sample {do_sample!r}; allowed: true or false")
    return Defaults(settings, tuple(ignored))


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a foreign setting changes nothing: it is not given, empty, or one of the values `off`."""
    return value is None or value is False or value in ([], {}, *off)


def describe_defaults(params: SamplingParams) -> str:
    """The settings that came from the model, for people: `temperature 0.6, top-p 0.95`."""
    return ", ".join(f"{name.replace('_', '-')} {_shown(getattr(params, name))}" for name in params.from_model)


def _checked(name: str, value: Any) -> Any:
    """The value as SamplingParams takes it. UsageError where it is out of range or of another kind."""
    if name == "stop_strings":
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list):
            raise UsageError(f"{name} is {value!r}; allowed: texts")
    return getattr(SamplingParams.from_names({name: value}), ALIASES.get(name, name))


def _shown(value: object) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else f"{value:g}"
