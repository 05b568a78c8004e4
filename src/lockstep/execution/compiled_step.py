"""State of a step: its types, donated memory, changed values, and the lock that starts one step at a time."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from lockstep._padded_array import PaddedArray, cut, is_padded, pad

Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (logs or outputs, state)

# Two threads that start steps on the same devices at once could start them in a different order on each device, and their
# collectives would deadlock. Two that trace the same models would replace their methods, and restore them, in any order.
# Reentrant: a step may start another one (a teacher, in a callback).
dispatch_lock = threading.RLock()


def start_lock(devices: Sequence[jax.Device]) -> AbstractContextManager[Any]:
    """Return the context in which a program is started on these devices: several run one at a time, a single one needs no lock."""
    return dispatch_lock if len(devices) > 1 else nullcontext()


@jax.tree_util.register_pytree_node_class
class StateValues(Sequence[Any]):
    """One part of a state that is returned to Keras.

    Keras sets the state as an attribute of the model after each step, and tracks each element of a list or tuple in Python; other
    types it leaves alone. With many variables that tracking is most of the host's time.
    """

    __slots__ = ("_given",)

    def __init__(self, values: Iterable[Any]) -> None:
        self._given = tuple(values)

    @property
    def _values(self) -> tuple[Any, ...]:
        return self._given

    def __getitem__(self, position: Any) -> Any:
        return self._values[position]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Flatten for JAX, like a list."""
        return self._values, None

    @classmethod
    def tree_unflatten(cls, _: None, values: Iterable[Any]) -> "StateValues":
        """Unflatten for JAX."""
        return cls(values)


def state_lists(state: Any) -> tuple[list[Any], ...]:
    """Return a state with plain lists of values."""
    return tuple(list(part) for part in state)


class CompiledTrainStep:
    """A training step on arrays, compiled at its first call; the new state has the shardings of the old, and if ``donated`` its memory."""

    def __init__(self, step: Step, shardings: Callable[[Any], Any], options: dict[str, str], *, donated: bool) -> None:
        self._step, self._options, self._donated = step_on_padded_state(step, shardings), options, donated
        self._shardings = shardings
        self._program: Any = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Return logs and the new state."""
        if self._program is None:
            self._program = self._jit(state)
        result, new = self._program(state, batch)
        return result, new if self._donated else apply_changes(state, new)

    def compile_for(self, state: Any, batch: Any) -> jax.stages.Compiled:
        """Return the program for a state and a batch of these shapes, without running it."""
        return self.trace_for(state, batch).lower().compile()

    def trace_for(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Trace the step for a state and a batch of these shapes."""
        shardings = self._shardings(state)
        types = padded_state(described_state(state), shardings)
        described = jax.tree.map(_described, types, jax.tree.broadcast(shardings, types))
        traced: jax.stages.Traced = self._jit(state).trace(described, batch)
        return traced

    def _jit(self, state: Any) -> Any:
        shardings, donated = self._shardings(state), (0,) if self._donated else ()
        return jax.jit(
            self._run,
            donate_argnums=donated,
            out_shardings=(shardings[-1], shardings),
            compiler_options=self._options,
        )

    def _run(self, state: Any, batch: Any) -> tuple[Any, Any]:
        result, new = self._step(state, batch)
        return result, state_lists(new) if self._donated else tuple(state_changes(state, new))


def described_state(state: Any) -> tuple[list[Any], ...]:
    """Return the types of a state's values, which may have padding, without it."""
    return tuple([_described(value) for value in part] for part in state)


def padded_state(state: Any, shardings: Any) -> tuple[list[Any], ...]:
    """Return a state whose values have equal shards (see :func:`pad`) if it is laid over the devices by ``shardings``: one for each value, or
    for all values of a part.
    """
    state = state_lists(state)
    return jax.tree.map(pad, state, _of_each(shardings, state), is_leaf=is_padded)


def step_on_padded_state(step: Step, state_shardings: Callable[[Any], Any]) -> Step:
    """Return ``step`` as a function of a state whose values may have padding; it gets them without, and with shorter last shards.

    XLA divides what the step computes with them, such as the update, as it divides all arrays of such lengths within a program.
    """

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        state = state_lists(state)
        shardings = _of_each(state_shardings(state), state)
        values = jax.tree.map(cut, state, shardings, is_leaf=is_padded)
        result, new = step(values, batch)
        return result, jax.tree.map(padded, state, shardings, values, state_lists(new), is_leaf=is_padded)

    def padded(old: Any, sharding: Sharding, before: Any, after: Any) -> Any:
        if after is before:  # What the step did not change is the same object; so is what is returned for it.
            return old
        return pad(after, sharding) if is_padded(old) else after

    return run


def _of_each(shardings: Any, state: Any) -> Any:
    """Return the sharding of each value of a state."""
    return jax.tree.broadcast(shardings, jax.tree.map(lambda _: 0, state, is_leaf=is_padded))


def _described(value: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    is_weak = not isinstance(value, PaddedArray) and jax.typeof(value).weak_type
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=is_weak)


def without_aliases(state: Any) -> tuple[Any, ...]:
    """Copy each repeated array of a state (Keras leaves averages so), because memory can be donated only once."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tuple(state))


def are_lost(values: Any) -> bool:
    """Return whether arrays were donated to a step, or are results of one that failed; waits for them."""
    try:
        jax.block_until_ready(values)
    except RuntimeError:
        return True
    return False


def state_changes(old: Any, new: Any) -> list[list[Any]]:
    """Return the new values, with None for each that is the old one."""
    return [
        [None if after is before else after for before, after in zip(*parts, strict=True)]
        for parts in zip(old, new, strict=True)
    ]


def apply_changes(old: Any, changes: Any) -> list[list[Any]]:
    """Return the state after ``changes``, the result of :func:`state_changes`."""
    return [
        [before if after is None else after for before, after in zip(*parts, strict=True)]
        for parts in zip(old, changes, strict=True)
    ]
