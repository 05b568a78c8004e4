"""Options of the communication, with the names of ``tf.distribute``."""

import enum
import math
from dataclasses import dataclass

from lockstep._errors import OptionError, member_of, whole_number

__all__ = ["CommunicationImplementation", "CommunicationOptions"]


class CommunicationImplementation(enum.Enum):
    """The implementation of a collective: ``tf.distribute.experimental.CommunicationImplementation``.

    ``AUTO`` is the platform's own collective, ``RING`` is :class:`RingAllReduce`, ``NCCL`` is :class:`NcclAllReduce`.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of all-reduce between devices: ``tf.distribute.experimental.CommunicationOptions``.

    Args:
        bytes_per_pack: gradients are added in packs of at most so many bytes. 0: with ``AUTO`` XLA decides, with the
            others all gradients of a dtype are one pack.
        timeout_seconds: seconds that a collective between processes may wait. ``MirroredStrategy`` has one process and
            raises an error.
        implementation: a member of :class:`CommunicationImplementation` or its name.

    Raises:
        OptionError: one of them is out of its range.

    Example:
        >>> import lockstep
        >>> options = lockstep.CommunicationOptions(bytes_per_pack=4_000_000, implementation="RING")
        >>> strategy = lockstep.MirroredStrategy(communication_options=options)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        size = whole_number("CommunicationOptions: bytes_per_pack", self.bytes_per_pack, least=0)
        chosen = member_of(CommunicationImplementation, "CommunicationOptions: implementation", self.implementation)
        seconds = self.timeout_seconds
        if seconds is not None and not _is_positive(seconds):
            raise OptionError(
                f"CommunicationOptions: timeout_seconds: expected a positive number of seconds or None, got {seconds!r}."
            )
        object.__setattr__(self, "bytes_per_pack", size)
        object.__setattr__(self, "implementation", chosen)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
