"""Sparse gradients and sparse rows: only those rows of a variable that a batch touches travel.

The rows are found by tracing the model on the batch before any value is there. A worker's step still gets tables of their full size, in which
rows that were not pulled are NaN. A step that needs other rows than the layer looks up (the table is also the last layer's kernel, or has a
regularizer) is detected: the first batch is computed with all rows and with these, and a table for which the results differ is pulled whole
from then on. If a later batch gives NaN, it is computed again with all rows, in the same way.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._keras.graph import operations_of
from lockstep._keras.patches import LAYER_CALL, patched_method
from lockstep._logging import log_info
from lockstep.parameter_server.sharding import Shard


class SparseGradient(NamedTuple):
    """Gradient of some rows of a variable; that of all other rows is zero.

    Args:
        indices: numbers of the rows, int32; the gradients of a row that is named twice are added.
        values: the gradient of each row, in the order of ``indices``.
    """

    indices: np.ndarray
    values: np.ndarray


Gradient = np.ndarray | SparseGradient


def gradient_of_shard(gradient: Gradient, shard: Shard) -> Gradient:
    """Return the part of a variable's gradient that belongs to one shard."""
    if not isinstance(gradient, SparseGradient):
        return shard.slice(gradient)
    values = gradient.values if shard.is_whole else gradient.values[shard.mask(gradient.indices)]
    return SparseGradient(shard.local_rows(gradient.indices), values)


def pad_rows(rows: SparseGradient, height: int) -> SparseGradient:
    """Pad to a power of two with rows outside the variable, so that one compiled program serves many numbers of rows.

    Args:
        rows: the rows to pad.
        height: number of rows of the variable.
    """
    missing = (1 << max(0, len(rows.indices) - 1).bit_length()) - len(rows.indices)
    padding = np.zeros((missing, *rows.values.shape[1:]), rows.values.dtype)
    indices = np.concatenate([rows.indices, np.full(missing, height, np.int32)])
    return SparseGradient(indices, np.concatenate([rows.values, padding]))


def mean_gradient(value: jax.Array, weights: Sequence[jax.Array], gradients: Sequence[Gradient]) -> jax.Array:
    """Return the weighted mean of the gradients of one variable, added in their order; traced."""
    first, *others = [_to_dense(value, gradient) for gradient in gradients]
    if not others:
        return first
    wide = jnp.promote_types(value.dtype, jnp.float32)  # A float16 gradient times its rows may be infinite.
    total = first.astype(wide) * weights[0].astype(wide)
    for weight, gradient in zip(weights[1:], others, strict=True):
        total = total + gradient.astype(wide) * weight.astype(wide)
    return (total / sum(weights[1:], weights[0]).astype(wide)).astype(value.dtype)


def _to_dense(value: jax.Array, gradient: Gradient) -> jax.Array:
    if isinstance(gradient, SparseGradient):
        return jnp.zeros_like(value).at[gradient.indices].add(gradient.values, mode="drop")
    return jnp.asarray(gradient)


MIN_ROWS = 1024  # A variable with fewer rows always travels whole.
_TOLERANCE = 1e-3  # Devices add in another order each time.

Compute = Callable[[dict[str, Any]], Any]
Ids = dict[str, list[jax.Array]]


def tables_of(model: keras.Model) -> dict[str, keras.layers.Embedding]:
    """Return by the path of its table each trainable embedding layer with Keras's own ``call``; of tables of one path none."""
    paths = Counter(variable.path for variable in model.trainable_variables)
    trained = {id(variable) for variable in model.trainable_variables}
    layers = [each for each in operations_of(model) if isinstance(each, keras.layers.Embedding) and each.built]
    layers = [each for each in layers if inspect.unwrap(type(each).call) is inspect.unwrap(keras.layers.Embedding.call)]
    layers = [each for each in layers if id(each.embeddings) in trained and paths[each.embeddings.path] == 1]
    return {each.embeddings.path: each for each in layers}


class EmbeddingRows:
    """Rows that a model looks up in its embedding tables for a batch. Only what leads to the row numbers is computed.

    Args:
        model: is built.
        tables: by path, as :func:`tables_of` gives them.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.sparse_rows import EmbeddingRows, tables_of
        >>> model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 1, name="words")])
        >>> [rows.tolist() for rows in EmbeddingRows(model, tables_of(model)).rows(np.array([[7, 3], [3, -1]])).values()]
        [[3, 7, 8]]
    """

    def __init__(self, model: keras.Model, tables: Mapping[str, keras.layers.Embedding]) -> None:
        self._model, self._tables = model, dict(tables)
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self._reasons: dict[Any, dict[str, str]] = {}
        kinds = model.trainable_variables, model.non_trainable_variables
        self._variables = [[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in kind] for kind in kinds]
        self._program = jax.jit(lambda x: self._ids(jax.tree.map(jnp.zeros_like, self._variables), x))

    def rows(self, x: Any) -> dict[str, np.ndarray]:
        """Return by path the rows, rising, int32, that inputs need of each table whose rows can be known before the step."""
        unknown = self.unknown_tables(x)
        if len(unknown) == len(self._tables):
            return {}
        found = self._program(x)
        return {name: _unique(np.asarray(found[name]), self.height(name)) for name in found if name not in unknown}

    def height(self, name: str) -> int:
        """Return the number of rows of a table."""
        return self._tables[name].input_dim

    def unknown_tables(self, x: Any) -> dict[str, str]:
        """Return by path the reason why the rows of a table cannot be known before a step; only shapes and dtypes of the inputs count."""
        leaves, structure = jax.tree.flatten(x)
        signature = (structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))
        if signature not in self._reasons:
            self._reasons[signature] = self._find_unknown_tables(x)
        return self._reasons[signature]

    def _find_unknown_tables(self, x: Any) -> dict[str, str]:
        try:
            traced = jax.make_jaxpr(self._ids)(self._variables, x).jaxpr
        except Exception as error:  # The user's model; its own train_step may call it in another way.
            return dict.fromkeys(self._tables, f"the model cannot be called on a batch alone ({error})")
        count = sum(map(len, self._variables))
        depend = [_depends_on(traced, each, traced.invars[:count]) for each in traced.outvars]
        reason = "which rows are looked up depends on variables of the model"
        return {name: reason for name, depends in zip(sorted(self._tables), depend, strict=True) if depends}

    def _ids(self, variables: list[list[Any]], x: Any) -> dict[str, jax.Array]:
        """Return for each table the numbers of its rows, in any order; the table's height stands for no row."""
        found: Ids = {name: [jnp.zeros((0,), "int32")] for name in self._tables}
        options = {"training": True} if self._takes_training else {}
        with patched_method(LAYER_CALL, self._tables.values(), self._recording_call(found)):
            self._model.stateless_call(*variables, x, **options)
        return {name: jnp.concatenate(each) for name, each in found.items()}

    def _recording_call(self, found: Ids) -> Callable[[Any, Any], Any]:
        names = {id(layer): name for name, layer in self._tables.items()}

        def around(layer: keras.layers.Embedding, call: Callable[..., Any]) -> Callable[..., Any]:
            def recording(inputs: Any) -> Any:
                found[names[id(layer)]].append(_rows_of(inputs, layer.input_dim))
                return call(inputs)

            return recording

        return around


def _rows_of(inputs: Any, count: int) -> jax.Array:
    """Return the rows that ``Embedding`` takes on JAX: negative numbers count from the end; one outside the table is no row, and gives NaN."""
    ids = jnp.ravel(jnp.asarray(inputs))
    ids = ids if ids.dtype in (jnp.int32, jnp.int64) else keras.ops.cast(ids, "int32")
    ids = jnp.where(ids < 0, ids + count, ids)
    return jnp.where((ids >= 0) & (ids < count), ids, count).astype("int32")


def _unique(ids: np.ndarray, count: int) -> np.ndarray:
    """Return the distinct numbers below ``count``, rising; a mask is faster than sorting."""
    is_named = np.zeros(count + 1, bool)
    is_named[ids] = True
    return np.flatnonzero(is_named[:count]).astype(np.int32)


def _depends_on(traced: Any, output: Any, inputs: list[Any]) -> bool:
    """Return whether an output of a traced program is computed from one of these inputs."""
    wanted = {id(output)}
    for equation in reversed(traced.eqns):
        if any(id(each) in wanted for each in equation.outvars):
            wanted.update(id(each) for each in equation.invars)
    return any(id(each) in wanted for each in inputs)


class TouchedRows:
    """Rows that one worker needs, batch by batch; used by one thread.

    Args:
        model: is built; its trainable variables are on servers.
        log: takes a line for each table that is pulled whole, with the reason.

    Attributes:
        has_nan_rows: whether tables of the last batch have NaN in rows that it does not look up.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.sparse_rows import TouchedRows
        >>> model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5000, 1)])
        >>> touched, (name,) = TouchedRows(model), [variable.path for variable in model.trainable_variables]
        >>> x, table = np.array([[7, 3], [3, 4999]], "int32"), np.ones((5000, 1), "float32")
        >>> touched.decide({name: table}, x, lambda values: values[name][x].sum())
        >>> rows = touched.needed_rows(x)
        >>> rows[name].tolist()
        [3, 7, 4999]
        >>> touched.full_tables({name: table[rows[name]]}, rows)[name].shape
        (5000, 1)
    """

    def __init__(self, model: keras.Model, log: Callable[[str], None] = log_info) -> None:
        self._log = log
        tables = {path: layer for path, layer in tables_of(model).items() if layer.input_dim >= MIN_ROWS}
        self._undecided, self._sparse = set(tables), set[str]()
        self._embedding_rows = EmbeddingRows(model, tables)
        self._tables: dict[str, _SparseTable] = {}
        self.has_nan_rows = False

    @property
    def is_decided(self) -> bool:
        """Whether it is decided for each table how to pull it; until then each batch must be passed to :meth:`decide`."""
        return not self._undecided

    def decide(self, values: Mapping[str, Any], x: Any, compute: Compute) -> None:
        """Test whether the step needs only the looked-up rows of tables that were pulled whole until now.

        Args:
            values: values of all trainable variables, by path, as :meth:`full_tables` gives them.
            x: inputs of the batch.
            compute: returns all results of the step for such values of variables; deterministic.
        """
        for name, reason in self._embedding_rows.unknown_tables(x).items():
            self._pull_whole(name, reason)
        rows = {name: each for name, each in self._embedding_rows.rows(x).items() if name in self._undecided}
        rows = {name: each for name, each in rows.items() if len(each) < len(values[name])}
        expected = _leaves(compute(dict(values))) if rows else []
        if not rows or not all(np.isfinite(leaf).all() for leaf in expected):
            return  # Inconclusive: no row is left out, or NaN would make no difference. Try the next batch.
        together = _all_close(_leaves(compute(_with_nan_rows(values, rows, list(rows)))), expected)
        for name in rows:
            if together or _all_close(_leaves(compute(_with_nan_rows(values, rows, [name]))), expected):
                self._sparse.add(name)
                self._undecided.discard(name)
            else:
                self._pull_whole(name, "the step uses rows that its layer does not look up")

    def needed_rows(self, x: Any) -> dict[str, np.ndarray]:
        """Return by path the rows that the inputs of a batch need, rising, int32; a variable that is not in it is needed whole."""
        known = self._embedding_rows.rows(x) if self._sparse else {}
        rows = {name: each for name, each in known.items() if name in self._sparse and self._is_worthwhile(name, each)}
        self.has_nan_rows = bool(rows)
        return rows

    def reconsider(self) -> None:
        """Decide again how to pull the tables: a step with NaN in the other rows has given NaN."""
        self._undecided |= self._sparse
        self._sparse = set()

    def full_tables(self, found: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return values for the step: tables of their full size, in which rows that were not pulled are NaN.

        The next call overwrites the returned tables.

        Args:
            found: the pulled values, by path.
            rows: the pulled rows of those variables that were not pulled whole, as :meth:`needed_rows` gave them.
        """
        return {
            name: self._fill_table(name, value, rows[name]) if name in rows else value for name, value in found.items()
        }

    def _is_worthwhile(self, name: str, rows: np.ndarray) -> bool:
        return 2 * len(rows) <= self._embedding_rows.height(name)

    def _pull_whole(self, name: str, reason: str) -> None:
        if name in self._undecided:
            self._undecided.discard(name)
            self._log(f"{name} is pulled whole for each batch: {reason}.")

    def _fill_table(self, name: str, values: np.ndarray, rows: np.ndarray) -> jax.Array:
        if name not in self._tables:
            self._tables[name] = _SparseTable((self._embedding_rows.height(name), *values.shape[1:]), values.dtype)
        return self._tables[name].fill(SparseGradient(rows, values))


class _SparseTable:
    """Memory of a whole table that holds the rows of one batch, and NaN in all other rows."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._value = jnp.full(shape, jnp.nan, dtype)
        self._last = np.zeros(0, np.int32)

    def fill(self, rows: SparseGradient) -> jax.Array:
        """Return the table with these rows, in the memory of the table that was returned before."""
        height = self._value.shape[0]
        last = pad_rows(SparseGradient(self._last, np.zeros((len(self._last), 0), np.float32)), height).indices
        self._value = _replace_rows(self._value, last, *pad_rows(rows, height))
        self._last = rows.indices
        return self._value


@functools.partial(jax.jit, donate_argnums=0)
def _replace_rows(table: jax.Array, last: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    table = table.at[last].set(jnp.nan, mode="drop")
    return table.at[indices].set(values, mode="drop")


def sparsify(gradients: Mapping[str, np.ndarray]) -> dict[str, Gradient]:
    """Return gradients as they are pushed: of large variables only the rows that are not zero, if these are at most half of them.

    Example:
        >>> table = np.zeros((5000, 1), "float32")
        >>> table[[7, 3]] = 1
        >>> sparsify({"table": table})["table"].indices.tolist()
        [3, 7]
    """
    return {name: _sparsify(np.asarray(gradient)) for name, gradient in gradients.items()}


def _sparsify(gradient: np.ndarray) -> Gradient:
    if gradient.ndim < 2 or len(gradient) < MIN_ROWS:
        return gradient
    size = gradient[0].size
    is_set = gradient.reshape(-1) != 0
    if 2 * np.count_nonzero(is_set) > gradient.size:
        return gradient  # More than half of the elements are in more than half of the rows.
    rows = np.flatnonzero(is_set) // size
    touched = rows[np.flatnonzero(np.diff(rows, prepend=-1))]
    return gradient if 2 * len(touched) > len(gradient) else SparseGradient(touched.astype(np.int32), gradient[touched])


def _with_nan_rows(values: Mapping[str, Any], rows: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """Return the values, with NaN in all other rows of the named tables."""
    found = dict(values)
    for name in names:
        whole = np.asarray(values[name])
        found[name] = np.full_like(whole, np.nan)
        found[name][rows[name]] = whole[rows[name]]
    return found


def _leaves(results: Any) -> list[np.ndarray]:
    """Return all arrays as float64, in which they can be compared."""
    return [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(results)]


def _all_close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    """Return whether finite arrays are equal except for rounding."""
    pairs = zip(found, expected, strict=True)
    return all(np.allclose(one, other, _TOLERANCE, _TOLERANCE * np.abs(other).max(initial=0)) for one, other in pairs)
