"""Variables on parameter servers: servers hold them and apply the optimizer; workers pull values and push gradients."""
