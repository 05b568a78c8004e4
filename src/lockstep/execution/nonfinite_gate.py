"""Gate that accepts the new state of a training step if its numbers are finite, and otherwise keeps the old state.

The step's program is the same as without a gate, except that it does not donate the old state; a second program selects one of the two
states. So the compiler cannot change the bits of a guarded step. A gate that has kept an old state is closed, and keeps the state in all
further steps, until it is opened: the host may read the result one step late, and the state before the non-finite step is still there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lockstep.devices.names import platform_of
from lockstep.execution.compiled_step import Step, state_lists
from lockstep.execution.jaxpr_utils import is_inexact

_CHECKED_PARTS = 3  # parts of the state: trainable, non-trainable and the optimizer's; metrics may be non-finite

StatePosition = tuple[int, int]  # a part of the state and a position in it


class NonFiniteGate:
    """Selects the old or the new state; if ``donated``, the selected one may reuse the memory of the new one.

    A number counts as non-finite if it is NaN or Inf and was not so before; a variable may thus hold a mask of ``-inf``.

    Attributes:
        nonfinite: for each of ``names`` whether it became non-finite in the last step, ``bool (len(names),)``, on the devices.
        names: the checked values: a part of the state and a position in it, or the name of a loss among the logs.
    """

    def __init__(self, *, donated: bool) -> None:
        self._donated = donated
        self._programs: dict[Any, _SelectionProgram] = {}
        self._is_closed: jax.Array | None = None
        self.nonfinite: Any = None
        self.names: list[StatePosition | str] = []

    def open(self) -> None:
        """Accept new states again."""
        self._is_closed = None

    def __call__(self, old: Any, new: Any, logs: Any) -> tuple[Any, ...]:
        """Return the state for the next step, from those before and after a step; ``new`` may be donated."""
        new = state_lists(new)
        changed = tuple((p, n) for p, part in enumerate(new) for n, value in enumerate(part) if value is not old[p][n])
        old_values, new_values = [old[p][n] for p, n in changed], [new[p][n] for p, n in changed]
        losses = loss_logs(logs)
        if not changed:  # The step trains nothing.
            self.names, self.nonfinite = [], jnp.zeros(0, bool)
            return new
        # What fills the last shards is finite.
        old_values, (new_values, form) = jax.tree.leaves(old_values), jax.tree.flatten(new_values)
        key = changed, tuple(losses)
        if key not in self._programs:
            self._programs[key] = _SelectionProgram(changed, new_values, tuple(losses), donated=self._donated)
        program = self._programs[key]
        closed = program.open_flag if self._is_closed is None else self._is_closed
        self.names = program.names
        self.nonfinite, self._is_closed, kept = program.run(closed, old_values, new_values, list(losses.values()))
        for (p, n), value in zip(changed, jax.tree.unflatten(form, kept), strict=True):
            new[p][n] = value
        return new


class _SelectionProgram:
    """The program that checks losses and the values that a step has changed, and selects the old or the new ones."""

    def __init__(
        self, changed: Sequence[StatePosition], values: list[jax.Array], losses: Sequence[str], *, donated: bool
    ) -> None:
        checked = [i for i, (p, _) in enumerate(changed) if p < _CHECKED_PARTS and is_inexact(values[i])]
        self.names: list[StatePosition | str] = [*(changed[i] for i in checked), *losses]
        shardings = [value.sharding for value in values]
        replicated = _replicated(shardings[0])
        on_cpu = platform_of(next(iter(shardings[0].device_set))) == "cpu"
        self.open_flag = jax.make_array_from_callback((), replicated, lambda _: np.zeros((), bool))

        def choose(closed: Any, old: list[Any], new: list[Any], losses: list[Any]) -> Any:
            values = [*(new[i] for i in checked), *losses]
            suspects = jnp.asarray([~jnp.isfinite(_max_magnitude(value)) for value in values], bool)

            def exactly() -> jax.Array:
                worse = [_became_nonfinite(old[i], new[i]) for i in checked]
                return jnp.asarray([*worse, *suspects[len(checked) :]], bool)

            # A GPU that branches waits for the host, so the next step would not be queued until this one has ended.
            bad = lax.cond(suspects.any(), exactly, lambda: jnp.zeros_like(suspects)) if on_cpu else exactly()
            closed = closed | bad.any()
            return bad, closed, [jnp.where(closed, a.astype(b.dtype), b) for a, b in zip(old, new, strict=True)]

        self.run = jax.jit(
            choose, donate_argnums=(2,) if donated else (), out_shardings=(replicated, replicated, shardings)
        )


class GatedStep(NamedTuple):
    """A compiled training step, which returns the state that its gate selected, and that gate."""

    step: Step
    gate: NonFiniteGate


def loss_logs(logs: Any) -> dict[str, Any]:
    """Return the losses among the logs of a step, by name."""
    named = logs.items() if isinstance(logs, dict) else ()
    return {
        name: value
        for name, value in named
        if (name == "loss" or str(name).endswith("_loss")) and isinstance(value, jax.Array) and is_inexact(value)
    }


def _max_magnitude(value: jax.Array) -> jax.Array:
    """Return the largest magnitude, NaN if any is NaN; reduces columns first, which XLA compiles to faster code than one long reduction."""
    columns = jnp.abs(value).max(axis=tuple(range(value.ndim - 1)), initial=0) if value.ndim > 1 else jnp.abs(value)
    return lax.optimization_barrier(columns).max(initial=0)


def _became_nonfinite(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return whether a number became NaN, or a finite number infinite."""
    return ((jnp.isnan(new) & ~jnp.isnan(old)) | (jnp.isinf(new) & jnp.isfinite(old))).any()


def _replicated(place: Sharding) -> Sharding:
    return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
