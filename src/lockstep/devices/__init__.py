"""Which devices there are and which rows go where."""
