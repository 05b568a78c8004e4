"""Which rows of its embeddings a model looks up for a batch, before any value is there: only what leads to the row numbers is computed."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._keras.layers import operations_of
from lockstep._keras.patches import LAYER_CALL, patched_method

__all__ = ["EmbeddingRows", "tables_of"]

Ids = dict[str, list[jax.Array]]


def tables_of(model: keras.Model) -> dict[str, keras.layers.Embedding]:
    """By the path of its table, each embedding that is trained and is looked up as Keras does it."""
    trained = {id(variable) for variable in model.trainable_variables}
    layers = [each for each in operations_of(model) if isinstance(each, keras.layers.Embedding) and each.built]
    layers = [each for each in layers if inspect.unwrap(type(each).call) is inspect.unwrap(keras.layers.Embedding.call)]
    return {each.embeddings.path: each for each in layers if id(each.embeddings) in trained}


class EmbeddingRows:
    """The rows that a model looks up in tables.

    Args:
        model: is built.
        tables: by path, as :func:`tables_of` gives them.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.variables.embedding_rows import EmbeddingRows, tables_of
        >>> model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 1, name="words")])
        >>> [rows.tolist() for rows in EmbeddingRows(model, tables_of(model)).rows(np.array([[7, 3], [3, -1]])).values()]
        [[3, 7, 8]]
    """

    def __init__(self, model: keras.Model, tables: Mapping[str, keras.layers.Embedding]) -> None:
        self._model, self._tables = model, dict(tables)
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self._reasons: dict[Any, dict[str, str]] = {}
        self._program = jax.jit(lambda x: self._ids(*self._zeros(), x))

    def rows(self, x: Any) -> dict[str, np.ndarray]:
        """By path the rows, rising, int32, of each table whose rows can be known.

        Args:
            x: of the batch.
        """
        impossible = self.impossible(x)
        if len(impossible) == len(self._tables):
            return {}
        found = self._program(x)
        return {name: _unique(np.asarray(found[name]), self.height(name)) for name in found if name not in impossible}

    def height(self, name: str) -> int:
        """The number of rows of a table."""
        return self._tables[name].input_dim

    def impossible(self, x: Any) -> dict[str, str]:
        """By path why the rows of a table cannot be known before a step.

        Args:
            x: of the batch, or of one like it.
        """
        leaves, structure = jax.tree.flatten(x)
        signature = (structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))
        if signature not in self._reasons:
            self._reasons[signature] = self._judged(x)
        return self._reasons[signature]

    def _judged(self, x: Any) -> dict[str, str]:
        kinds = self._model.trainable_variables, self._model.non_trainable_variables
        values = [[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in kind] for kind in kinds]
        try:
            traced = jax.make_jaxpr(self._ids)(*values, x).jaxpr
        except Exception as error:  # The model is the user's, and its own train_step may call it in another way.
            return dict.fromkeys(self._tables, f"the model cannot be called on a batch alone ({error})")
        count = sum(map(len, values))
        depend = [_leads(traced, each, traced.invars[:count]) for each in traced.outvars]
        reason = "which rows are looked up depends on variables of the model"
        return {name: reason for name, depends in zip(sorted(self._tables), depend, strict=True) if depends}

    def _zeros(self) -> tuple[list[jax.Array], list[jax.Array]]:
        trainable, others = self._model.trainable_variables, self._model.non_trainable_variables
        return [jnp.zeros(each.shape, each.dtype) for each in trainable], [
            jnp.zeros(each.shape, each.dtype) for each in others
        ]

    def _ids(self, trainable: list[Any], others: list[Any], x: Any) -> dict[str, jax.Array]:
        """For each table the numbers of rows, in any order; its number of rows stands for none."""
        found: Ids = {name: [jnp.zeros((0,), "int32")] for name in self._tables}
        options = {"training": True} if self._takes_training else {}
        with patched_method(LAYER_CALL, self._tables.values(), self._noting(found)):
            self._model.stateless_call(trainable, others, x, **options)
        return {name: jnp.concatenate(each) for name, each in found.items()}

    def _noting(self, found: Ids) -> Callable[[Any, Any], Any]:
        names = {id(layer): name for name, layer in self._tables.items()}

        def around(layer: keras.layers.Embedding, call: Callable[..., Any]) -> Callable[..., Any]:
            def noting(inputs: Any) -> Any:
                found[names[id(layer)]].append(_rows_of(inputs, layer.input_dim))
                return call(inputs)

            return noting

        return around


def _rows_of(inputs: Any, count: int) -> jax.Array:
    """The rows that ``Embedding`` takes on JAX: numbers below 0 count from the end; one outside of the table is no row, and gives NaN."""
    ids = jnp.ravel(jnp.asarray(inputs))
    ids = ids if ids.dtype in (jnp.int32, jnp.int64) else keras.ops.cast(ids, "int32")
    ids = jnp.where(ids < 0, ids + count, ids)
    return jnp.where((ids >= 0) & (ids < count), ids, count).astype("int32")


def _unique(ids: np.ndarray, count: int) -> np.ndarray:
    """The numbers below ``count`` among these, rising: a mask is faster than sorting."""
    is_named = np.zeros(count + 1, bool)
    is_named[ids] = True
    return np.flatnonzero(is_named[:count]).astype(np.int32)


def _leads(traced: Any, output: Any, inputs: list[Any]) -> bool:
    """Whether an output of a traced program is computed from one of these inputs."""
    wanted = {id(output)}
    for equation in reversed(traced.eqns):
        if any(id(each) in wanted for each in equation.outvars):
            wanted.update(id(each) for each in equation.invars)
    return any(id(each) in wanted for each in inputs)
