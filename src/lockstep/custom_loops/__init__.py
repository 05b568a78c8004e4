"""For people who write their own training loop: values of replicas, ``strategy.run``, reductions, data sets."""
