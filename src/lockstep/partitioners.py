"""Partitioners: the number of shards of a variable on several servers, as ``tf.distribute.experimental.partitioners``."""

from lockstep.parameter_server.sharding import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
