"""Messages between workers and variable servers.

The gradient of a whole variable travels as ``gradient/NAME``, one of some rows as ``indices/NAME`` and ``rows/NAME``; values as
``value/NAME``, or as ``rows/NAME`` if ``indices/NAME`` were requested.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.array_transport import Arrays, Message
from lockstep.parameter_server.sparse_rows import Gradient, SparseGradient

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
            for number, spec in enumerate((*held, *state)):
                found = names.pop(VALUE + spec.name, None)
                if number < len(held) or found is not None:
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


def decode_gradients(arrays: Arrays, held: Sequence[ArraySpec]) -> dict[str, Gradient]:
    """Return the gradients of a push; raise ProtocolError if a row is outside its variable."""
    found: dict[str, Gradient] = {}
    for spec in held:
        if GRADIENT + spec.name in arrays:
            found[spec.name] = arrays[GRADIENT + spec.name]
        else:
            found[spec.name] = SparseGradient(_check_rows(spec, arrays[INDICES + spec.name]), arrays[ROWS + spec.name])
    return found


def decode_row_request(arrays: Arrays, held: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
    """Return by variable the rows that a pull requests, if not all; raise ProtocolError if a row is outside its variable."""
    return {spec.name: _check_rows(spec, arrays[INDICES + spec.name]) for spec in held if INDICES + spec.name in arrays}


def _check_rows(spec: ArraySpec, indices: np.ndarray) -> np.ndarray:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < spec.shape[0]:
        raise ProtocolError(
            f"{spec.name!r} has {spec.shape[0]} rows, and one of {indices.min()} to {indices.max()} was named"
        )
    return indices


def check_only_values(message: Message, given: Sequence[ArraySpec]) -> None:
    """Raise ProtocolError if arrays other than values follow a response."""
    unexpected = [spec.name for spec in given if not spec.name.startswith(VALUE)]
    if unexpected:
        raise ProtocolError(f"{unexpected[0]!r} is not wanted in a {message['kind']!r}")


def pull_response_check(
    requested: Arrays, held: Sequence[ArraySpec]
) -> Callable[[Message, tuple[ArraySpec, ...]], None]:
    """Return a function that raises ProtocolError if the arrays of a pull's response are not those that were requested."""
    expected = []
    for spec in held:
        indices = requested.get(INDICES + spec.name)
        shape = spec.shape if indices is None else (len(indices), *spec.shape[1:])
        expected.append(ArraySpec((VALUE if indices is None else ROWS) + spec.name, shape, spec.dtype))

    def check(message: Message, given: tuple[ArraySpec, ...]) -> None:
        if given != tuple(expected):
            raise ProtocolError("the arrays are not those that were requested")

    return check


def strip_prefixes(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays of a response by the names of their variables."""
    return {name.partition("/")[2]: array for name, array in arrays.items()}
