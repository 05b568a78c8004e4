"""``lockstep run``: start the processes of a job on this machine, show their output, restart them, and leave no process behind.

Three kinds of process. The *supervisor* (``supervisor.py``) is the command that the user started. Each *worker* runs the user's
program; a chief, variable servers and an evaluator, if the job has any (``rank_assignment.py``), are supervised in the same way.
Each worker's parent is a *reaper* (``reaper.py``), a small process that kills the worker and all its descendants when the
supervisor dies for any reason.
"""
