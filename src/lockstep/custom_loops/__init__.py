"""Custom training loops: ``strategy.run``, per-replica values, reductions and distributed data sets."""
