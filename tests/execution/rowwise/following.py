"""Helpers that run the row proof on functions and models."""

import jax
import jax.numpy as jnp

from lockstep._keras.batch_normalization import disable_batch_statistics
from lockstep._keras.graph import is_seed
from lockstep.execution.rowwise.proof import prove_rows, statistic_of_replica, trace_for_rows
from lockstep.execution.rowwise.row_axes import RowAxis

ROWS = (6, 4)


def dependences_of_function(function, *batch):
    """Return the dependences of the results of a function of arrays ``(rows, …)``."""
    return prove_rows(
        *(trace_for_rows(lambda _, own: jax.tree.leaves(function(*own)), [], batch, rows) for rows in ROWS)
    ).results


def dependences_of_model(model, *batch, training=None):
    """Return the dependences of the outputs of a built model, then of the losses of its layers; ``batch`` are its arguments."""
    leaves, structure = jax.tree.flatten(batch)
    values = [
        [variable.value for variable in group] for group in (model.trainable_variables, model.non_trainable_variables)
    ]
    options = {} if training is None else {"training": training}

    def call(fixed, own):
        count = len(values[0])
        outputs, _, losses = model.stateless_call(
            fixed[:count], fixed[count:], *jax.tree.unflatten(structure, own), return_losses=True, **options
        )
        return [jnp.asarray(leaf) for leaf in (*jax.tree.leaves(outputs), *losses)]

    seeds = [len(values[0]) + n for n, variable in enumerate(model.non_trainable_variables) if is_seed(variable)]
    with disable_batch_statistics(model, statistic_of_replica):
        fixed = [*values[0], *values[1]]
        return prove_rows(*(trace_for_rows(call, fixed, leaves, rows, seeds) for rows in ROWS)).results


def is_by_rows(place):
    """Return whether entry ``i`` of the first axis depends on row ``i`` only."""
    return isinstance(place, RowAxis) and place.axis == 0 and (place.outer == 1 or place.uniform)
