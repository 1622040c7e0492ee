"""Context parallelism: the tokens of a sequence distributed over ranks, for any mask.

Takes masks, the length of a sequence and a process group; gives a :class:`Sharding`, which says what each rank holds and
computes, and a :class:`ContextParallel`, inside which attention runs over all ranks.
"""

from flexmask.distributed.context_parallel import ContextParallel
from flexmask.distributed.sharding import Sharding, shard_sequence

__all__ = ["ContextParallel", "Sharding", "shard_sequence"]
