"""Who takes part: the processes that train in step, which of them this one is, and how they talk and end together."""
