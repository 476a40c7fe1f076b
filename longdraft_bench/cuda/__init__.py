"""`longdraft bench cuda`: uses a visit to a CUDA device in full, in slices that stand alone.

    plan     the slices and their parts, on a device and in Triton's interpreter
    visit    the JSON documents and the driver: parts run in a process of their own, which may crash or hang
    worker   the process that runs parts
    models   stretched models on the device, random ones (random_models), and its clock
    checks   exactness: tests, rows of trees, kernels against the reference, a memory checker
    speed    rates, kernels, steps and prefills against the memory's floor
    switches what can be turned off, on and off
    families hybrids, mixtures of experts, and chains that trained layers draft for several texts
    texts    equal texts, drafters, long runs
    decide   the slice `decide`: switches, omitted kernels, drafters of chosen agreement, windows of a long text
    skeletons, skeleton.cu  what boundaries between kernels cost, and what a persistent kernel could stream
    predictions  what `decide` should find on an H100 and an H200
"""
