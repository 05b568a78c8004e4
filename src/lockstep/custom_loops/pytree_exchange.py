"""Trees of arrays as text, for the few that travel between processes besides the collectives; nothing in it can run code."""

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep._errors import InputError

__all__ = ["gathered_trees"]

_PIECE = 4 * 2**20  # characters that travel at once


def gathered_trees(tree: Any, gather: Callable[[Any], list[Any]]) -> list[Any]:
    """The trees of all processes, in their order.

    Args:
        tree: of dicts, lists and tuples; its leaves are arrays of numbers.
        gather: brings values of JSON together.

    Raises:
        InputError: it holds something else.

    Example:
        >>> import numpy as np
        >>> gathered_trees({"x": np.arange(3)}, lambda value: [value])
        [{'x': array([0, 1, 2])}]
    """
    parts: list[bytes] = []
    form = _form(tree, parts)
    text = base64.b64encode(b"".join(parts)).decode()
    heads = gather([form, len(text)])
    pieces = [gather(text[start : start + _PIECE]) for start in range(0, max(length for _, length in heads), _PIECE)]
    return [
        _tree(form, memoryview(base64.b64decode("".join(piece[worker] for piece in pieces))))
        for worker, (form, _) in enumerate(heads)
    ]


def _form(tree: Any, parts: list[bytes]) -> Any:
    """The tree with the place of its bytes for each array; the bytes are appended to ``parts``."""
    if isinstance(tree, dict):
        return {"dict": {str(name): _form(value, parts) for name, value in tree.items()}}
    if isinstance(tree, (list, tuple)):
        return {"tuple" if isinstance(tree, tuple) else "list": [_form(value, parts) for value in tree]}
    array = np.asarray(tree)
    if array.dtype.hasobject:
        raise InputError(f"A batch that travels between workers holds numbers; got an array of {array.dtype}.")
    start = sum(map(len, parts))
    parts.append(array.tobytes())
    return {"array": [array.dtype.str, array.shape, start]}


def _tree(form: Any, data: memoryview) -> Any:
    ((kind, content),) = form.items()
    if kind == "dict":
        return {name: _tree(value, data) for name, value in content.items()}
    if kind in ("list", "tuple"):
        values = [_tree(value, data) for value in content]
        return tuple(values) if kind == "tuple" else values
    dtype, shape, start = content
    count = int(np.prod(shape, dtype=int))
    return np.frombuffer(data, np.dtype(dtype), count, start).reshape(shape)
