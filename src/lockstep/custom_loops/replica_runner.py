"""``strategy.run``: run one function on every replica, with the collectives inside it and their derivatives.

The function is traced once for each group of replicas whose arguments have equal shapes, and the trace is split at its sync points.
Between two sync points the replicas of a group run as one batch (``jax.vmap``), spread over the devices. A value that does not depend
on the replica, such as an update with gradients that were added up, is computed once and returned as one value. A value that depends
on no argument at all is returned for each replica: it may be the number of rows, which can differ between replicas.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from lockstep._errors import ModelError
from lockstep.custom_loops.per_replica import PerReplica, group_replicas, is_per_replica
from lockstep.devices.placement import DEVICE_AXIS, MeshPlacement, Placement
from lockstep.execution.jaxpr_utils import constants_within, inline_calls, inputs_of, subprogram

Replicas = tuple[int, ...]
Shapes = list[list[Any]]  # for each all_gather, in order: the shape that each replica gives to it
Origins = dict[tuple[Any, ...], int]  # A number for each way in which a shared value was computed, and from what.
_SMALL = 1 << 16  # bytes; larger constants are compared by identity only
Function = Callable[[jax.Array, list[Any], Callable[[Any], list[Any]]], Any]


@dataclass(frozen=True, eq=False)
class SyncPoint:
    """A point of a replica's function at which values of all replicas are combined.

    Args:
        name: for errors; all replicas must reach sync points of the same names in the same order.
        combine: ``(values) -> results``, lists in which each entry is a :class:`PerReplica`, or an array that all share.
        is_linear: whether it adds values with the same factors on each replica, so that it is its own derivative.
        structure: tree structure of what the replica gives to it; the same on all replicas.
    """

    name: str
    combine: Callable[[list[Any]], list[Any]]
    is_linear: bool = False
    structure: Any = None


sync_p = Primitive("lockstep_sync")
sync_p.multiple_results = True
sync_p.def_abstract_eval(lambda *_, sync_point, outputs: [ShapedArray(shape, dtype) for shape, dtype in outputs])


def sync(sync_point: SyncPoint, values: Sequence[Any], outputs: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Mark a sync point; ``outputs`` are the shapes of its results, as this replica gets them."""
    return sync_p.bind(*values, sync_point=sync_point, outputs=tuple((tuple(x.shape), x.dtype) for x in outputs))


def _sync_nonzero(values: Sequence[Any], sync_point: SyncPoint) -> dict[int, Any]:
    """Sync the values that are not symbolic zeros; return the results by position."""
    positions = [position for position, value in enumerate(values) if not isinstance(value, ad.Zero)]
    nonzero = [values[position] for position in positions]
    return dict(zip(positions, sync(sync_point, nonzero, [jax.typeof(value) for value in nonzero]), strict=True))


def _tangents(primals: Any, tangents: Any, *, sync_point: SyncPoint, outputs: Any) -> tuple[list[Any], list[Any]]:
    found = sync_p.bind(*primals, sync_point=sync_point, outputs=outputs)
    if not sync_point.is_linear:
        if all(isinstance(tangent, ad.Zero) for tangent in tangents):
            return found, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in found]
        raise ModelError(f"{sync_point.name} cannot be differentiated. Fix: use all_reduce or all_gather.")
    mapped = _sync_nonzero(tangents, sync_point)
    return found, [mapped.get(position, tangent) for position, tangent in enumerate(tangents)]


def _cotangents(cotangents: Any, *values: Any, sync_point: SyncPoint, outputs: Any) -> list[Any]:
    """The derivative of a sum over all replicas is the sum of all replicas' derivatives."""
    mapped = _sync_nonzero(cotangents, sync_point)
    return [mapped.get(position) for position in range(len(values))]


def _refuse_vmap(*_: Any, sync_point: SyncPoint, **__: Any) -> Any:
    raise ModelError(
        f"{sync_point.name} cannot be used inside jax.vmap: all replicas must reach it once, at the same point. Fix: call it outside of "
        "the function that jax.vmap maps."
    )


ad.primitive_jvps[sync_p] = _tangents
ad.primitive_transposes[sync_p] = _cotangents
batching.primitive_batchers[sync_p] = _refuse_vmap


def run_on_replicas(function: Function, leaves: list[Any], placement: Placement) -> Any:
    """Run ``function`` on every replica; called while the user's step is traced.

    Args:
        function: ``(replica, leaves, gathered_shapes) -> tree of arrays``. ``gathered_shapes(shape)`` returns the shapes that all
            replicas give to an ``all_gather`` to which this one gives ``shape``.
        leaves: arrays that all replicas share, or :class:`PerReplica`.
        placement: devices and number of replicas.

    Returns:
        The tree, with a :class:`PerReplica` for each result that depends on the replica.

    Raises:
        ModelError: the replicas do not reach the same sync points in the same order.
    """
    groups = _replica_groups(leaves, placement.replicas)
    shapes: Shapes = []
    origins: Origins = {}
    batches = [_ReplicaBatch(function, leaves, group, placement, shapes, origins) for group in groups]
    while len(batches) > 1 and (seen := _gathered_shapes(batches, placement.replicas)) != shapes:
        shapes = seen  # Trace again: the results of an all_gather depend on the shapes of the other groups.
        batches = [_ReplicaBatch(function, leaves, group, placement, shapes, origins) for group in groups]
    names = [[sync_point.name for sync_point in batch.sync_points] for batch in batches]
    for group, own, batch in zip(groups, names, batches, strict=True):
        if own != names[0]:
            raise ModelError(
                f"strategy.run: replicas do not sync in the same order: {list(groups[0])} reach {names[0]}, {list(group)} reach "
                f"{own}. Fix: remove what makes it depend on the shapes of a replica's values."
            )
        _check_structures(batches[0], batch)
    for position, sync_point in enumerate(batches[0].sync_points):
        _run_sync_point(batches, position, sync_point)
    for batch in batches:
        batch.advance(len(batch.sync_points))
    results = zip(*(batch.jaxpr.outvars for batch in batches), strict=True)
    return jax.tree.unflatten(batches[0].structure, [_collect(batches, list(atoms)) for atoms in results])


def _check_structures(first: "_ReplicaBatch", other: "_ReplicaBatch") -> None:
    """Refuse replicas whose results, or values at a sync point, are another tree: values would be paired by position."""
    pairs: list[tuple[str, Any, Any]] = []
    for mark, own in zip(first.sync_equations, other.sync_equations, strict=True):
        name = mark.params["sync_point"].name
        pairs += [
            (f"give to {name}", mark.params["sync_point"].structure, own.params["sync_point"].structure),
            (f"give to {name}", f"{len(mark.invars)} arrays", f"{len(own.invars)} arrays"),
        ]
    for what, expected, found in [*pairs, ("return", first.structure, other.structure)]:
        if expected != found:
            raise ModelError(
                f"strategy.run: replicas {list(first.replicas)} {what} {expected}, {list(other.replicas)} {found}. Fix: let the tree "
                "not depend on the shapes of a replica's values."
            )


def _replica_groups(leaves: list[Any], replicas: int) -> list[Replicas]:
    """Return groups of replicas whose values have equal shapes."""
    groupings = [leaf.members for leaf in leaves if is_per_replica(leaf)]

    def groups_of(replica: int) -> tuple[int, ...]:
        return tuple(next(i for i, own in enumerate(members) if replica in own) for members in groupings)

    return list(group_replicas(map(groups_of, range(replicas))).values())


def _gathered_shapes(batches: "list[_ReplicaBatch]", replicas: int) -> Shapes:
    shapes: Shapes = []
    for own in zip(*(batch.gathered for batch in batches), strict=False):
        by_replica = {r: shape for batch, shape in zip(batches, own, strict=True) for r in batch.replicas}
        shapes.append([by_replica[replica] for replica in range(replicas)])
    return shapes


class _ReplicaBatch:
    """The replicas of one group, run as one batch from sync point to sync point.

    A value is either shared by them, or varying: stacked with one entry for each, ``(replicas of the group, …)``. If a group is spread over the devices,
    they run equal numbers of replicas: stacks end with copies of the last replica, which are dropped when values leave the group.
    Shared values of equal origin are equal in all batches with the same ``origins``.
    """

    def __init__(
        self,
        function: Function,
        leaves: list[Any],
        replicas: Replicas,
        placement: Placement,
        gathered_before: Shapes,
        origins: Origins,
    ) -> None:
        self.replicas, self.placement, self.origins = replicas, placement, origins
        devices, count = len(placement.devices), len(replicas)
        # XLA fails on a shard_map with arrays of 0 rows ("GlobalToLocalShape").
        self.is_empty = any(is_per_replica(leaf) and not leaf.of(replicas).size for leaf in leaves)
        self.is_spread = devices > 1 and count > 1 and not self.is_empty
        self.places = np.minimum(np.arange(count + (-count % devices if self.is_spread else 0)), count - 1)
        self.gathered: list[Any] = []

        def gathered_shapes(shape: Any) -> list[Any]:
            self.gathered.append(shape)
            position = len(self.gathered) - 1
            return gathered_before[position] if position < len(gathered_before) else [shape] * placement.replicas

        values = [self.padded(leaf) if is_per_replica(leaf) else leaf for leaf in leaves]
        shapes = [_shape(value, is_per_replica(leaf)) for value, leaf in zip(values, leaves, strict=True)]
        number = jax.ShapeDtypeStruct((), jnp.int32)
        closed, results = jax.make_jaxpr(
            lambda replica, *own: function(replica, list(own), gathered_shapes), return_shape=True
        )(number, *shapes)
        closed = inline_calls(closed, sync_p, _refuse_nested)
        self.jaxpr, self.structure = closed.jaxpr, jax.tree.structure(results)
        self.segments, self.sync_equations = _split_at_syncs(self.jaxpr.eqns)
        self.sync_points: list[SyncPoint] = [mark.params["sync_point"] for mark in self.sync_equations]
        self.values: dict[Var, Any] = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.values.update(zip(self.jaxpr.invars, [np.asarray(replicas, "int32")[self.places], *values], strict=True))
        self.varying = {
            v
            for v, leaf in zip(self.jaxpr.invars, [None, *leaves], strict=True)
            if leaf is None or is_per_replica(leaf)
        }
        self.origin: dict[Var, int] = {
            v: self.number_of("argument", i) for i, v in enumerate(self.jaxpr.invars) if v not in self.varying
        }
        self.origin |= {
            v: self.number_of("constant", *_identity(value))
            for v, value in zip(self.jaxpr.constvars, closed.consts, strict=True)
        }
        self.constant = set(self.jaxpr.constvars)

    def number_of(self, *origin: Any) -> int:
        return self.origins.setdefault(origin, len(self.origins))

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def is_varying(self, atom: Any) -> bool:
        """Whether a value has one entry for each replica."""
        return not isinstance(atom, Literal) and atom in self.varying

    def is_constant(self, atom: Any) -> bool:
        """Whether a value depends neither on an argument nor on a sync point."""
        return isinstance(atom, Literal) or atom in self.constant

    def padded(self, value: PerReplica) -> jax.Array:
        """Return the values of the group's replicas, with copies of the last one at the end if its devices need them."""
        own = value.of(self.replicas)
        return own if len(own) == len(self.places) else own[self.places]

    def stacked(self, atom: Any) -> jax.Array:
        value, count = jnp.asarray(self.read(atom)), len(self.replicas)
        return value[:count] if self.is_varying(atom) else jnp.broadcast_to(value, (count, *value.shape))

    def advance(self, position: int) -> None:
        """Run the equations before the sync point at ``position``."""
        shared: list[JaxprEqn] = []
        own: list[JaxprEqn] = []
        for equation in self.segments[position]:
            if any(self.is_varying(atom) for atom in equation.invars) or equation.effects:
                own.append(equation)
                self.varying.update(equation.outvars)
            else:
                shared.append(equation)
                function = (
                    str(equation.primitive),
                    str(equation.params),
                    *map(_identity, constants_within(equation.params)),
                )
                source = (function, *map(self.origin_of, equation.invars))
                self.origin.update({var: self.number_of(*source, i) for i, var in enumerate(equation.outvars)})
                if all(map(self.is_constant, equation.invars)):
                    self.constant.update(equation.outvars)
        self._run(shared, lambda function, inputs: function(*(self.read(var) for var in inputs)))
        self._run(own, self._run_vmapped)

    def origin_of(self, atom: Any) -> int:
        is_number = isinstance(atom, Literal)
        return self.number_of("number", str(atom.val), str(atom.aval)) if is_number else self.origin[atom]

    def _run(self, equations: list[JaxprEqn], call: Callable[[Any, list[Var]], Any]) -> None:
        if not equations:
            return
        made = [var for equation in equations for var in equation.outvars]
        inputs = inputs_of(equations)
        self.values.update(zip(made, call(subprogram(self.jaxpr, equations, inputs, made), inputs), strict=True))

    def _run_vmapped(self, function: Callable[..., Any], inputs: list[Var]) -> list[jax.Array]:
        own = [var for var in inputs if self.is_varying(var)]
        shared = [var for var in inputs if not self.is_varying(var)]

        def one(own_values: list[Any], shared_values: list[Any]) -> list[Any]:
            values = dict(zip([*own, *shared], [*own_values, *shared_values], strict=True))
            return list(function(*(values[var] for var in inputs)))

        def on_one_device(own_values: list[Any], shared_values: list[Any]) -> list[Any]:
            if own_values and own_values[0].shape[0] == 1:
                return [value[None] for value in one([value[0] for value in own_values], shared_values)]
            count = None if own_values else len(self.places)  # A callback on what all share runs for each replica.
            return jax.vmap(one, in_axes=(0, None), axis_size=count)(own_values, shared_values)

        values = [jnp.asarray(self.read(var)) for var in own]
        others = [jnp.asarray(self.read(var)) for var in shared]
        # On a mesh of more axes XLA divides the work of the only replica.
        if len(self.placement.devices) == 1 or not values or isinstance(self.placement, MeshPlacement):
            return on_one_device(values, others)
        if self.is_empty:
            found = on_one_device(values, others)
            return [jax.lax.with_sharding_constraint(value, self.placement.replicated) for value in found]
        # A group of one replica runs on every device: its results are everywhere, and no device would have less to do.
        whole = PartitionSpec()
        of_replicas = PartitionSpec(DEVICE_AXIS) if self.is_spread else whole
        return jax.shard_map(
            on_one_device,
            mesh=self.placement.mesh,
            in_specs=(of_replicas, whole),
            out_specs=of_replicas,
            check_vma=False,
        )(values, others)


def _run_sync_point(batches: list[_ReplicaBatch], position: int, sync_point: SyncPoint) -> None:
    for batch in batches:
        batch.advance(position)
    operands = zip(*(batch.sync_equations[position].invars for batch in batches), strict=True)
    found = sync_point.combine([_collect(batches, list(atoms)) for atoms in operands])
    for batch in batches:
        equation = batch.sync_equations[position]
        shapes = [shape for shape, _ in equation.params["outputs"]]
        for turn, (var, shape, value) in enumerate(zip(equation.outvars, shapes, found, strict=True)):
            _check_result(sync_point.name, batch.replicas, shape, value)
            if is_per_replica(value):
                batch.values[var] = batch.padded(value)
                batch.varying.add(var)
            else:
                batch.values[var] = value
                batch.origin[var] = batch.number_of("sync_point", position, turn)


def _check_result(name: str, replicas: Replicas, shape: tuple[int, ...], value: Any) -> None:
    """Refuse a result of another shape than the replicas were traced with; JAX would compute with the shape that it knows."""
    found = value.of(replicas).shape[1:] if is_per_replica(value) else jnp.shape(value)
    if found != shape:
        raise ModelError(
            f"strategy.run: {name}: expected a result of shape {shape} for replicas {list(replicas)}, got {found}: "
            "what it is given has one value that all replicas share. Fix: let the shape of the result not depend on the number of replicas' values."
        )


def _collect(batches: list[_ReplicaBatch], atoms: list[Any]) -> Any:
    """Return the value of all batches: a single one if they share it."""
    if not any(batch.is_varying(atom) or batch.is_constant(atom) for batch, atom in zip(batches, atoms, strict=True)):
        sources = [batch.origin_of(atom) for batch, atom in zip(batches, atoms, strict=True)]
        if all(source == sources[0] for source in sources):
            return jnp.asarray(batches[0].read(atoms[0]))
    groups = tuple(batch.stacked(atom) for batch, atom in zip(batches, atoms, strict=True))
    return PerReplica(groups, tuple(batch.replicas for batch in batches))


def _split_at_syncs(equations: Iterable[JaxprEqn]) -> tuple[list[list[JaxprEqn]], list[JaxprEqn]]:
    parts: list[list[JaxprEqn]] = [[]]
    sync_equations = []
    for equation in equations:
        if equation.primitive is sync_p:
            sync_equations.append(equation)
            parts.append([])
        else:
            parts[-1].append(equation)
    return parts, sync_equations


def _shape(value: Any, is_varying: bool) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape[1:] if is_varying else aval.shape, aval.dtype, weak_type=aval.weak_type)


def _identity(constant: Any) -> tuple[Any, ...]:
    """Return what tells constants of two traces apart: the numbers of small arrays, since each trace makes its own."""
    is_known = isinstance(constant, (np.ndarray, jax.Array)) and not isinstance(constant, jax.core.Tracer)
    if not is_known or constant.nbytes > _SMALL or jnp.issubdtype(constant.dtype, jax.dtypes.extended):
        return (id(constant),)
    return (constant.shape, str(constant.dtype), np.asarray(constant).tobytes())


def _refuse_nested(where: str) -> Any:
    raise ModelError(
        f"strategy.run: replicas cannot sync {where}: all of them must sync once, at the same point. Fix: sync before or after it."
    )


_TRACER_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextmanager
def explain_tracer_errors() -> Iterator[None]:
    """Replace JAX's errors about values that are unknown while tracing by one with instructions."""
    try:
        yield
    except _TRACER_ERRORS as error:
        raise ModelError(
            "strategy.run: fn needs the value of an array while it is traced, when only its shape is known "
            f"({str(error).partition(chr(10))[0]}). Fix: write jnp.where or jax.lax.cond for an if, jnp for np; pass "
            "values that are known beforehand as static arguments such as texts, or as a closure."
        ) from error
