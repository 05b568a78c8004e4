"""Where the supervisors of several nodes meet before each start: who takes part now, as which rank, and what became of the last start.

The supervisor of node 0 listens at the coordinator's address as long as it lives (``host.py``), and every supervisor, its own too,
holds a connection there (``guest.py``). What is decided is decided without a socket (``assembly.py``, ``gathering.py``, ``round.py``).
"""
