"""Training on parameter servers: chief, workers, servers and evaluator of a job, in ``fit`` and in custom training loops."""
