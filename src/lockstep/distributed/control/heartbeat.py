"""What a heartbeat says of a worker, how often one is sent, and the limits of waits for other workers.

``control_client`` sends heartbeats, the chief's ``control_server`` its own; ``failure_detector`` judges them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep._errors import OptionError
from lockstep.distributed.control.handshake import Peer

HEARTBEAT_SECONDS = 0.5
START = "start"
STEP = "step"
DATA = "data"
COMPILING = "compiling"
WAITING = "waiting for others at "  # And the topic: in a collective call of the control client.
END_OF_FIT = "the end of fit"  # Topic of the barrier there.
AT_END_OF_FIT = f"{WAITING}barrier {END_OF_FIT!r}"
PROGRAM = "program"  # The user's code between steps. It may take as long as it likes, unless others wait.
SAVING = "saving"  # Only the chief does, and the others wait for it in the next step.
MAY_TAKE_LONG = (START, COMPILING, SAVING)
QUIET = 6 * HEARTBEAT_SECONDS  # A heartbeat is not that late by chance.
TIMEOUT_SECONDS = 60.0  # of a wait, where a strategy is given no other
LONG_SECONDS = 1800.0  # of compiling, of what a worker does alone at its end, and of a wait without progress


@dataclass(frozen=True)
class WorkerStatus:
    """The last heartbeat of one worker.

    Args:
        peer: the worker.
        heard: time of the last message; times are the observer's, in seconds.
        step: the last step that it has begun.
        activity: what its main thread does there.
        since: when it began that.
        left: whether it has left the job in order.
        metadata: numbers that it reports about itself, for monitors.
    """

    peer: Peer
    heard: float
    step: int = 0
    activity: str = START
    since: float = 0.0
    left: bool = False
    metadata: Mapping[str, float] = field(default_factory=dict)

    @property
    def doing(self) -> str:
        """Activity and step, for messages."""
        return f"in {self.activity!r} at step {self.step}"


@dataclass(frozen=True)
class Limits:
    """Limits of waits, in seconds.

    Args:
        timeout: limit of a wait, and of the silence of a worker.
        long: limit of an activity of ``MAY_TAKE_LONG``, and of a step of all workers.

    Raises:
        OptionError: a limit is so low that late heartbeats would exceed it, or ``long`` is below ``timeout``.
    """

    timeout: float
    long: float

    def __post_init__(self) -> None:
        least = 3 * HEARTBEAT_SECONDS
        if not least <= self.timeout <= self.long:
            raise OptionError(
                f"timeout_seconds, long_seconds: expected {least:g} or more, and the second no less than the first, as "
                f"heartbeats come each {HEARTBEAT_SECONDS:g} s; got {self.timeout:g} and {self.long:g}. Fix: raise them."
            )
