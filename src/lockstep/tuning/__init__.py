"""Which batch, and which learning rate with it: measured and changed from outside of a training step."""
