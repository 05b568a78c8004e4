"""``strategy.run``: one function on every replica.

The function is traced once for each kind of replica (those whose arguments have equal shapes), and the trace is cut where
replicas meet. Between two meetings the replicas of a kind run as one batch, spread over the devices; what does not depend on
the replica, such as an update with gradients that were added up, is computed once, and comes back as one value. What depends on no
argument at all comes back as a value of each replica: it may be the number of rows, which differs in some batches only.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from lockstep._errors import ModelError
from lockstep.custom_loops.per_replica import PerReplica, is_per_replica
from lockstep.custom_loops.sync_points import SyncPoint, meet_p
from lockstep.data.device_placement import DEVICE_AXIS, Placement
from lockstep.execution.jaxpr_utils import inline_calls, subprogram

__all__ = ["Shapes", "run_on_replicas"]

Replicas = tuple[int, ...]
Shapes = list[list[Any]]  # of what each replica brings to each gathering, in order
Function = Callable[[jax.Array, list[Any], Callable[[Any], list[Any]]], Any]


def run_on_replicas(function: Function, leaves: list[Any], placement: Placement) -> Any:
    """Run ``function`` on every replica; called while the user's step is traced.

    Args:
        function: ``(replica, leaves, gathering) -> tree of arrays``. ``gathering(shape)`` gives the shapes that all replicas
            bring to a gathering to which this one brings ``shape``.
        leaves: arrays that all replicas share, or :class:`PerReplica`.
        placement: devices and number of replicas.

    Returns:
        The tree, with a :class:`PerReplica` wherever a result depends on the replica.

    Raises:
        ModelError: the replicas do not meet in the same order.
    """
    kinds = _kinds(leaves, placement.replicas)
    known: Shapes = []
    lanes = [_ReplicaBatch(function, leaves, kind, placement, known) for kind in kinds]
    while len(lanes) > 1 and (seen := _seen(lanes, placement.replicas)) != known:
        known = seen  # What one kind gathers has the shapes of the others, which are known now.
        lanes = [_ReplicaBatch(function, leaves, kind, placement, known) for kind in kinds]
    names = [[meeting.name for meeting in lane.meetings] for lane in lanes]
    for kind, own in zip(kinds, names, strict=True):
        if own != names[0]:
            raise ModelError(
                f"strategy.run: replicas do not meet in the same order: {list(kinds[0])} come to {names[0]}, {list(kind)} to "
                f"{own}. Take out what makes it depend on the shapes of a replica's values."
            )
    for position, meeting in enumerate(lanes[0].meetings):
        _meet(lanes, position, meeting)
    for lane in lanes:
        lane.advance(len(lane.meetings))
    return jax.tree.unflatten(lanes[0].structure, _results(lanes))


def _kinds(leaves: list[Any], replicas: int) -> list[Replicas]:
    """Replicas whose values have equal shapes."""
    groupings = [leaf.members for leaf in leaves if is_per_replica(leaf)]
    kinds: dict[Any, list[int]] = {}
    for replica in range(replicas):
        kind = tuple(next(i for i, own in enumerate(groups) if replica in own) for groups in groupings)
        kinds.setdefault(kind, []).append(replica)
    return [tuple(kind) for kind in kinds.values()]


def _seen(lanes: "list[_ReplicaBatch]", replicas: int) -> Shapes:
    shapes: Shapes = []
    for own in zip(*(lane.seen for lane in lanes), strict=False):
        by_replica = {r: shape for lane, shape in zip(lanes, own, strict=True) for r in lane.replicas}
        shapes.append([by_replica[replica] for replica in range(replicas)])
    return shapes


class _ReplicaBatch:
    """The replicas of one kind, side by side, from meeting to meeting.

    A value is either shared by them, or stands once for each, ``(replicas of the lane, …)``.
    """

    def __init__(
        self, function: Function, leaves: list[Any], replicas: Replicas, placement: Placement, known: Shapes
    ) -> None:
        self.replicas, self.placement = replicas, placement
        # XLA fails on a shard_map with arrays of no rows ("GlobalToLocalShape"); of these there is nothing to divide.
        self.is_divided = not any(is_per_replica(leaf) and not leaf.of(replicas).size for leaf in leaves)
        self.seen: list[Any] = []

        def gathering(shape: Any) -> list[Any]:
            self.seen.append(shape)
            position = len(self.seen) - 1
            return known[position] if position < len(known) else [shape] * placement.replicas

        values = [leaf.of(replicas) if is_per_replica(leaf) else leaf for leaf in leaves]
        shapes = [_shape(value, is_per_replica(leaf)) for value, leaf in zip(values, leaves, strict=True)]
        number = jax.ShapeDtypeStruct((), jnp.int32)
        closed, results = jax.make_jaxpr(
            lambda replica, *own: function(replica, list(own), gathering), return_shape=True
        )(number, *shapes)
        closed = inline_calls(closed, meet_p, _refuse)
        self.jaxpr, self.structure = closed.jaxpr, jax.tree.structure(results)
        self.parts, marks = _cut(self.jaxpr.eqns)
        self.marks = marks
        self.meetings: list[SyncPoint] = [mark.params["meeting"] for mark in marks]
        self.values: dict[Var, Any] = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.values.update(zip(self.jaxpr.invars, [np.asarray(replicas, "int32"), *values], strict=True))
        self.own = {
            v
            for v, leaf in zip(self.jaxpr.invars, [None, *leaves], strict=True)
            if leaf is None or is_per_replica(leaf)
        }
        # What makes shared values of two lanes the same: how they were computed, from what.
        self.origin: dict[Var, Any] = {v: ("argument", i) for i, v in enumerate(self.jaxpr.invars) if v not in self.own}
        self.origin |= {
            v: ("constant", id(value)) for v, value in zip(self.jaxpr.constvars, closed.consts, strict=True)
        }
        self.constant = set(self.jaxpr.constvars)

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def is_own(self, atom: Any) -> bool:
        """Whether a value stands once for each replica."""
        return not isinstance(atom, Literal) and atom in self.own

    def is_constant(self, atom: Any) -> bool:
        """Whether a value depends on no argument, and on nothing that replicas have brought together."""
        return isinstance(atom, Literal) or atom in self.constant

    def per_replica(self, atom: Any) -> jax.Array:
        """A value, once for each replica."""
        value = jnp.asarray(self.read(atom))
        return value if self.is_own(atom) else jnp.broadcast_to(value, (len(self.replicas), *value.shape))

    def advance(self, position: int) -> None:
        """Run the equations before the meeting at ``position``."""
        shared: list[JaxprEqn] = []
        own: list[JaxprEqn] = []
        for equation in self.parts[position]:
            if any(self.is_own(atom) for atom in equation.invars) or equation.effects:
                own.append(equation)
                self.own.update(equation.outvars)
            else:
                shared.append(equation)
                source = (str(equation.primitive), str(equation.params), *map(self.source, equation.invars))
                self.origin.update({var: (*source, i) for i, var in enumerate(equation.outvars)})
                if all(map(self.is_constant, equation.invars)):
                    self.constant.update(equation.outvars)
        self._run(shared, lambda function, inputs: function(*(self.read(var) for var in inputs)))
        self._run(own, self._side_by_side)

    def source(self, atom: Any) -> Any:
        """Where a shared value comes from."""
        return ("number", str(atom.val), str(atom.aval)) if isinstance(atom, Literal) else self.origin[atom]

    def _run(self, equations: list[JaxprEqn], call: Callable[[Any, list[Var]], Any]) -> None:
        if not equations:
            return
        made = [var for equation in equations for var in equation.outvars]
        used = (atom for equation in equations for atom in equation.invars if not isinstance(atom, Literal))
        known = set(made)
        inputs = list(dict.fromkeys(var for var in used if var not in known))
        self.values.update(zip(made, call(subprogram(self.jaxpr, equations, inputs, made), inputs), strict=True))

    def _side_by_side(self, function: Callable[..., Any], inputs: list[Var]) -> list[jax.Array]:
        own = [var for var in inputs if self.is_own(var)]
        shared = [var for var in inputs if not self.is_own(var)]
        devices, count = len(self.placement.devices), len(self.replicas)

        def one(own_values: list[Any], shared_values: list[Any]) -> list[Any]:
            values = dict(zip([*own, *shared], [*own_values, *shared_values], strict=True))
            return list(function(*(values[var] for var in inputs)))

        def on_one_device(own_values: list[Any], shared_values: list[Any]) -> list[Any]:
            if own_values and own_values[0].shape[0] == 1:
                return [value[None] for value in one([value[0] for value in own_values], shared_values)]
            return jax.vmap(one, in_axes=(0, None))(own_values, shared_values)

        # Devices run equal numbers of replicas: some run one again, and nobody reads that.
        places = np.minimum(np.arange(count + -count % devices), count - 1)
        values = [jnp.asarray(self.read(var)) for var in own]
        if len(places) > count:
            values = [value[places] for value in values]
        if devices == 1 or not values:
            return on_one_device(values, [self.read(var) for var in shared])
        if not self.is_divided:
            found = on_one_device(values, [self.read(var) for var in shared])
            return [jax.lax.with_sharding_constraint(value[:count], self.placement.replicated) for value in found]
        cut, whole = PartitionSpec(DEVICE_AXIS), PartitionSpec()
        found = jax.shard_map(
            on_one_device, mesh=self.placement.mesh, in_specs=(cut, whole), out_specs=cut, check_vma=False
        )(values, [jnp.asarray(self.read(var)) for var in shared])
        return [value[:count] for value in found]


def _meet(lanes: list[_ReplicaBatch], position: int, meeting: SyncPoint) -> None:
    for lane in lanes:
        lane.advance(position)
    operands = zip(*(lane.marks[position].invars for lane in lanes), strict=True)
    found = meeting.combine([_brought(lanes, list(atoms)) for atoms in operands])
    for lane in lanes:
        for turn, (var, value) in enumerate(zip(lane.marks[position].outvars, found, strict=True)):
            if is_per_replica(value):
                lane.values[var] = value.of(lane.replicas)
                lane.own.add(var)
            else:
                lane.values[var] = value
                lane.origin[var] = ("meeting", position, turn)


def _brought(lanes: list[_ReplicaBatch], atoms: list[Any]) -> Any:
    """What all lanes bring: one value if they share it."""
    if not any(lane.is_own(atom) or lane.is_constant(atom) for lane, atom in zip(lanes, atoms, strict=True)):
        sources = [lane.source(atom) for lane, atom in zip(lanes, atoms, strict=True)]
        if all(source == sources[0] for source in sources):
            return jnp.asarray(lanes[0].read(atoms[0]))
    groups = tuple(lane.per_replica(atom) for lane, atom in zip(lanes, atoms, strict=True))
    return PerReplica(groups, tuple(lane.replicas for lane in lanes))


def _results(lanes: list[_ReplicaBatch]) -> list[Any]:
    return [_brought(lanes, list(atoms)) for atoms in zip(*(lane.jaxpr.outvars for lane in lanes), strict=True)]


def _cut(equations: Iterable[JaxprEqn]) -> tuple[list[list[JaxprEqn]], list[JaxprEqn]]:
    parts: list[list[JaxprEqn]] = [[]]
    marks = []
    for equation in equations:
        if equation.primitive is meet_p:
            marks.append(equation)
            parts.append([])
        else:
            parts[-1].append(equation)
    return parts, marks


def _shape(value: Any, is_own: bool) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(value)
    return jax.ShapeDtypeStruct(kind.shape[1:] if is_own else kind.shape, kind.dtype, weak_type=kind.weak_type)


def _refuse(where: str) -> Any:
    raise ModelError(f"strategy.run: replicas cannot meet {where}: all of them must meet once, in the same place.")
