"""Writes tests/unit/golden/eagle.json: logits of `speculators`' own modules for the random heads of the tests.

    pip install speculators==0.9.0      # in an environment of its own; it needs transformers up to 5.19
    PYTHONPATH=tests python -m helpers.speculators_golden
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from helpers.checkpoints import HIDDEN, VOCAB
from helpers.eagle import Shape

FILE = Path(__file__).parents[1] / "unit" / "golden" / "eagle.json"
LENGTH, PASSES, ROWS = 10, 3, (2, 5, 6)  # rows of the text whose guesses are compared
OWN = dict(draft_vocab=32, has_own_embedding=True)
SHAPES: dict[str, dict[str, object]] = {
    "plain": OWN,
    "norm_before_residual": OWN | dict(norm_before_residual=True),
    "3.1, one norm": OWN | dict(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "3.1, a norm for each layer": OWN | dict(fc_norm=True, norm_output=True),
    "qwen3": OWN | dict(head_norms=True, dim=16),
    "two layers": OWN | dict(layers=2),
    "window": OWN | dict(window=6),
    "P-EAGLE": OWN | dict(mask=300, layers=2),
    "P-EAGLE, a norm for each layer": OWN | dict(mask=300, fc_norm=True, norm_before_residual=True),
}


def inputs() -> tuple[torch.Tensor, list[int]]:
    """States [3, T, hidden] of the target and T + 1 tokens."""
    generator = torch.Generator().manual_seed(21)
    states = torch.randn(3, LENGTH, HIDDEN, generator=generator)
    return states, torch.randint(2, VOCAB, (LENGTH + 1,), generator=generator).tolist()


def logits_of(shape: Shape) -> list[list[list[float]]]:
    """Logits [passes][ROWS][draft vocabulary] of speculators' module; of P-EAGLE [places][ROWS][draft vocabulary]."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.models.peagle import core as peagle
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    sizes = shape.layer_config() | {"rope_parameters": {"rope_type": "default", "rope_theta": shape.theta}}
    kind = Qwen3Config if sizes.pop("model_type") == "qwen3" else LlamaConfig
    layer = kind(**sizes)
    layer._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=PASSES)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    algorithm, about, made, more = "eagle3", Eagle3SpeculatorConfig, Eagle3DraftModel, {}
    if shape.mask is not None:
        algorithm, about, made = "peagle", PEagleSpeculatorConfig, PEagleDraftModel
        more = {"mask_token_id": shape.mask}
    config = about(
        transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab, fc_norm=shape.fc_norm,
        norm_before_residual=shape.norm_before_residual, norm_before_fc=shape.norm_before_fc,
        norm_output=shape.norm_output, **more, speculators_config=SpeculatorsConfig(
            algorithm=algorithm, default_proposal_method="greedy", proposal_methods=[method], verifier=verifier))
    module = made(config)
    module.load_vocab_mappings(shape.tensors["t2d"], shape.tensors["d2t"])
    module.load_state_dict({name: tensor for name, tensor in shape.tensors.items() if name not in ("t2d", "d2t")},
                           strict=False)
    found: list[torch.Tensor] = []
    module.lm_head.register_forward_hook(lambda head, given, result: found.append(result[0].detach()))
    states, tokens = inputs()
    given = dict(hidden_states=torch.cat(list(states), -1)[None], input_ids=torch.tensor([tokens[1:]]),
                 document_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    with torch.no_grad():
        if shape.mask is None:
            module(**given, ttt_steps=PASSES)
        else:  # masks after each of ROWS, in place of random ones
            anchors, depths = [*range(LENGTH), *ROWS * (PASSES - 1)], [0] * LENGTH
            depths += [depth for depth in range(1, PASSES) for _ in ROWS]
            peagle.generate_cod_sample_indices = lambda **settings: (torch.tensor(anchors), torch.tensor(depths))
            peagle.compute_metrics = lambda **results: (None, {})  # a loss, by kernels of a device
            module(**given, verifier_last_hidden_states=torch.zeros(1, LENGTH, shape.hidden))
            rows = [*ROWS, *range(LENGTH, len(anchors))]
            return [[[round(value, 5) for value in found[0][row].tolist()] for row in rows[place : place + len(ROWS)]]
                    for place in range(0, len(rows), len(ROWS))]
    return [[[round(value, 5) for value in logits[row].tolist()] for row in ROWS] for logits in found]


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({name: logits_of(Shape(**flags)) for name, flags in SHAPES.items()}) + "\n")


if __name__ == "__main__":
    main()
