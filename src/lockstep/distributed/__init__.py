"""Distributed training: the process group of a job, JAX over its processes, and the checks that they are equal."""
