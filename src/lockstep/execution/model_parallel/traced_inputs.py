"""The inputs with which a forward pass is traced: what is chosen from it must not depend on the batch with which a run begins or resumes.

A model is traced with ``ROWS`` rows, and along each axis that it leaves open with the first of ``LENGTHS`` that it takes. If it states no
inputs, those axes are open along which it can also be traced with ``LENGTHS[0]`` in place of the length of the batch.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import keras
from jax.extend.core import ClosedJaxpr

from lockstep.devices.placement import PlacedRows, is_rows

ROWS = 8
LENGTHS = (128, 32, 8, 512, 2048, 8192, 32768)

Shapes = tuple[tuple[int, ...], ...]
Trace = Callable[[Shapes], ClosedJaxpr]


@dataclass(frozen=True)
class InputShape:
    """Shape and type of one array that a model takes, ``(rows, …)``; None stands for any length."""

    shape: tuple[int | None, ...]
    dtype: Any

    def filled(self, length: int, rows: int | None) -> tuple[int, ...]:
        """Return the shape with ``length`` in place of None, and with ``rows`` rows; None: with its own, if it has a number of them."""
        if not self.shape:
            return ()
        return (rows or self.shape[0] or ROWS, *(length if n is None else n for n in self.shape[1:]))


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes.

    Attributes:
        tree: an ``InputShape`` for each array, in the structure that the model's call takes.
        are_stated: whether the model states them; if not, they are those of a batch, and the next batch may have other lengths.
    """

    tree: Any
    are_stated: bool

    @property
    def row_axes(self) -> list[int | None]:
        """For each array the axis of its rows; None: it has none."""
        return [0 if leaf.shape else None for leaf in jax.tree.leaves(self.tree)]

    def trace(self, forward: Callable[[Any, Any], Any], values: Any) -> ClosedJaxpr:
        """Trace a function of ``values``, a tree of arrays or of their shapes and types, and of the inputs.

        Nothing that the model warns of is shown: some lengths are none that it will get.

        Raises:
            Exception: of the model, of any type: it takes none of the lengths.
        """
        leaves, structure = jax.tree.flatten(self.tree)

        def trace(shapes: Shapes) -> ClosedJaxpr:
            pairs = zip(shapes, leaves, strict=True)
            arrays = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in pairs]
            return jax.make_jaxpr(forward)(values, jax.tree.unflatten(structure, arrays))

        choices = [(length, rows) for length in LENGTHS for rows in (ROWS, None)]
        tried = dict.fromkeys(tuple(leaf.filled(*choice) for leaf in leaves) for choice in choices)
        with warnings.catch_warnings(action="ignore"):
            program, shapes = _first_traced(trace, list(tried))
            return program if self.are_stated else _with_open_lengths(trace, program, shapes)


def inputs_of_model(model: keras.Model) -> ModelInputs | None:
    """Return the inputs of a model that is built with them; None if it does not know them.

    A ``Sequential`` model without ``keras.Input`` has those of the batch that built it, and also the number of its rows.
    """
    if not model.built or not getattr(model, "inputs", None):
        return None
    is_sequential = isinstance(model, keras.Sequential)
    tensors = model.inputs[0] if is_sequential else model.input
    tree = keras.tree.map_structure(lambda tensor: InputShape(tuple(tensor.shape), tensor.dtype), tensors)
    return ModelInputs(tree, are_stated=not is_sequential or None in tree.shape[:1])


def inputs_of_batch(x: Any) -> ModelInputs:
    """Return the inputs of a model that does not know them: those of ``x``, a tree of arrays or of their shapes and types."""

    def described(leaf: Any) -> InputShape:
        """Return the shape and type as the model gets them."""
        dtype = leaf.dtype if isinstance(leaf, PlacedRows) else jax.typeof(leaf).dtype
        return InputShape(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(dtype))

    return ModelInputs(jax.tree.map(described, x, is_leaf=is_rows), are_stated=False)


def _first_traced(trace: Trace, tried: list[Shapes]) -> tuple[ClosedJaxpr, Shapes]:
    for shapes in tried:
        program = _traced(trace, shapes)
        if program is not None:
            return program, shapes
    return trace(tried[0]), tried[0]  # with its error


def _traced(trace: Trace, shapes: Shapes) -> ClosedJaxpr | None:
    """Return the traced program; None if the model does not take these shapes: it fails, or nothing is left after a window."""
    try:
        program = trace(shapes)
    except Exception:  # of the model, of any type
        return None
    results = [one.aval for equation in program.jaxpr.eqns for one in equation.outvars]
    return None if any(0 in getattr(aval, "shape", ()) for aval in results) else program


def _with_open_lengths(trace: Trace, program: ClosedJaxpr, shapes: Shapes) -> ClosedJaxpr:
    """Trace with ``LENGTHS[0]`` along each axis that takes it: along all axes of one length, as of tokens and their mask, or along one."""
    places = defaultdict(list)
    for number, shape in enumerate(shapes):
        for axis, length in enumerate(shape[1:], 1):
            places[length].append((number, axis))
    places.pop(LENGTHS[0], None)
    waiting = list(places.values())
    while waiting:
        open_axes = waiting.pop(0)
        changed = tuple(
            tuple(LENGTHS[0] if (number, axis) in open_axes else length for axis, length in enumerate(shape))
            for number, shape in enumerate(shapes)
        )
        found = _traced(trace, changed)
        if found is not None:
            program, shapes = found, changed
        elif len(open_axes) > 1:
            waiting += [[one] for one in open_axes]
    return program
