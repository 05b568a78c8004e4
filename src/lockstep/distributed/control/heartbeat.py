"""What a heartbeat says of a worker, and how often one is sent.

``control_client`` sends them, the chief's ``control_server`` its own; ``failure_detector`` judges them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
