"""Variables that are kept in one place: servers hold them and apply the optimizer, workers push gradients and pull values."""
