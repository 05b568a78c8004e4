"""The user's door: one file a strategy."""
