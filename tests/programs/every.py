"""All programs."""

from . import others, text, vision

__all__ = ["PROGRAMS"]

PROGRAMS = [*vision.PROGRAMS, *text.PROGRAMS, *others.PROGRAMS]
