"""The control channel of a job: handshake, heartbeats, failure detection and termination, without JAX."""
