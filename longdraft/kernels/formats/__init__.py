"""Formats of quantised weights: their definition in plain PyTorch, which all kernels follow.

    int8.py    8 bits, one scale for each output channel
    int4.py    4 bits, a scale and a zero point for each group of 32 inputs
    groups.py  whole numbers in groups of 32 inputs, as other programs' files hold them
    mxfp4.py   4-bit floating-point numbers with a power of two for each group of 32 inputs
"""
