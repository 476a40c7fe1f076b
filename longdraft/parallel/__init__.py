"""A model larger than one device: ranks that hold a part of every weight each, and work on one text together.

    torchrun --nproc-per-node 2 -m longdraft generate "It was" --tensor-parallel 2

    group.py    what ranks tell one another: sums in a fixed order, parts put together, what rank 0 decides
    kernels.py  a set of kernels whose weights may be spread over the ranks
    part.py     which part of a weight is whose
    team.py     rank 0 leads: requests and cancels, and nothing else, go to the others
"""

from longdraft.parallel.group import Group, in_torchrun, join
from longdraft.parallel.kernels import ParallelKernels, Spread, Summed, local, part_of
from longdraft.parallel.part import WHOLE, Part, Pick
from longdraft.parallel.team import Alone, Request, Stopped, Team

__all__ = ["WHOLE", "Alone", "Group", "ParallelKernels", "Part", "Pick", "Request", "Spread", "Stopped", "Summed",
           "Team", "in_torchrun", "join", "local", "part_of"]
