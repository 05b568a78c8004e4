"""Lets the new state of a training step through where its numbers are finite, and keeps the old one where they are not.

The step is the program that it always is, but for its memory: it leaves the old state alone, and a second program takes one of the two.
So the compiler cannot make other bits of a guarded step. A gate that has kept an old state is closed, and keeps the state of all further
steps, until it is opened: the host may look at what was found a step late, and finds the state before the bad step untouched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

__all__ = ["GatedStep", "NonFiniteGate", "losses_of"]

_LOOKED_AT = 3  # parts of the state: trainable, non-trainable and the optimizer's; a metric may be what it likes

Place = tuple[int, int]  # a part of the state and a position in it


class NonFiniteGate:
    """Takes the old or the new state.

    A number is bad where it is NaN or Inf and was not so before; a mask of ``-inf`` may thus be kept in a variable.

    Args:
        donated: whether the new state may give its memory to what is kept.

    Attributes:
        bad: for each of ``names`` whether it was bad in the last step, ``bool (len(names),)``, on the devices.
        names: what is looked at: a part of the state and a position in it, or the name of a loss among the logs.
    """

    def __init__(self, *, donated: bool) -> None:
        self._donated = donated
        self._programs: dict[Any, _Choice] = {}
        self._is_closed: jax.Array | None = None
        self.bad: Any = None
        self.names: list[Place | str] = []

    def open(self) -> None:
        """Let states through again."""
        self._is_closed = None

    def __call__(self, old: Any, new: Any, logs: Any) -> tuple[Any, ...]:
        """The state to go on with.

        Args:
            old: the state before a step.
            new: the state after it, whose memory may be used up.
            logs: of the step.
        """
        new = tuple(list(part) for part in new)
        where = tuple((p, n) for p, part in enumerate(new) for n, value in enumerate(part) if value is not old[p][n])
        olds, news = [old[p][n] for p, n in where], [new[p][n] for p, n in where]
        losses = losses_of(logs)
        if not where:  # The step trains nothing.
            self.names, self.bad = [], jnp.zeros(0, bool)
            return new
        key = where, tuple(losses)
        if key not in self._programs:
            self._programs[key] = _Choice(where, news, tuple(losses), donated=self._donated)
        choice = self._programs[key]
        closed = choice.open if self._is_closed is None else self._is_closed
        self.names = choice.names
        self.bad, self._is_closed, kept = choice.run(closed, olds, news, list(losses.values()))
        for (p, n), value in zip(where, kept, strict=True):
            new[p][n] = value
        return new


class _Choice:
    """The program that looks at some values and takes the old or the new ones.

    Args:
        where: parts of the state and positions in it that change in a step.
        values: the new values there.
        losses: names of losses.
        donated: see :class:`NonFiniteGate`.
    """

    def __init__(
        self, where: Sequence[Place], values: list[jax.Array], losses: Sequence[str], *, donated: bool
    ) -> None:
        looked_at = [i for i, (p, _) in enumerate(where) if p < _LOOKED_AT and _varies(values[i])]
        self.names: list[Place | str] = [*(where[i] for i in looked_at), *losses]
        places = [value.sharding for value in values]
        everywhere = _whole(places[0])
        self.open = jax.make_array_from_callback((), everywhere, lambda _: np.zeros((), bool))

        def choose(closed: Any, old: list[Any], new: list[Any], losses: list[Any]) -> Any:
            values = [*(new[i] for i in looked_at), *losses]
            suspects = jnp.asarray([~jnp.isfinite(_largest(value)) for value in values], bool)

            def exactly() -> jax.Array:
                worse = [_is_worse(old[i], new[i]) for i in looked_at]
                return jnp.asarray([*worse, *suspects[len(looked_at) :]], bool)

            bad = lax.cond(suspects.any(), exactly, lambda: jnp.zeros_like(suspects))
            closed = closed | bad.any()
            return bad, closed, [jnp.where(closed, a.astype(b.dtype), b) for a, b in zip(old, new, strict=True)]

        given = (2,) if donated else ()
        self.run = jax.jit(choose, donate_argnums=given, out_shardings=(everywhere, everywhere, places))


class GatedStep:
    """A compiled training step with a gate of its own.

    Args:
        compile_with: compiles the step, given the gate.
        donated: see :class:`NonFiniteGate`.
    """

    def __init__(self, compile_with: Callable[[NonFiniteGate], Callable[[Any, Any], Any]], *, donated: bool) -> None:
        self.gate = NonFiniteGate(donated=donated)
        self._step = compile_with(self.gate)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Logs, and the state that the gate has let through or kept."""
        return self._step(state, batch)


def losses_of(logs: Any) -> dict[str, Any]:
    """What is a loss among the logs of a step, by its name."""
    named = logs.items() if isinstance(logs, dict) else ()
    return {
        name: value
        for name, value in named
        if (name == "loss" or str(name).endswith("_loss")) and isinstance(value, jax.Array) and _varies(value)
    }


def _largest(value: jax.Array) -> jax.Array:
    """The largest magnitude, NaN if any is: column by column first, which XLA makes faster code of than of one long reduction."""
    columns = jnp.abs(value).max(axis=tuple(range(value.ndim - 1)), initial=0) if value.ndim > 1 else jnp.abs(value)
    return lax.optimization_barrier(columns).max(initial=0)


def _is_worse(old: jax.Array, new: jax.Array) -> jax.Array:
    """Whether a number has become NaN that was none, or infinite that was finite."""
    return ((jnp.isnan(new) & ~jnp.isnan(old)) | (jnp.isinf(new) & jnp.isfinite(old))).any()


def _varies(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _whole(place: Sharding) -> Sharding:
    return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
