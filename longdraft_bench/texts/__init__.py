"""Measurements on whole texts: speed, acceptance, perplexity, and what several texts share.

    length        one long text by several drafters in turns
    batch         texts side by side, against one after another and by drafters in turns
    replay        drafters without a model, on a written text
    perplexity    nats per token by quantisation, and by position in a text
    acceptance    tokens for each forward with trained parts
    samplers      what samplers do to a long text, and what they cost
    reuse         prefix reuse and snapshots
"""
