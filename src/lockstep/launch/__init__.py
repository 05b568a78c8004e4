"""``lockstep run``: starts the workers of one machine, shows what they say, and leaves no process behind.

Three kinds of process. The *supervisor* (``supervisor.py``) is what the user started. Each *worker* runs the user's program; so do a chief,
servers of variables and an evaluator, where there are any (``tasks.py``), and are watched likewise. Between the
two stands a *keeper* (``keeper.py``), a small process for each worker: it ends the worker and all that the worker has started
when the supervisor dies, however it dies, also where the worker itself could not do so any more.
"""
