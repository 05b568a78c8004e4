"""Rendezvous of the supervisors of several nodes before each generation: membership, ranks, and the outcome of the last generation.

The supervisor of node 0 runs the server at the coordinator's address (``rendezvous_server.py``), and every supervisor, also that of
node 0, is its client (``rendezvous_client.py``). All decisions are made without sockets (``rendezvous_state.py``).
"""
