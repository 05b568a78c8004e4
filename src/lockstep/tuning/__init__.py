"""The batch size finder, and learning rate scaling for larger batches."""
