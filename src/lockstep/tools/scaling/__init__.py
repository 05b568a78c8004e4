"""``lockstep scale``: what more devices and other batches do for somebody's own model, measured and predicted."""
