"""The state of a step: who may give its memory away, what has changed in it, and one step at a time."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.devices.xla_options import compiler_options

__all__ = ["StateValues", "Step", "TrainState", "changes_of", "dispatch_lock", "with_changes", "without_aliases"]

Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (logs or outputs, state)

# Two threads that start steps on the same devices at once could start them in another order on each device, and their
# collectives would wait for each other for ever. A step that starts another one (a teacher, in a callback) may do so.
dispatch_lock = threading.RLock()


@jax.tree_util.register_pytree_node_class
class StateValues(Sequence[Any]):
    """One part of a state that Keras is given.

    Keras hangs the state on the model after each step, which looks at each number of a list or tuple in Python; what is
    neither it leaves alone. With many variables that is most of the host's time.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)

    def __getitem__(self, position: Any) -> Any:
        return self._values[position]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """For JAX: it is a tree like a list."""
        return self._values, None

    @classmethod
    def tree_unflatten(cls, _: None, values: Iterable[Any]) -> "StateValues":
        """The opposite."""
        return cls(values)


class TrainState:
    """A compiled training step, whose new state lies in the same places as the old, and has its memory where that is ``donated``.

    Args:
        step: on arrays.
        places: where the parts of a state lie.
        platform: of the devices.
        donated: whether the new state has the old one's memory.
    """

    def __init__(self, step: Step, places: Callable[[Any], Any], platform: str, *, donated: bool) -> None:
        self._step, self._places, self._donated = step, places, donated
        self._options = compiler_options(platform)
        self._program: Any = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Logs and the new state."""
        if self._program is None:
            self._program = self._made(state)
        result, new = self._program(state, batch)
        return result, new if self._donated else with_changes(state, new)

    def ahead(self, state: Any, batch: Any) -> jax.stages.Compiled:
        """The program for a state and a batch of these shapes, without running it."""
        kinds = jax.tree.map(jax.typeof, tuple(list(part) for part in state))
        described = jax.tree.map(_described, kinds, jax.tree.broadcast(self._places(state), kinds))
        return self._made(state).lower(described, batch).compile()

    def _made(self, state: Any) -> Any:
        places, donated = self._places(state), (0,) if self._donated else ()
        return jax.jit(
            self._run, donate_argnums=donated, out_shardings=(places[0], places), compiler_options=self._options
        )

    def _run(self, state: Any, batch: Any) -> tuple[Any, Any]:
        result, new = self._step(state, batch)
        return result, tuple(list(part) for part in new) if self._donated else tuple(changes_of(state, new))


def _described(kind: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place, weak_type=kind.weak_type)


def without_aliases(state: Any) -> tuple[Any, ...]:
    """An array that stands twice in a state (Keras leaves averages so) cannot be given away twice: copy the second."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tuple(state))


def changes_of(old: Any, new: Any) -> list[list[Any]]:
    """The new values, with None for each that is the old one."""
    return [
        [None if after is before else after for before, after in zip(*parts, strict=True)]
        for parts in zip(old, new, strict=True)
    ]


def with_changes(old: Any, changes: Any) -> list[list[Any]]:
    """The opposite of :func:`changes_of`."""
    return [
        [before if after is None else after for before, after in zip(*parts, strict=True)]
        for parts in zip(old, changes, strict=True)
    ]
