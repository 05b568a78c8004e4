"""A worker's side of the chief's desk: it takes what is to be done, does it, and brings the result back."""

from collections.abc import Callable, Mapping

import numpy as np

from lockstep.cluster.failure import summary_of
from lockstep.parameters.courier import Answer, Courier
from lockstep.parameters.requests import no_arrays
from lockstep.parameters.shards import Spec
from lockstep.parameters.wire import MalformedError, Message, payload_bytes

__all__ = ["work"]

Do = Callable[[int, Message, Mapping[str, np.ndarray]], tuple[Message, Mapping[str, np.ndarray]]]


def work(courier: Courier, do: Do, *, argument_bytes: int = 2**30) -> int:
    """Do what the chief hands out until nothing is left.

    Args:
        courier: to the chief's desk.
        do: does one piece: gets its number, what is to be done and arrays; gives the result, values of JSON and arrays.
        argument_bytes: limit of the arrays of one piece.

    Returns:
        How many pieces this worker has done.

    Raises:
        ClusterError: the chief is lost.
        Exception: what ``do`` has raised; the chief knows of it then.
    """

    def judge(message: Message, given: tuple[Spec, ...]) -> None:
        if message["kind"] != "task":
            no_arrays(message, given)
        elif payload_bytes(given) > argument_bytes:
            raise MalformedError(
                f"{payload_bytes(given):,} bytes are too many for a piece of work: at most {argument_bytes:,}"
            )

    done = 0
    take = {"kind": "take", "seconds": courier.timeout_seconds}
    while (found := courier.ask(take, {}, judge).result())[0]["kind"] != "over":
        if found[0]["kind"] == "task":
            _do(courier, do, found)
            done += 1
    return done


def _do(courier: Courier, do: Do, piece: Answer) -> None:
    message, arrays = piece
    number = int(message["task"])
    try:
        result, found = do(number, message["what"], arrays)
    except Exception as error:
        courier.ask({"kind": "fail", "task": number, "summary": summary_of(error)}, {}, no_arrays).result()
        raise
    courier.ask({"kind": "finish", "task": number, "result": result}, found, no_arrays).result()
