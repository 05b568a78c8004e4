"""What Lockstep tells: one line a strategy, through the logger ``lockstep``.

A library leaves handlers to the program. Where the program has set up none, the line would be lost, so it then goes to
standard error. ``logging.getLogger("lockstep").setLevel("WARNING")`` switches it off.
"""

import logging

__all__ = ["log_info"]

_logger = logging.getLogger("lockstep")


def log_info(message: str) -> None:
    """Log one line of level INFO that is visible unless the program has decided otherwise."""
    if _logger.level == logging.NOTSET and not _logger.hasHandlers():
        _print(message)
    else:
        _logger.info(message)


def _print(message: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lockstep: %(message)s"))
    handler.handle(_logger.makeRecord(_logger.name, logging.INFO, __file__, 0, message, (), None))
