"""Small models with the tokenizer and the chat template of a family that thinks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from helpers.checkpoints import make_checkpoint, write_chain

# A template in the manner of Qwen3: it opens the thought, or closes it where thinking is turned off.
OPENING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}")
TOKENS = ("<|im_start|>", "<|im_end|>")  # special ones of that template
TAGS = ("<think>", "</think>")


def make_thinker(folder: Path, template: str = OPENING_TEMPLATE, special: Sequence[str] = TOKENS,
                 added: Sequence[str] = (*TAGS, "Wait"), answer: Sequence[str] = ()) -> Path:
    """A model folder. answer: the tokens that it writes greedily, after the last of `special`; empty: a random model"""
    model = make_checkpoint(folder, tie_word_embeddings=not answer)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys((*added, *answer))
                          if token not in known])
    tokenizer.save(str(folder / "tokenizer.json"))
    if answer:
        write_chain(model, [tokenizer.token_to_id(token) for token in (*special[-1:], *answer, "</s>")])
        model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    return folder
