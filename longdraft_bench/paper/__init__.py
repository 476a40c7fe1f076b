"""TokenSwift's tables and ablations, measured again: `longdraft bench paper`, `ablation`, `run` and `report`.

    experiment         an experiment as data, read from experiments/*.toml
    run                runs it: each text is written by all its systems in turns
    measures           alpha, beta, speed-up and the other measures, and the experiment's tables
    published, rules   drafting and verification of the published code; weak_loop, its plain decoding
    case_figures, repeats    figures of tables, and texts with their repeated passages
    extrapolate        whole texts estimated from segments
    document_tables    writes the tables of docs/benchmarks.md
"""
