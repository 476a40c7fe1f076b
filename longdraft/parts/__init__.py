"""Parts that draft for a target model: what was trained for it, and the copy of its own weights.

    auxiliary.py      which parts a model has
    heads.py          TokenSwift's heads; medusa.py, Medusa's
    glide.py          a layer that reads the target's cache (LongSpec)
    eagle.py          EAGLE heads (eagle_config.py, eagle_files.py, eagle_probe.py)
    block.py          block heads (block_config.py, block_files.py, block_probe.py)
    head_config.py    what both kinds of heads have in common: config.json (head_tensors.py: tensors; probe_text.py)
    native_heads.py   multi-token prediction (MTP) layers that a model was trained with
    public_heads.py   heads on the hub, by the model that they were trained for
    draft_copy.py     a quantised copy of the target's weights
"""
