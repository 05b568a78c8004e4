"""The processes of one job as trainers: JAX over all of them, what they must have in common, and who prints and writes."""
