"""Measurements of this machine and of a model's steps on it.

    limits       read bandwidth and peak arithmetic
    device       a GPU's clocks and bandwidth, and how many caches fit
    kernels      each kernel by itself
    roofline     a step of plain decoding beside its floor
    forwards     forwards of random hybrids, mixtures and Gemmas
    eagle_cost   a draft step of an EAGLE head beside a plain step
    block_cost   a draft of a block head beside a plain step
    memory       where the memory of a process is
"""
