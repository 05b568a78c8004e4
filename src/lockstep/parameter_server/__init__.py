"""Training on parameter servers: variables on servers, tasks, and chief, workers, servers and evaluator in ``fit`` and in custom loops."""
