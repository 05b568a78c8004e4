"""What workers ask of a server of variables, as messages, and what may be said: shapes are compared before memory is taken.

A gradient of a whole variable travels as ``gradient/NAME``; one of some rows as ``indices/NAME`` and ``rows/NAME``; values as
``value/NAME``, or ``rows/NAME`` where ``indices/NAME`` were asked for.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.parameter_server.variables.array_transport import Message, ProtocolError
from lockstep.parameter_server.variables.sharding import VariableSpec
from lockstep.parameter_server.variables.sparse_gradients import Gradient, SparseGradient

__all__ = [
    "GRADIENT",
    "INDICES",
    "ROWS",
    "VALUE",
    "as_arrays",
    "as_gradients",
    "asked_rows",
    "judge",
    "judge_of_values",
    "no_arrays",
    "only_values",
    "value_of",
    "whole",
]

GRADIENT, INDICES, ROWS, VALUE = "gradient/", "indices/", "rows/", "value/"
_INDEX_DTYPE = "int32"
_MOST_INDICES = 2**24  # Of one message that asks for rows: 64 MB.


def judge(
    message: Message, given: Sequence[VariableSpec], held: Sequence[VariableSpec], state: Sequence[VariableSpec]
) -> None:
    """Refuse what a server does not want, by ProtocolError.

    Args:
        message: from a worker.
        given: arrays that follow it.
        held: the variables of the server.
        state: what a message to fill the server may bring besides values: variables of the optimizer.
    """
    names = {spec.name: spec for spec in given}
    match message["kind"]:
        case "push":
            for spec in held:
                _take_gradient(spec, names)
        case "pull":
            for spec in held:
                _take_indices(spec, names, _MOST_INDICES)
        case "fill":
            for spec in (*held, *state):
                found = names.pop(VALUE + spec.name, None)
                if spec in held or found is not None:
                    _compare(VALUE + spec.name, found, spec.shape, spec.dtype)
    if names:
        raise ProtocolError(f"{next(iter(names))!r} is not wanted in a {message['kind']!r}")


def _take_gradient(spec: VariableSpec, names: dict[str, VariableSpec]) -> None:
    if GRADIENT + spec.name in names:
        _compare(GRADIENT + spec.name, names.pop(GRADIENT + spec.name), spec.shape, spec.dtype)
        return
    count = _take_indices(spec, names, spec.shape[0] if spec.shape else 0)
    if count is None:
        raise ProtocolError(f"a 'push' lacks the gradient of {spec.name!r}")
    _compare(ROWS + spec.name, names.pop(ROWS + spec.name, None), (count, *spec.shape[1:]), spec.dtype)


def _take_indices(spec: VariableSpec, names: dict[str, VariableSpec], most: int) -> int | None:
    """How many rows of a variable are named; None: it is not named."""
    found = names.pop(INDICES + spec.name, None)
    if found is None:
        return None
    count = found.shape[0] if len(found.shape) == 1 else most + 1
    if not spec.shape or count > most:
        raise ProtocolError(f"{INDICES + spec.name!r} of shape {found.shape}: at most {most} rows can be named")
    _compare(INDICES + spec.name, found, (count,), _INDEX_DTYPE)
    return count


def _compare(name: str, found: VariableSpec | None, shape: tuple[int, ...], dtype: str) -> None:
    if found is None or (found.shape, found.dtype) != (shape, dtype):
        got = "nothing" if found is None else f"{found.dtype} of shape {found.shape}"
        raise ProtocolError(f"{name!r}: expected {dtype} of shape {shape}, got {got}")


def as_arrays(gradients: Mapping[str, Gradient]) -> dict[str, np.ndarray]:
    """Gradients as they travel."""
    arrays: dict[str, np.ndarray] = {}
    for name, gradient in gradients.items():
        if isinstance(gradient, SparseGradient):
            arrays |= {INDICES + name: gradient.indices.astype(_INDEX_DTYPE), ROWS + name: gradient.values}
        else:
            arrays[GRADIENT + name] = gradient
    return arrays


def as_gradients(arrays: Mapping[str, np.ndarray], held: Sequence[VariableSpec]) -> dict[str, Gradient]:
    """What :func:`as_arrays` was given; ProtocolError where a row is none of its variable."""
    found: dict[str, Gradient] = {}
    for spec in held:
        if GRADIENT + spec.name in arrays:
            found[spec.name] = arrays[GRADIENT + spec.name]
        else:
            found[spec.name] = SparseGradient(_checked(spec, arrays[INDICES + spec.name]), arrays[ROWS + spec.name])
    return found


def asked_rows(arrays: Mapping[str, np.ndarray], held: Sequence[VariableSpec]) -> dict[str, np.ndarray]:
    """Of which variables only some rows are asked for, and which; ProtocolError where a row is none of its variable."""
    return {spec.name: _checked(spec, arrays[INDICES + spec.name]) for spec in held if INDICES + spec.name in arrays}


def _checked(spec: VariableSpec, indices: np.ndarray) -> np.ndarray:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < spec.shape[0]:
        raise ProtocolError(
            f"{spec.name!r} has {spec.shape[0]} rows, and one of {indices.min()} to {indices.max()} was named"
        )
    return indices


def no_arrays(message: Message, given: Sequence[VariableSpec]) -> None:
    """Refuse an answer with arrays, where none were asked for."""
    if given:
        raise ProtocolError(f"arrays follow a {message['kind']!r}")


def only_values(message: Message, given: Sequence[VariableSpec]) -> None:
    """Refuse an answer that brings anything else than values."""
    strange = [spec.name for spec in given if not spec.name.startswith(VALUE)]
    if strange:
        raise ProtocolError(f"{strange[0]!r} is not wanted in a {message['kind']!r}")


def judge_of_values(
    asked: Mapping[str, np.ndarray], held: Sequence[VariableSpec]
) -> Callable[[Message, tuple[VariableSpec, ...]], None]:
    """What refuses an answer to a pull that brings anything else than was asked for.

    Args:
        asked: the arrays of the question.
        held: the variables of the server.
    """
    expected = []
    for spec in held:
        indices = asked.get(INDICES + spec.name)
        shape = spec.shape if indices is None else (len(indices), *spec.shape[1:])
        expected.append(VariableSpec((VALUE if indices is None else ROWS) + spec.name, shape, spec.dtype))

    def judge_values(message: Message, given: tuple[VariableSpec, ...]) -> None:
        if given != tuple(expected):
            raise ProtocolError("the arrays are not those that were asked for")

    return judge_values


def value_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What came in an answer, by the names of the variables."""
    return {name.partition("/")[2]: array for name, array in arrays.items()}


def whole(message: Message, name: str) -> int:
    """A whole number of at least 0 in a message; ProtocolError where it is not there or something else."""
    value = message.get(name)
    if type(value) is int and value >= 0:
        return value
    raise ProtocolError(f"{name}: expected a whole number in a {message['kind']!r}, got {str(value)[:40]!r}")
