"""The operating system and the machine.

    files.py    output files that are complete or named `.partial`, and input texts
    console.py  signal handlers and failures of stdout, for the command-line programs
    machine.py  a description of this machine, its memory, and its measured read bandwidth
    processor.py  what the system says of the processor: name, vector units, cores, cache
    limited.py  work on untrusted text in a child process, with limits of time, memory and stack
    timing.py   times of short calls
"""
