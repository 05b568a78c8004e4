"""Task queue of the chief, and the clients that take tasks from it."""
