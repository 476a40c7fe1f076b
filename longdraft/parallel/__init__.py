"""Tensor parallelism: each rank holds a part of every weight, and all ranks work on the same text.

    torchrun --nproc-per-node 2 -m longdraft generate "It was" --tensor-parallel 2

    shard.py       the part of a weight that each rank holds
    kernels.py     kernels whose weights are distributed over the ranks
    group.py       messages between ranks: sums in a fixed order, concatenated parts, broadcasts from rank 0
    rank_group.py  coordination: rank 0 leads, the other ranks follow
"""

from longdraft.parallel.group import ProcessGroup, in_torchrun, join
from longdraft.parallel.kernels import ColumnParallel, ParallelKernels, RowParallel, local_kernels, shard_of
from longdraft.parallel.rank_group import RankGroup, Request, RequestStopped, SingleProcess
from longdraft.parallel.shard import WHOLE, Pick, Shard

__all__ = ["WHOLE", "ColumnParallel", "ParallelKernels", "Pick", "ProcessGroup", "RankGroup", "Request",
           "RequestStopped", "RowParallel", "Shard", "SingleProcess", "in_torchrun", "join", "local_kernels",
           "shard_of"]
