"""Messages between workers and servers, and the client that sends requests. Only connecting is repeated.

The gradient of a whole variable travels as ``gradient/NAME``, one of some rows as ``indices/NAME`` and ``rows/NAME``; values as
``value/NAME``, or as ``rows/NAME`` if ``indices/NAME`` were requested.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from lockstep._arrays import ArraySpec
from lockstep._errors import NO_PROGRESS, PEER_LOST, USER_ERROR, ClusterError
from lockstep._logging import WaitLogger, listed
from lockstep.distributed.control.handshake import (
    HandshakeError,
    Peer,
    RetryableConnectError,
    introduce,
    wait_until_admitted,
)
from lockstep.distributed.control.handshake import connect as connect_to
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.variables.array_transport import (
    ArrayConnection,
    CheckRequest,
    ConnectionLostError,
    Message,
)
from lockstep.parameter_server.variables.sparse_rows import Gradient, SparseGradient

GRADIENT, INDICES, ROWS, VALUE = "gradient/", "indices/", "rows/", "value/"
_INDEX_DTYPE = "int32"
_MAX_INDICES = 2**24  # Rows that one pull may name: 64 MB.


def check_request(
    message: Message, given: Sequence[ArraySpec], held: Sequence[ArraySpec], state: Sequence[ArraySpec]
) -> None:
    """Raise ProtocolError if the arrays of a request are not those that its kind needs.

    Args:
        message: from a worker.
        given: arrays that follow it.
        held: the variables of the server.
        state: the optimizer's variables, which a ``fill`` may bring besides values.
    """
    names = {spec.name: spec for spec in given}
    match message["kind"]:
        case "push":
            for spec in held:
                _take_gradient(spec, names)
        case "pull":
            for spec in held:
                _take_indices(spec, names, _MAX_INDICES)
        case "fill":
            for spec in (*held, *state):
                found = names.pop(VALUE + spec.name, None)
                if spec in held or found is not None:
                    _check_spec(VALUE + spec.name, found, spec.shape, spec.dtype)
    if names:
        raise ProtocolError(f"{next(iter(names))!r} is not wanted in a {message['kind']!r}")


def _take_gradient(spec: ArraySpec, names: dict[str, ArraySpec]) -> None:
    if GRADIENT + spec.name in names:
        _check_spec(GRADIENT + spec.name, names.pop(GRADIENT + spec.name), spec.shape, spec.dtype)
        return
    count = _take_indices(spec, names, spec.shape[0] if spec.shape else 0)
    if count is None:
        raise ProtocolError(f"a 'push' lacks the gradient of {spec.name!r}")
    _check_spec(ROWS + spec.name, names.pop(ROWS + spec.name, None), (count, *spec.shape[1:]), spec.dtype)


def _take_indices(spec: ArraySpec, names: dict[str, ArraySpec], most: int) -> int | None:
    """Return how many rows of a variable are named, or None if the variable is not."""
    found = names.pop(INDICES + spec.name, None)
    if found is None:
        return None
    count = found.shape[0] if len(found.shape) == 1 else most + 1
    if not spec.shape or count > most:
        raise ProtocolError(f"{INDICES + spec.name!r} of shape {found.shape}: at most {most} rows can be named")
    _check_spec(INDICES + spec.name, found, (count,), _INDEX_DTYPE)
    return count


def _check_spec(name: str, found: ArraySpec | None, shape: tuple[int, ...], dtype: str) -> None:
    if found is None or (found.shape, found.dtype) != (shape, dtype):
        got = "nothing" if found is None else f"{found.dtype} of shape {found.shape}"
        raise ProtocolError(f"{name!r}: expected {dtype} of shape {shape}, got {got}")


def encode_gradients(gradients: Mapping[str, Gradient]) -> dict[str, np.ndarray]:
    """Return gradients as the arrays of a push."""
    arrays: dict[str, np.ndarray] = {}
    for name, gradient in gradients.items():
        if isinstance(gradient, SparseGradient):
            arrays |= {INDICES + name: gradient.indices.astype(_INDEX_DTYPE), ROWS + name: gradient.values}
        else:
            arrays[GRADIENT + name] = gradient
    return arrays


def decode_gradients(arrays: Mapping[str, np.ndarray], held: Sequence[ArraySpec]) -> dict[str, Gradient]:
    """Return the gradients of a push; raise ProtocolError if a row is outside its variable."""
    found: dict[str, Gradient] = {}
    for spec in held:
        if GRADIENT + spec.name in arrays:
            found[spec.name] = arrays[GRADIENT + spec.name]
        else:
            found[spec.name] = SparseGradient(_check_rows(spec, arrays[INDICES + spec.name]), arrays[ROWS + spec.name])
    return found


def decode_row_request(arrays: Mapping[str, np.ndarray], held: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
    """Return by variable the rows that a pull requests, if not all; raise ProtocolError if a row is outside its variable."""
    return {spec.name: _check_rows(spec, arrays[INDICES + spec.name]) for spec in held if INDICES + spec.name in arrays}


def _check_rows(spec: ArraySpec, indices: np.ndarray) -> np.ndarray:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < spec.shape[0]:
        raise ProtocolError(
            f"{spec.name!r} has {spec.shape[0]} rows, and one of {indices.min()} to {indices.max()} was named"
        )
    return indices


def check_no_arrays(message: Message, given: Sequence[ArraySpec]) -> None:
    """Raise ProtocolError if arrays follow a response."""
    if given:
        raise ProtocolError(f"arrays follow a {message['kind']!r}")


def check_only_values(message: Message, given: Sequence[ArraySpec]) -> None:
    """Raise ProtocolError if arrays other than values follow a response."""
    unexpected = [spec.name for spec in given if not spec.name.startswith(VALUE)]
    if unexpected:
        raise ProtocolError(f"{unexpected[0]!r} is not wanted in a {message['kind']!r}")


def pull_response_check(
    requested: Mapping[str, np.ndarray], held: Sequence[ArraySpec]
) -> Callable[[Message, tuple[ArraySpec, ...]], None]:
    """Return a function that raises ProtocolError if the arrays of a pull's response are not those that were requested.

    Args:
        requested: the arrays of the request.
        held: the variables of the server.
    """
    expected = []
    for spec in held:
        indices = requested.get(INDICES + spec.name)
        shape = spec.shape if indices is None else (len(indices), *spec.shape[1:])
        expected.append(ArraySpec((VALUE if indices is None else ROWS) + spec.name, shape, spec.dtype))

    def check(message: Message, given: tuple[ArraySpec, ...]) -> None:
        if given != tuple(expected):
            raise ProtocolError("the arrays are not those that were requested")

    return check


def strip_prefixes(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a response by the names of their variables."""
    return {name.partition("/")[2]: array for name, array in arrays.items()}


def read_whole_number(message: Message, name: str) -> int:
    """Return a whole number of at least 0 from a message; raise ProtocolError if it is missing or something else."""
    value = message.get(name)
    if type(value) is int and value >= 0:
        return value
    raise ProtocolError(f"{name}: expected a whole number in a {message['kind']!r}, got {str(value)[:40]!r}")


_RETRY_SECONDS = 0.1
_MARGIN_SECONDS = 5.0  # For a response that was due at the end of the wait to arrive.

Response = tuple[Message, dict[str, np.ndarray]]
Request = tuple[Message, Mapping[str, np.ndarray], CheckRequest, "Future[Response]"]


class RpcClient:
    """Sends requests to one server. After the first failure of the connection, every request fails with the same error.

    Args:
        name: name of the server, with its address, for errors.
        link: to the server, after the handshake.
        timeout_seconds: limit of each wait.
    """

    def __init__(self, name: str, link: ArrayConnection, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self._link = link
        self._link.set_timeout(timeout_seconds + _MARGIN_SECONDS)
        self._link.limit_unacknowledged(timeout_seconds)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._error: ClusterError | None = None
        self._thread = threading.Thread(target=self._run, name=f"lockstep-{name}", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent and received."""
        return self._link.sent, self._link.received

    def call(self, message: Message, arrays: Mapping[str, np.ndarray], check: CheckRequest) -> "Future[Response]":
        """Send a request after all earlier ones; arrays must not change until the response is here.

        Args:
            message: the request.
            arrays: arrays of the request.
            check: raises ProtocolError if a response is not what was requested.
        """
        if not self._thread.is_alive():
            raise ClusterError(f"{self.name}: this worker has closed its connection there.")
        response: Future[Response] = Future()
        self._requests.put((message, arrays, check, response))
        return response

    def close(self) -> None:
        """Send the requests that are queued, and end."""
        self._requests.put(None)
        self._thread.join(self.timeout_seconds + _MARGIN_SECONDS)
        self._link.close()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            message, arrays, check, response = request
            try:
                response.set_result(self._exchange(message, arrays, check))
            except Exception as error:  # Any error belongs to the thread that waits for the response.
                response.set_exception(error)

    def _exchange(self, message: Message, arrays: Mapping[str, np.ndarray], check: CheckRequest) -> Response:
        if self._error is not None:
            raise self._error
        try:
            reply, values = self._send(message, arrays, check)
        except ConnectionLostError as error:
            raise self._broken(
                f"was lost while this process waited for its answer to {message['kind']!r}: {error}"
            ) from None
        except ProtocolError as error:
            raise self._broken(f"gave no answer to a {message['kind']!r}: {error}") from None
        if reply["kind"] == "refused":
            raise self._broken(f"has refused a {message['kind']!r}: {reply.get('sentence')}", USER_ERROR)
        if reply["kind"] == "late":
            raise ClusterError(self._late(reply, message), NO_PROGRESS)
        return reply, values

    def _send(self, message: Message, arrays: Mapping[str, np.ndarray], check: CheckRequest) -> Response:
        lost = None
        try:
            self._link.send(message, arrays)
        except ConnectionLostError as error:
            lost = error
        try:  # The server may have refused the request before all of it was sent, and its response can be read.
            return self._link.receive(lambda reply, given: _check_reply(reply, given, check))
        except ConnectionLostError:
            if lost is not None:
                raise lost from None
            raise

    def _late(self, reply: Message, message: Message) -> str:
        waits_for = reply.get("waits_for")
        whom = listed(map(str, waits_for)) if isinstance(waits_for, list) and waits_for else "another process"
        return (
            f"{self.name} could not answer a {message['kind']!r} within {message.get('seconds')} s: it waits for {whom}. Is that "
            f"stuck, or slower than the limit allows?"
        )

    def _broken(self, what: str, exit_code: int = PEER_LOST) -> ClusterError:
        self._error = ClusterError(f"{self.name} {what}.", exit_code)
        self._link.close()
        return self._error


def _check_reply(reply: Message, given: tuple[ArraySpec, ...], check: CheckRequest) -> None:
    if reply["kind"] not in ("refused", "late"):
        check(reply, given)
    elif given:
        raise ProtocolError(f"arrays follow a {reply['kind']!r}")


def connect(
    name: str,
    address: str,
    me: Peer,
    secret: bytes | None,
    timeout_seconds: float,
    log: Callable[[str], Any],
) -> RpcClient:
    """Connect to a server, which may not have started yet.

    Args:
        name: name of the server, such as ``"ps 0"``.
        address: its ``host:port``.
        me: this worker.
        secret: secret of the job.
        timeout_seconds: limit of this wait, and of each later one.
        log: takes a line while this waits.

    Raises:
        ClusterError: no server answers in time, or it is none of this job.
    """
    wait, reason = WaitLogger(log), "no process listens there"
    while (left := timeout_seconds - wait.seconds) > 0:
        try:
            return RpcClient(f"{name} at {address}", _connect_once(name, address, me, secret, left), timeout_seconds)
        except (HandshakeError, ProtocolError) as error:
            raise ClusterError(f"{name} at {address} is no server of variables for this worker: {error}.") from None
        except RetryableConnectError as error:
            reason = str(error)
        wait.log(f"{name} at {address}")
        time.sleep(_RETRY_SECONDS)
    raise ClusterError(
        f"{name} at {address} could not be reached within {timeout_seconds:g} s: {reason}. Fix: check that it is "
        "started and can be reached from here.",
        PEER_LOST,
    )


def _connect_once(name: str, address: str, me: Peer, secret: bytes | None, seconds: float) -> ArrayConnection:
    connection = connect_to(address, seconds, name)
    try:
        introduce(connection, me, secret, seconds)
        wait_until_admitted(connection, seconds)
        return ArrayConnection(connection.detach(), seconds, connection.session)
    except BaseException:
        connection.close()
        raise
