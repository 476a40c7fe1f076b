"""`auto`: the drafter that measures the other drafters while it writes, and uses the one that writes fastest.

    drafter.py      `AutoDrafter`
    observation.py  what is measured of a step
    policy.py       which candidate drafts next, how deep, and what is probed
    shared.py       what the requests of a model share: rates, costs, losses of probes
    acceptance.py   acceptance rates by depth and by node
    watch.py        drafts of candidates that read the text alone, beside another candidate
    costs.py        the model of the seconds of forwards and drafts, and the file that keeps them
    calibration.py  the measurement of these, once for each model and machine
    pace.py         how far the costs are off now
    step_costs.py   seconds of the next step by its rows
    report.py       which candidate wrote how many tokens
    settings.py     the constants
"""
