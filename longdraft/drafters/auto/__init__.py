"""`auto`: the drafter that measures the other drafters while it writes, and uses the one that writes fastest.

    drafter.py     `AutoDrafter`
    selector.py    which candidate drafts next
    knowledge.py   what the requests of a model share: measured rates and costs
    acceptance.py  acceptance rates by depth
    confidence.py  when a chain of drafts ends
    costs.py       seconds of forwards and drafts
    settings.py    with which options the drafters are tried
"""
