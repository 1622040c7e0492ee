"""Context parallelism: the tokens of a sequence distributed over ranks, for any mask."""

from flexmask.distributed.sharding import Sharding, shard_sequence

__all__ = ["Sharding", "shard_sequence"]
