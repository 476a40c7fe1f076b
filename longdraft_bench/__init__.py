"""All measurements of longdraft: the commands of `longdraft bench`, and TokenSwift's tables measured again.

    cli, options    the commands: each package below has its own in commands.py
    document        the JSON document of a measurement, with the machine and the versions
    timing, turns   the runners: calls, and texts, take turns, so that a slow moment of the machine affects all
    systems, results    what writes a text in turns, and the records of its turns
    figures         all figures; tables are longdraft/report/table.py's

    paper/          TokenSwift's tables and ablations
    texts/          speed, acceptance and perplexity of whole texts
    machine/        this machine, kernels, steps of decoding, memory
    peers/          other engines
    cuda/           a visit to a CUDA device
    models/         models to measure with, without a download
    scale/          many devices and machines
    reliability/    kills, damaged inputs, a server under load and attack

longdraft itself imports nothing of this package. The results are in benchmarks/results/.
"""
