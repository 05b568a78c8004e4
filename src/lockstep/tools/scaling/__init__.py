"""``lockstep scale``: measure a model with more devices and other batch sizes, and predict larger machines."""
