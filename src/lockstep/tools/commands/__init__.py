"""What is shown to people: the demo, and what to say of a machine."""
