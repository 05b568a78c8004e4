"""Inputs: sources, caches, prefetch, placement on the devices, and the adapter that Keras reads."""
