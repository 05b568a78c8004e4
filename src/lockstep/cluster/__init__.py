"""Who takes part: the processes that train in step, which of them this one is, and where worker 0 is reached."""
