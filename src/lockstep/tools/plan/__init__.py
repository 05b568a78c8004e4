"""``lockstep plan``: what a training step needs on hardware that is not here."""
