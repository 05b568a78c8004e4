"""Into how many shards a variable is cut for several servers, as ``tf.distribute.experimental.partitioners``."""

from lockstep.parameters.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
