"""What a run does while it trains: how fast it is, what it waits for, and where that can be seen."""
