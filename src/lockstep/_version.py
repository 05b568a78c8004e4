"""The version, stated once; the build reads it here."""

__version__ = "0.1.0"
