"""Triton kernels for CUDA devices. For tests, Triton's interpreter runs the same kernels on the CPU.

The `jit_*` modules hold the Triton kernels, the other modules launch them. Each module imports only modules above it:

    launch  graph_cache           sizes, launch options, argument checks; captured CUDA graphs
    cache_format                  of keys and values: their bits
    linear  kv_store              weights; keys and values
    few_bits                      weights of 4 to 8 bits in groups
    attention                     of the rows of trees
    device_text  text_rows        the tokens and rules of texts; their rows, edited and filtered
    choices                       logits, and the choice of tokens
    delta  experts                gated delta nets; mixtures of experts
    operations                    the operations of one decoder layer
    prefill                       all layers, for a chunk of the prompt
    forward_buffers  layers       the memory of a forward of a few rows, and all layers over it
    chain_rows  model_chain       chains of drafts of texts: their rows; with a model
    decoder                       all layers, for a few rows at a time, in graphs
    layer_chain  head_places      chains of drafts with trained layers, and with heads
    ranker                        what drafts the chains of a request
    row_invariance                tests a decoder on the device at hand
    kernels                       `CudaKernels`, the implementation of `longdraft.kernels.interface.Kernels`

Import these modules, but for `cache_format`, only where a CUDA device is used: PyTorch installs Triton only in its
CUDA builds.
"""
