"""Into how many shards a variable is cut for several servers, as ``tf.distribute.experimental.partitioners``."""

from lockstep.parameter_server.variables.size_partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
