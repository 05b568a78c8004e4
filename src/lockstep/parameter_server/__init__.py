"""The processes of a job with servers of variables, as trainers: chief, workers, servers and evaluator in one call of ``fit``."""
