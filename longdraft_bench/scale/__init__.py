"""Many devices and many machines: sizes, step times and fleets computed, tensor parallelism measured.

    sizes              memory and time for each token of known models
    scaling            a step of a model on several GPUs, from bytes, operations and links
    fleet              a simulated fleet of spot machines
    tensor_parallel    several ranks on this machine's cores
"""
