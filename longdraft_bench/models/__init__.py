"""Models to measure with, without a download: `longdraft bench model random`, `stretched` and `gguf`.

    shapes             sizes of known models, as entries of their config.json
    random_model       a checkpoint of random weights: its costs, but no predictions
    random_weights     models, heads and layers of random weights in memory
    stretched          the cost of a large model with the predictions of a small one
    stretched_model    writes a stretched model to a folder
    stretched_eagle    the same of an EAGLE head
"""
