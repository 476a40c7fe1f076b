"""Public heads on the hub, by the model that they were trained for; which of them fit a model, and `--heads auto`.

    longdraft doctor --model Qwen/Qwen3-8B                # lists them
    longdraft generate "Once" --model Qwen/Qwen3-8B --heads auto

A model is recognised by its architecture and sizes. Several targets may have the same ones; then its name decides.
"""

from __future__ import annotations

import logging
import re
from typing import Literal, NamedTuple

from longdraft.checkpoint import hub
from longdraft.errors import ModelError, UsageError
from longdraft.model.config import ModelConfig
from longdraft.model.families import FAMILIES

log = logging.getLogger(__name__)
AUTO = "auto"  # of `heads`

HeadKind = Literal["dflash", "dflash2", "dspark", "jetspec", "eagle3", "mtp", "peagle"]
_EAGLE_KINDS = ("eagle3", "mtp", "peagle")  # which the drafter `eagle` uses; `block` uses all other kinds
_CURE = "name a head with --heads FOLDER or OWNER/HEAD, or train one with `longdraft train eagle` or `train block`"


class PublicHead(NamedTuple):
    """A head on the hub.

    repository  its hub id; "": it is in the files of the target itself, which are used without `--heads`
    licence     of the head or of the code that it was published with; "": unknown
    lacks       what longdraft lacks to load it; "": it loads
    """

    repository: str
    kind: HeadKind
    licence: str = ""
    lacks: str = ""

    @property
    def drafter(self) -> str:
        """The drafter that uses it."""
        return "eagle" if self.kind in _EAGLE_KINDS else "block"

    def __str__(self) -> str:
        of = ", ".join(filter(None, (self.kind, self.licence, self.lacks and f"not supported: {self.lacks}")))
        return f"{self.repository or 'in the files of the model itself'} ({of})"


class TargetSizes(NamedTuple):
    """The sizes by which a target is recognised."""

    layers: int
    hidden: int
    vocabulary: int


class KnownTarget(NamedTuple):
    """A model that public heads were trained for.

    family  its architecture, of `families.FAMILIES`
    sizes   None: not known here, so that only its name is compared
    heads   the preferred one first: kinds with pair terms, then other blocks, then chains
    """

    repository: str
    family: str
    sizes: TargetSizes | None
    heads: tuple[PublicHead, ...]

    def has_form_of(self, config: ModelConfig) -> bool:
        """Whether a model has the architecture and the sizes of this one."""
        own = FAMILIES[self.family]
        is_of_family = (own.head_norms == config.head_norms and own.has_sinks == config.has_sinks
                        and own.is_gemma4 == (config.gemma4 is not None)
                        and (own.hybrid is None) == (config.hybrid is None)
                        and (own.experts is None) == (config.experts is None))
        sizes = TargetSizes(config.num_layers, config.hidden_size, config.vocab_size)
        return is_of_family and self.sizes in (None, sizes)

    def is_named(self, model: str) -> bool:
        """Whether the name of a model, or the path of its files, contains this one's name."""
        name = self.repository.partition("/")[2].lower()
        return re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", model.lower().replace("_", "-")) is not None


_NATIVE = PublicHead("", "mtp")
_OF_GEMMA = "layers of Gemma 4 in a block head"
_QWEN3, _QWEN35 = 151936, 248320  # tokens of their vocabularies

TARGETS = (
    KnownTarget("Qwen/Qwen3-0.6B", "qwen3", TargetSizes(28, 1024, _QWEN3), (
        PublicHead("yosefw/Qwen3-0.6B-DSpark", "dspark"),)),
    KnownTarget("Qwen/Qwen3-1.7B", "qwen3", TargetSizes(28, 2048, _QWEN3), (
        PublicHead("rasyosef/Qwen3-1.7B-DSpark", "dspark", "Apache-2.0"),)),
    KnownTarget("Qwen/Qwen3-4B", "qwen3", TargetSizes(36, 2560, _QWEN3), (
        PublicHead("deepseek-ai/dspark_qwen3_4b_block7", "dspark", "MIT"),
        PublicHead("deepseek-ai/dflash_qwen3_4b_block7", "dflash", "MIT"),
        PublicHead("z-lab/Qwen3-4B-DFlash-b16", "dflash", "MIT"))),
    KnownTarget("Qwen/Qwen3-8B", "qwen3", TargetSizes(36, 4096, _QWEN3), (
        PublicHead("deepseek-ai/dspark_qwen3_8b_block7", "dspark", "MIT"),
        PublicHead("deepseek-ai/dflash_qwen3_8b_block7", "dflash", "MIT"),
        PublicHead("z-lab/Qwen3-8B-DFlash-b16", "dflash", "MIT"),
        PublicHead("JetSpec/jetspec-qwen3-8b", "jetspec", "MIT"),
        PublicHead("RedHatAI/Qwen3-8B-speculator.peagle", "peagle", "Apache-2.0"))),
    KnownTarget("Qwen/Qwen3-14B", "qwen3", TargetSizes(40, 5120, _QWEN3), (
        PublicHead("deepseek-ai/dspark_qwen3_14b_block7", "dspark", "MIT"),
        PublicHead("deepseek-ai/dflash_qwen3_14b_block7", "dflash", "MIT"))),
    KnownTarget("Qwen/Qwen3.5-0.8B", "qwen3_5_text", TargetSizes(24, 1024, _QWEN35), (
        PublicHead("r3lax/Qwen3.5-0.8B-DSpark", "dspark"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.5-4B", "qwen3_5_text", None, (
        PublicHead("z-lab/Qwen3.5-4B-DFlash", "dflash", "MIT"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.5-9B", "qwen3_5_text", TargetSizes(32, 4096, _QWEN35), (
        PublicHead("z-lab/Qwen3.5-9B-DFlash", "dflash", "MIT"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.5-27B", "qwen3_5_text", TargetSizes(64, 5120, _QWEN35), (
        PublicHead("z-lab/Qwen3.5-27B-DFlash", "dflash", "MIT"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.6-27B", "qwen3_5_text", TargetSizes(64, 5120, _QWEN35), (
        PublicHead("z-lab/Qwen3.6-27B-DFlash", "dflash", "MIT"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.8-27B", "qwen3_5_text", TargetSizes(64, 5120, _QWEN35), (
        PublicHead("incoai/Qwen3.8-27B-DFlash2", "dflash2"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", TargetSizes(40, 2048, _QWEN35), (
        PublicHead("z-lab/Qwen3.5-35B-A3B-DFlash", "dflash", "MIT"), _NATIVE)),
    KnownTarget("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe_text", TargetSizes(40, 2048, _QWEN35), (
        PublicHead("z-lab/Qwen3.6-35B-A3B-DFlash", "dflash", "MIT"), _NATIVE)),
    KnownTarget("meta-llama/Llama-3.2-1B-Instruct", "llama", TargetSizes(16, 2048, 128256), (
        PublicHead("rasyosef/Llama-3.2-1B-Instruct-DSpark", "dspark", "Llama licence"),)),
    KnownTarget("meta-llama/Llama-3.1-8B-Instruct", "llama", TargetSizes(32, 4096, 128256), (
        PublicHead("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "dflash", "MIT"),
        PublicHead("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"))),
    KnownTarget("openai/gpt-oss-20b", "gpt_oss", TargetSizes(24, 2880, 201088), (
        PublicHead("z-lab/gpt-oss-20b-DFlash", "dflash", "MIT"),
        PublicHead("amazon/gpt-oss-20b-p-eagle", "peagle", "Apache-2.0"))),
    KnownTarget("openai/gpt-oss-120b", "gpt_oss", TargetSizes(36, 2880, 201088), (
        PublicHead("z-lab/gpt-oss-120b-DFlash", "dflash", "MIT"),
        PublicHead("amazon/gpt-oss-120b-p-eagle", "peagle", "Apache-2.0"))),
    KnownTarget("google/gemma-4-12B-it", "gemma4_unified_text", None, (
        PublicHead("deepseek-ai/dspark_gemma4_12b_block7", "dspark", "MIT", _OF_GEMMA),
        PublicHead("deepseek-ai/dflash_gemma4_12b_block7", "dflash", "MIT", _OF_GEMMA))),
)


def fitting_targets(model: str, config: ModelConfig) -> tuple[KnownTarget, ...]:
    """The targets that a model may be: those with its architecture and sizes, and of these the ones that its name or
    path names, if it names any."""
    alike = [target for target in TARGETS if target.has_form_of(config)]
    named = [target for target in alike if target.is_named(hub.from_anywhere(model))]
    return tuple(named or [target for target in alike if target.sizes])


def chosen_heads(heads: str | None, model: str, config: ModelConfig, needs: str, options: hub.Hub) -> str | None:
    """`heads` as it is given, or for "auto" the hub id of the first public head that fits, downloaded now.

    needs    of the drafter: the part that it cannot work without, or ""
    options  of the hub; offline, heads that are not in its cache are passed over

    Raises UsageError if there is none, and ModelError if none can be downloaded.
    """
    if heads != AUTO:
        return heads
    targets = fitting_targets(model, config)
    if not targets:
        raise UsageError(f"heads is {AUTO!r}, but no public head is known for a model with the sizes and the name of "
                         f"{model!r}; {_CURE}", "heads")
    known = [head for target in targets for head in target.heads]
    usable = [head for head in known if head.repository and not head.lacks and needs in ("", head.drafter)]
    names = " or ".join(target.repository for target in targets)
    if not usable:
        raise UsageError(f"heads is {AUTO!r}, but of the public heads for {names} this drafter can use none: "
                         f"{'; '.join(map(str, known))}; {_CURE}", "heads")
    if len(targets) > 1:
        raise UsageError(f"heads is {AUTO!r}, but {model!r} may be {names}, which have the same sizes; choose one of "
                         f"their heads with --heads: {', '.join(head.repository for head in usable)}", "heads")
    errors = []
    for head in usable:
        try:
            hub.resolve(head.repository, options)
        except ModelError as error:
            errors.append(error)
            continue
        for passed in errors:
            log.warning("--heads auto: passed over a head: %s", passed)
        why = "name" if targets[0].is_named(hub.from_anywhere(model)) else "architecture and sizes"
        others = "; ".join(str(each) for each in known if each != head)
        log.warning("--heads auto: %s, because %s has the %s of %s%s", head, model, why, names,
                    others and f"; other heads: {others}")
        return head.repository
    raise ModelError(f"heads is {AUTO!r}, but no head for {names} can be downloaded: {errors[0]}") from errors[0]
