"""A model larger than one device: ranks that hold a part of every weight each, and work on one text together.

    torchrun --nproc-per-node 2 -m longdraft generate "It was" --tensor-parallel 2

    group.py    what ranks tell one another: sums in a fixed order, parts put together, what rank 0 decides
    kernels.py  a set of kernels whose weights may be spread over the ranks
    shard.py    which part of a weight is whose
    rank_group.py  rank 0 leads: requests and cancels, and nothing else, go to the others
"""

from longdraft.parallel.group import Group, in_torchrun, join
from longdraft.parallel.kernels import ColumnParallel, ParallelKernels, RowParallel, local, part_of
from longdraft.parallel.rank_group import RankGroup, Request, SingleProcess, Stopped
from longdraft.parallel.shard import WHOLE, Pick, Shard

__all__ = ["WHOLE", "ColumnParallel", "Group", "ParallelKernels", "Pick", "RankGroup", "Request", "RowParallel", "Shard",
           "SingleProcess", "Stopped", "in_torchrun", "join", "local", "part_of"]
