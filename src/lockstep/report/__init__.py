"""What is shown to people: the demo."""
