"""The compiled CPU kernels: `csrc/`, built as the module `_cpu`.

    native.py      the compiled module, or the reason why it is missing
    kernels.py     `CpuKernels`, the implementation of `longdraft.kernels.interface.Kernels`
    decoder.py     all layers of a decoder in one call
    chain.py       a whole draft chain in one call
    delta.py       gated delta nets
    remainder.py   the fit of a partial cache's remainder in one call
    store.py       weights and KV stores, and the checks of every argument
    vocabulary.py  a part of a vocabulary, and the rows of a head for it
"""
