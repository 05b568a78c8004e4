"""How one call of the model is taken apart into replicas, and what came back is put together.

Whether a result has rows is not guessed from one shape but seen from two: that of the whole batch, as one device would
give it, and that of one replica. Where the answer is neither "one for each row" nor "the same for every number of rows", or
the model does not run on a part of its batch, the call cannot be taken apart, and the model runs on the global batch. So it is where
there are several for each row: whose is whose, shapes do not tell.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep import _keras
from lockstep._keras_layers import arrays_kept, keep_arrays
from lockstep.step.replica import Merge, Result

__all__ = ["CannotSplit", "SplitCall", "merge_of"]


class CannotSplit(Exception):  # noqa: N818  # a way to go on, not an error that anyone sees
    """The call must see the global batch; the message says why."""


class SplitCall:
    """One call of a model's ``stateless_call``, to be made once for each replica.

    What layers keep in their attributes while they are called is a result like others: the rest of a step may use it.

    Args:
        model: the model.
        original: its own ``stateless_call``.
        arguments: positional and keyword arguments after the two lists of values.
        is_row: whether an array, by identity, is known to be cut into rows.

    Raises:
        CannotSplit: an argument may or may not be cut into rows.
    """

    def __init__(
        self, model: keras.Model, original: Callable[..., Any], arguments: Any, is_row: Callable[[Any], bool]
    ) -> None:
        self.model, self.original = model, original
        self.leaves, self.structure = jax.tree.flatten(arguments)
        inputs = len(jax.tree.leaves(arguments[0][:1]))  # of the first argument, which are rows if anything is
        self.rows = next((np.shape(leaf)[0] for leaf in self.leaves[:inputs] if np.ndim(leaf)), 0)
        same_length = [np.ndim(leaf) > 0 and np.shape(leaf)[0] == self.rows for leaf in self.leaves]
        self.cut = [
            same and (position < inputs or is_row(leaf))
            for position, (leaf, same) in enumerate(zip(self.leaves, same_length, strict=True))
        ]
        if self.cut != same_length:
            raise CannotSplit(
                f"an argument besides the inputs has {self.rows} entries, as the batch has rows; whether they belong to "
                "the rows cannot be seen"
            )
        self.outputs: Any = None  # structure of the outputs; it and the next are known after `learn`
        self.masked: list[bool] = []
        self.kept: list[Any] = []  # the attributes
        self.kinds: list[str] = []  # for outputs, then losses, then what is kept: "rows" or "mean"
        self.dtypes: list[Any] = []

    @property
    def inputs(self) -> list[Any]:
        """The arguments that are cut into rows."""
        return [leaf for leaf, cut in zip(self.leaves, self.cut, strict=True) if cut]

    @property
    def shared(self) -> list[Any]:
        """The arguments that each replica gets whole; numbers and flags, which are no arrays, are left out."""
        return [
            leaf for leaf, cut in zip(self.leaves, self.cut, strict=True) if not cut and isinstance(leaf, jax.Array)
        ]

    def learn(self, trainable: list[Any], non_trainable: list[Any], sizes: set[int]) -> None:
        """See from the whole batch and from replicas of ``sizes`` rows what has rows and what has not.

        Raises:
            CannotSplit: a result follows the batch on another axis than its first, or a replica does not run.
        """

        def shapes(rows: int) -> tuple[list[Any], list[Any]]:
            cut = [jax.ShapeDtypeStruct((rows, *np.shape(leaf)[1:]), leaf.dtype) for leaf in self.inputs]
            return jax.eval_shape(lambda leaves: self._call(trainable, non_trainable, leaves, self.shared)[:2], cut)

        whole, masks = shapes(self.rows)
        self.dtypes = [one.dtype for one in whole]
        for size in sizes:
            try:
                part, own_masks = shapes(size)
            except Exception as error:  # whatever it is: the same call has run on all rows
                reason = str(error).strip().partition("\n")[0]
                raise CannotSplit(f"it runs on {self.rows} rows but not on {size} of them ({reason})") from error
            pairs = zip([*whole, *masks], [*part, *own_masks], strict=True)
            self.kinds = [_kind(one, other, self.rows, size) for one, other in pairs][: len(whole)]

    def __call__(self, trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any]) -> Result:
        """One replica's forward pass."""
        values, masks, state = self._call(trainable, non_trainable, inputs, shared)
        return Result(
            rows=[*(value for value, kind in zip(values, self.kinds, strict=True) if kind == "rows"), *masks],
            means=[value for value, kind in zip(values, self.kinds, strict=True) if kind == "mean"],
            state=[None if new is old else jnp.asarray(new) for new, old in zip(state, non_trainable, strict=True)],
        )

    def _call(
        self, trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any]
    ) -> tuple[list[Any], ...]:
        """Outputs, losses and what is kept; masks; and new non-trainable values, each as a flat list."""
        own, whole = iter(inputs), iter(shared)
        leaves = [
            next(own) if cut else next(whole) if isinstance(leaf, jax.Array) else leaf
            for leaf, cut in zip(self.leaves, self.cut, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        before = arrays_kept(self.model)
        outputs, state, losses = self.original(trainable, non_trainable, *args, return_losses=True, **kwargs)
        kept = {place: array for place, array in arrays_kept(self.model).items() if array is not before.get(place)}
        self.kept = list(kept)
        outputs, self.outputs = jax.tree.flatten(outputs)
        masks = [_keras.get_keras_mask(leaf) for leaf in outputs]
        self.masked = [mask is not None for mask in masks]
        return (
            [jnp.asarray(value) for value in (*outputs, *losses, *kept.values())],
            [mask for mask in masks if mask is not None],
            state,
        )

    def joined(self, result: Result) -> tuple[Any, list[Any]]:
        """Outputs, with their masks, and losses, of the whole batch; what is kept is left in its attributes."""
        rows, means = iter(result.rows), iter(result.means)
        values = [
            next(rows) if kind == "rows" else next(means).astype(dtype)
            for kind, dtype in zip(self.kinds, self.dtypes, strict=True)
        ]
        count = len(values) - len(self.kept)
        outputs, losses = values[: self.outputs.num_leaves], values[self.outputs.num_leaves : count]
        keep_arrays(self.kept, values[count:])
        for output, masked in zip(outputs, self.masked, strict=True):
            if masked:
                _keras.set_keras_mask(output, next(rows))
        return jax.tree.unflatten(self.outputs, outputs), losses


def _kind(whole: jax.ShapeDtypeStruct, part: jax.ShapeDtypeStruct, rows: int, size: int) -> str:
    """What a result is, from its shapes for the whole batch of ``rows`` rows and for a replica of ``size``."""
    if whole.shape == part.shape and jnp.issubdtype(whole.dtype, jnp.floating):
        return "mean"
    if (whole.shape[:1], part.shape[:1]) == ((rows,), (size,)) and whole.shape[1:] == part.shape[1:]:
        return "rows"
    raise CannotSplit(
        f"it returns {whole.dtype}{list(whole.shape)} for {rows} rows and {part.dtype}{list(part.shape)} for {size}, "
        "which are neither rows nor an average"
    )


def merge_of(variable: keras.Variable) -> Merge:
    """How the replicas' values of a non-trainable variable become one."""
    if _keras.is_seed(variable):
        return Merge.SEED
    if variable.aggregation == "sum":
        return Merge.SUM
    if variable.aggregation == "only_first_replica" or "float" not in variable.dtype:
        return Merge.FIRST
    return Merge.MEAN
