"""Extract the gradients of a training step: its trace without the optimizer's update.

While the step is traced, the optimizer's call binds a primitive, which is then removed from the jaxpr. So Keras's ``train_step``,
or a user's, computes gradients on some devices, and the optimizer may run on another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import keras
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching

from lockstep._errors import ModelError
from lockstep._keras.patches import OPTIMIZER_UPDATE, patched_method
from lockstep.devices.placement import Placement
from lockstep.devices.xla_flags import compiler_options
from lockstep.execution.compiled_step import Step, state_changes
from lockstep.execution.jaxpr_utils import inline_calls, live_equations, subprogram, variables_in
from lockstep.execution.xla_partitioner_workarounds import constrain_partitioning

State = Sequence[Sequence[Any]]  # trainable, non-trainable, optimizer's and metrics' values

_update_p = Primitive("lockstep_update")
_update_p.multiple_results = True
_update_p.def_abstract_eval(lambda *values, count: [ShapedArray(x.shape, x.dtype) for x in values[count:]])


def _refuse(step: str, what: str, *_: Any, **__: Any) -> NoReturn:
    raise ModelError(
        f"{step} {what}. Under this strategy another device or process computes the update, so the step must call "
        "optimizer.stateless_apply once, with the optimizer's and the trainable values that it was given, and return the result "
        "unchanged. Fix: change the step, or train the model under a MirroredStrategy."
    )


ad.primitive_jvps[_update_p] = partial(_refuse, "A model's train_step", "differentiates its update")
batching.primitive_batchers[_update_p] = partial(_refuse, "A model's train_step", "calls the optimizer under jax.vmap")


class GradientPrograms:
    """Programs of a step without its update, one for each combination of shapes of a batch.

    Args:
        step: a training step on arrays.
        model: the model whose optimizer the step calls.
        placement: the devices that compute.
        donated: whether the gradients may reuse the memory of the trainable values.
        is_replicated: whether every device gets all results; else they stay where they are computed.
    """

    def __init__(
        self, step: Step, model: keras.Model, placement: Placement, *, donated: bool, is_replicated: bool = True
    ) -> None:
        out_shardings = placement.replicated if is_replicated else None
        step = constrain_partitioning(step, placement.mesh)
        self._make = partial(GradientProgram, step, model, placement, donated=donated, out_shardings=out_shardings)
        self._programs: dict[Any, GradientProgram] = {}

    def program_for(self, state: State, batch: Any) -> "GradientProgram":
        """Return the program for a state and a batch of these shapes, on any devices."""
        leaves, structure = jax.tree.flatten((tuple(map(list, state)), batch))
        key = structure, *map(jax.typeof, leaves)
        if key not in self._programs:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in map(jax.typeof, leaves)]
            self._programs[key] = self._make(*jax.tree.unflatten(structure, shapes))
        return self._programs[key]


class GradientProgram:
    """The program for batches of one combination of shapes; see :class:`GradientPrograms`.

    Attributes:
        is_used: for each value of the state whether the program reads it.
    """

    def __init__(
        self,
        step: Step,
        model: keras.Model,
        placement: Placement,
        state: State,
        batch: Any,
        *,
        donated: bool,
        out_shardings: Any,
    ) -> None:
        def marked(state: State, batch: Any) -> Any:
            with patched_method(OPTIMIZER_UPDATE, [model.optimizer], lambda *_: _bind_update):
                logs, new = step(state, batch)
            return new[0], new[2], (logs, state_changes((state[1], state[3]), (new[1], new[3])))

        name = f"{type(model).__name__}.train_step"
        closed, results = jax.make_jaxpr(marked, return_shape=True)(state, batch)
        closed = inline_calls(closed, _update_p, lambda where: _refuse(name, f"calls the optimizer {where}"))
        jaxpr = closed.jaxpr
        sizes = [len(part) for part in state]
        update = _find_update(jaxpr, sizes, partial(_refuse, name))
        self._num_gradients = update.params["count"]
        self._results = jax.tree.structure(results[2])
        outputs = [*update.invars[: self._num_gradients], *jaxpr.outvars[sizes[0] + sizes[2] :]]
        equations, used = live_equations([one for one in jaxpr.eqns if one is not update], outputs)
        self._used_inputs = [position for position, var in enumerate(jaxpr.invars) if var in used]
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._constants = placement.put(list(constants.values()))
        inputs = [*constants, *(jaxpr.invars[position] for position in self._used_inputs)]
        trainable = set(jaxpr.invars[: sizes[0]])
        donated_inputs = [n for n, var in enumerate(inputs) if donated and var in trainable]
        function = subprogram(jaxpr, equations, inputs, outputs)
        options = compiler_options(placement.platform)
        self._program = jax.jit(
            function, donate_argnums=donated_inputs, out_shardings=out_shardings, compiler_options=options
        )
        flags = iter([var in used for var in jaxpr.invars])
        self.is_used = [[next(flags) for _ in part] for part in state]

    def __call__(self, state: State, batch: Any) -> tuple[list[jax.Array], Any, list[list[Any]]]:
        """Run the program on a placed batch; a value of the state that is not used may be None.

        Returns:
            The gradients, the logs, and the new non-trainable and metrics values, None for each that did not change.
        """
        values = [value for part in state for value in part] + jax.tree.leaves(batch)
        found = self._program(*self._constants, *(values[position] for position in self._used_inputs))
        logs, changes = jax.tree.unflatten(self._results, found[self._num_gradients :])
        return found[: self._num_gradients], logs, changes


def _bind_update(optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]) -> tuple[Any, Any]:
    """Replace an optimizer's ``stateless_apply`` while a step is traced."""
    count = len(grads)
    found = _update_p.bind(*grads, *trainable_variables, *optimizer_variables, count=count)
    return found[:count], found[count:]


def _find_update(jaxpr: Jaxpr, sizes: list[int], refuse: Callable[[str], NoReturn]) -> JaxprEqn:
    """Return the only update of a traced step, which reads its values from the state and returns them to it."""
    found = [equation for equation in jaxpr.eqns if equation.primitive is _update_p]
    if len(found) != 1:
        refuse(f"calls optimizer.stateless_apply {len(found)} times")
    (update,) = found
    before_optimizer = sizes[0] + sizes[1]
    expected = [*jaxpr.invars[: sizes[0]], *jaxpr.invars[before_optimizer : before_optimizer + sizes[2]]]
    if not _are_identical(update.invars[update.params["count"] :], expected):
        refuse("passes optimizer.stateless_apply other values than those of its state")
    count = len(expected)
    if not _are_identical(jaxpr.outvars[:count], update.outvars):
        refuse("returns other values than those that optimizer.stateless_apply returns")
    users = [atom for equation in jaxpr.eqns for atom in equation.invars] + jaxpr.outvars[count:]
    if any(var in update.outvars for var in variables_in(users)):
        refuse("uses the result of optimizer.stateless_apply")
    return update


def _are_identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
