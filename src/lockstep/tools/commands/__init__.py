"""Subcommands of ``lockstep`` other than ``run`` and ``scale``."""
