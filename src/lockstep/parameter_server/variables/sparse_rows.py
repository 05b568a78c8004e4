"""Which rows of embeddings a batch needs: only these are pulled, and only those that have a gradient are pushed.

A worker's step still sees tables of their full size; a row that was not pulled is NaN there. So what needs other rows than the layer looks
up (a table that is also the last layer's kernel, a regularizer) cannot pass unseen: the first batch is computed with all rows and
with these, and a table for which that makes a difference is pulled whole from then on.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._logging import log_info
from lockstep.parameter_server.variables.embedding_rows import EmbeddingRows, tables_of
from lockstep.parameter_server.variables.sparse_gradients import Gradient, SparseGradient, padded

__all__ = ["LEAST_ROWS", "TouchedRows", "as_rows"]

LEAST_ROWS = 1024  # A variable with fewer always travels whole.
_TOLERANCE = 1e-3  # NaN in one place is NaN or another number elsewhere; devices add in another order each time.

Compute = Callable[[dict[str, Any]], Any]


class TouchedRows:
    """The rows that one worker needs, batch by batch; used by one thread.

    Args:
        model: is built; its trainable variables are on servers.
        announce: takes a line for each table that is pulled whole, with the reason.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.variables.sparse_rows import TouchedRows
        >>> model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5000, 1)])
        >>> touched, (name,) = TouchedRows(model), [variable.path for variable in model.trainable_variables]
        >>> x, table = np.array([[7, 3], [3, 4999]], "int32"), np.ones((5000, 1), "float32")
        >>> touched.decide({name: table}, x, lambda values: values[name][x].sum())
        >>> rows = touched.needed(x)
        >>> rows[name].tolist()
        [3, 7, 4999]
        >>> touched.whole({name: table[rows[name]]}, rows)[name].shape
        (5000, 1)
    """

    def __init__(self, model: keras.Model, announce: Callable[[str], Any] = log_info) -> None:
        self._announce = announce
        tables = {path: layer for path, layer in tables_of(model).items() if layer.input_dim >= LEAST_ROWS}
        self._undecided, self._by_rows = set(tables), set[str]()
        self._looked_up = EmbeddingRows(model, tables)
        self._tables: dict[str, _SparseTable] = {}

    @property
    def is_decided(self) -> bool:
        """Whether it is known of each table how it is pulled; until then each batch goes to :meth:`decide`."""
        return not self._undecided

    def decide(self, values: Mapping[str, Any], x: Any, compute: Compute) -> None:
        """See whether rows are enough, of tables that were pulled whole until now.

        Args:
            values: of all trainable variables, by path, as :meth:`whole` gives them.
            x: of the batch.
            compute: gives all that the step gives for such values of variables, always the same for the same.
        """
        for name, reason in self._looked_up.impossible(x).items():
            self._give_up(name, reason)
        rows = {name: each for name, each in self._looked_up.rows(x).items() if name in self._undecided}
        rows = {name: each for name, each in rows.items() if len(each) < len(values[name])}
        expected = _leaves(compute(dict(values))) if rows else []
        if not rows or not all(np.isfinite(leaf).all() for leaf in expected):
            return  # Nothing can be seen: no row is left out, or one more NaN makes no difference. The next batch may be another.
        together = _are_alike(_leaves(compute(_poisoned(values, rows, list(rows)))), expected)
        for name in rows:
            if together or _are_alike(_leaves(compute(_poisoned(values, rows, [name]))), expected):
                self._by_rows.add(name)
                self._undecided.discard(name)
            else:
                self._give_up(name, "the step uses rows that its layer does not look up")

    def needed(self, x: Any) -> dict[str, np.ndarray]:
        """By path the rows that a batch needs, rising, int32; of variables that are not named all are.

        Args:
            x: of the batch.
        """
        rows = self._looked_up.rows(x) if self._by_rows else {}
        return {name: each for name, each in rows.items() if name in self._by_rows and self._is_worth(name, each)}

    def whole(self, found: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Values for the step: tables of their full size, in which rows that were not pulled are NaN.

        A table that this gives is overwritten by the next call.

        Args:
            found: what was pulled, by path.
            rows: which rows of which variables that is, as :meth:`needed` gave them.
        """
        return {name: self._filled(name, value, rows[name]) if name in rows else value for name, value in found.items()}

    def _is_worth(self, name: str, rows: np.ndarray) -> bool:
        return 2 * len(rows) <= self._looked_up.height(name)

    def _give_up(self, name: str, reason: str) -> None:
        if name in self._undecided:
            self._undecided.discard(name)
            self._announce(f"{name} is pulled whole for each batch: {reason}.")

    def _filled(self, name: str, values: np.ndarray, rows: np.ndarray) -> jax.Array:
        if name not in self._tables:
            self._tables[name] = _SparseTable((self._looked_up.height(name), *values.shape[1:]), values.dtype)
        return self._tables[name].filled(SparseGradient(rows, values))


class _SparseTable:
    """Memory of a whole table, in which the rows of one batch have values, and all others are NaN.

    Args:
        shape: of the table.
        dtype: of it.
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._value = jnp.full(shape, jnp.nan, dtype)
        self._last = np.zeros(0, np.int32)

    def filled(self, rows: SparseGradient) -> jax.Array:
        """With these rows; what was given before is overwritten."""
        height = self._value.shape[0]
        last = padded(SparseGradient(self._last, np.zeros((len(self._last), 0), np.float32)), height).indices
        self._value = _exchanged(self._value, last, *padded(rows, height))
        self._last = rows.indices
        return self._value


@functools.partial(jax.jit, donate_argnums=0)
def _exchanged(table: jax.Array, last: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    table = table.at[last].set(jnp.nan, mode="drop")
    return table.at[indices].set(values, mode="drop")


def as_rows(gradients: Mapping[str, np.ndarray]) -> dict[str, Gradient]:
    """Gradients as they are pushed: of large variables only the rows that are not zero, where these are at most half of them.

    Args:
        gradients: of whole variables, by name.

    Example:
        >>> table = np.zeros((5000, 1), "float32")
        >>> table[[7, 3]] = 1
        >>> as_rows({"table": table})["table"].indices.tolist()
        [3, 7]
    """
    return {name: _as_rows(np.asarray(gradient)) for name, gradient in gradients.items()}


def _as_rows(gradient: np.ndarray) -> Gradient:
    if gradient.ndim < 2 or len(gradient) < LEAST_ROWS:
        return gradient
    size = gradient[0].size
    is_set = gradient.reshape(-1) != 0
    if 2 * np.count_nonzero(is_set) > gradient.size:
        return gradient  # More than half of the numbers are in more than half of the rows.
    rows = np.flatnonzero(is_set) // size
    touched = rows[np.flatnonzero(np.diff(rows, prepend=-1))]
    return gradient if 2 * len(touched) > len(gradient) else SparseGradient(touched.astype(np.int32), gradient[touched])


def _poisoned(values: Mapping[str, Any], rows: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """Values, of which the named tables have NaN in all other rows."""
    found = dict(values)
    for name in names:
        whole = np.asarray(values[name])
        found[name] = np.full_like(whole, np.nan)
        found[name][rows[name]] = whole[rows[name]]
    return found


def _leaves(results: Any) -> list[np.ndarray]:
    """Numbers, in a precision in which they can be compared."""
    return [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(results)]


def _are_alike(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    """Whether finite numbers are the same but for their rounding."""
    pairs = zip(found, expected, strict=True)
    return all(np.allclose(one, other, _TOLERANCE, _TOLERANCE * np.abs(other).max(initial=0)) for one, other in pairs)
