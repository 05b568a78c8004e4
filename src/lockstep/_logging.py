"""Log lines of Lockstep, through the logger ``lockstep``.

A library leaves handlers to the program. If the program has configured none, lines are written to standard error instead of
being lost. ``logging.getLogger("lockstep").setLevel("WARNING")`` switches them off.
"""

import logging

__all__ = ["log_info"]

_logger = logging.getLogger("lockstep")


def log_info(message: str) -> None:
    """Log one line of level INFO, which is visible unless the program has configured logging otherwise."""
    if _logger.level == logging.NOTSET and not _logger.hasHandlers():
        _print(message)
    else:
        _logger.info(message)


def _print(message: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lockstep: %(message)s"))
    handler.handle(_logger.makeRecord(_logger.name, logging.INFO, __file__, 0, message, (), None))
