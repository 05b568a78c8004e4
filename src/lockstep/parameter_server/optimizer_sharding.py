"""Optimizers on variable servers: which optimizers are supported there, and how their state is split over servers and joined again.

Names of optimizer variables do not tell which variable of the model they belong to. So optimizers of the same configuration are built
abstractly, for the whole variables and for the shards of each server, and the variables that each build makes for each variable are recorded.
Variables that belong to none of them, such as the count of steps, are the same everywhere.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep._errors import OptionError
from lockstep._keras import trainer
from lockstep._keras.patches import OPTIMIZER_SLOTS, install
from lockstep.parameter_server.sharding import Shard, ShardingPlan
from lockstep.parameter_server.variable_store import NO_RULES, OPTIMIZER, UpdateRules, make_variable

_MARK = re.compile(r"<(\d+)>")  # In a name: number of the variable that it was made from.
_NEED_WHOLE_VARIABLES = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)


def check_optimizer(optimizer: keras.optimizers.Optimizer, plan: ShardingPlan, rules: UpdateRules = NO_RULES) -> None:
    """Refuse an optimizer whose update of one element depends on elements that another server holds.

    Raises:
        OptionError: the optimizer has such an update.
    """
    cut = [name for name, shards in plan.shards.items() if len(shards) > 1]
    whole = [
        name for name in cut if not isinstance(rules.constraints.get(name), (type(None), keras.constraints.NonNeg))
    ]
    if whole:
        raise OptionError(
            f"{type(rules.constraints[whole[0]]).__name__} needs each variable as a whole, and variable_partitioner cuts {whole[0]!r} into "
            f"{len(plan.shards[whole[0]])} shards. Fix: leave the partitioner out, or the constraint."
        )
    if cut and isinstance(optimizer, _NEED_WHOLE_VARIABLES):
        raise OptionError(
            f"{type(optimizer).__name__} needs each variable as a whole, and variable_partitioner cuts {cut[0]!r} into "
            f"{len(plan.shards[cut[0]])} shards. Fix: leave the partitioner out, or take another optimizer."
        )
    if cut and optimizer.clipnorm is not None:
        raise OptionError(
            f"clipnorm needs the norm of each variable as a whole, and variable_partitioner cuts {cut[0]!r}. Fix: leave the partitioner "
            f"out, or use clipvalue."
        )
    if plan.servers > 1 and optimizer.global_clipnorm is not None:
        raise OptionError(
            f"global_clipnorm needs the gradients of all variables at once, and they are on {plan.servers} servers. Fix: use one server, "
            f"or clipnorm."
        )
    if (cut or plan.servers > 1) and isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise OptionError(
            "MultiOptimizer counts the steps of each of its optimizers, and a server may have no variable of one of them; got "
            f"{plan.servers} servers. Fix: use one server without variable_partitioner, or one optimizer."
        )


@dataclass(frozen=True)
class _Slot:
    """One variable of an optimizer.

    Args:
        number: among all variables of the optimizer.
        spec: description of the variable.
        owner: number of the variable that it belongs to, among those for which the optimizer is built; None: it belongs to none.
    """

    number: int
    spec: ArraySpec
    owner: int | None


@dataclass(frozen=True)
class _SlotLocation:
    """Servers that hold one variable of the whole model's optimizer.

    Args:
        slot: the variable.
        held: number and slot of each server that holds it, or some of its rows.
        rows: the shards whose rows the servers hold; none: each holds all of it.
    """

    slot: _Slot
    held: tuple[tuple[int, _Slot], ...]
    rows: tuple[Shard, ...]


class OptimizerState:
    """Mapping between the state of a model's optimizer and those of the servers' optimizers.

    It is made once, before training, and allocates no memory for values.

    Args:
        optimizer: optimizer of the model, built for the variables of the plan in their order.
        plan: assignment of these variables to servers.

    Raises:
        OptionError: the optimizer is built for other variables, or a variable of its state cannot be divided.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.optimizer_sharding import OptimizerState
        >>> from lockstep._array_encoding import ArraySpec
        >>> from lockstep.parameter_server.sharding import plan_shards
        >>> optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        >>> optimizer.build([keras.Variable(np.zeros((4, 2), "float32"), name="w")])
        >>> plan = plan_shards([ArraySpec("w", (4, 2), "float32")], 2, lambda shape, dtype: [2, 1])
        >>> state = OptimizerState(optimizer, plan)
        >>> parts = state.split([variable.numpy() for variable in optimizer.variables])
        >>> [part["optimizer/2"].shape for part in parts]
        [(2, 2), (2, 2)]
        >>> [value.shape for value in state.join(parts)]
        [(), (), (4, 2)]
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, plan: ShardingPlan) -> None:
        self._kind = type(optimizer).__name__
        slots = _slots_of(optimizer, plan.variables)
        shapes = [tuple(variable.shape) for variable in optimizer.variables]
        if shapes != [slot.spec.shape for slot in slots]:
            raise OptionError(
                f"optimizer: expected a {self._kind} that is built for the {len(plan.variables)} trainable variables of the model, with "
                f"{len(slots)} variables of its own; got {len(shapes)}, or other shapes. Fix: build the model before."
            )
        self._servers = [_slots_of(optimizer, plan.specs_at(number)) for number in range(plan.servers)]
        self._locations = sorted(self._locate(slots, plan), key=lambda location: location.slot.number)

    def split(self, values: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return for each server what ``VariableStore.prepare`` takes besides values, from the values of ``optimizer.variables``."""
        parts: list[dict[str, np.ndarray]] = [{} for _ in self._servers]
        for given, location in zip(values, self._locations, strict=True):
            value = np.asarray(given)
            pieces = [shard.slice(value) for shard in location.rows] or [value] * len(location.held)
            for (server, slot), piece in zip(location.held, pieces, strict=True):
                parts[server][_name(slot)] = piece.astype(slot.spec.dtype, copy=False)
        return parts

    def join(self, states: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
        """Return the values of ``optimizer.variables``, in their order. Those that belong to no variable are taken from server 0.

        Args:
            states: for each server its arrays by name, as :meth:`lockstep.parameter_server.variable_client.VariableClient.state` gives them.

        Raises:
            OptionError: shards of one variable have different values of a slot that exists once for the whole variable.
        """
        return [self._join_slot(each, [states[n][_name(slot)] for n, slot in each.held]) for each in self._locations]

    def _join_slot(self, location: _SlotLocation, found: list[np.ndarray]) -> np.ndarray:
        if location.rows:
            return np.concatenate(found)
        if location.slot.owner is not None and any(one.tobytes() != found[0].tobytes() for one in found[1:]):
            raise OptionError(
                f"{self._kind} has one {location.slot.spec.name!r} for a variable that variable_partitioner cuts into {len(found)} "
                f"shards, and these do not agree on its value. Fix: leave the partitioner out, or take another optimizer."
            )
        return found[0]

    def _locate(self, slots: Sequence[_Slot], plan: ShardingPlan) -> Iterator[_SlotLocation]:
        by_server = [_by_owner(each) for each in self._servers]
        for owner, mine in _by_owner(slots).items():
            shards = () if owner is None else plan.shards[plan.variables[owner].name]
            held = [
                (shard.server, by_server[shard.server][plan.shards_at(shard.server).index(shard)]) for shard in shards
            ]
            held = held or [(number, each[None]) for number, each in enumerate(by_server)]
            for turn, slot in enumerate(mine):
                if any(len(theirs) != len(mine) for _, theirs in held):
                    raise self._indivisible_error(slot)
                yield self._location(slot, tuple((server, theirs[turn]) for server, theirs in held), shards)

    def _location(self, slot: _Slot, held: tuple[tuple[int, _Slot], ...], shards: Sequence[Shard]) -> _SlotLocation:
        shape, shapes = slot.spec.shape, [part.spec.shape for _, part in held]
        if all(each == shape for each in shapes):
            return _SlotLocation(slot, held, ())
        by_rows = [(shard.end - shard.begin, *shape[1:]) for shard in shards]
        if shape and shapes == by_rows and shape[0] == shards[0].variable.shape[0]:
            return _SlotLocation(slot, held, tuple(shards))
        raise self._indivisible_error(slot)

    def _indivisible_error(self, slot: _Slot) -> OptionError:
        return OptionError(
            f"{self._kind} has the state {slot.spec.name!r} of shape {slot.spec.shape}, which cannot be divided among "
            f"{len(self._servers)} servers. Fix: use one server without variable_partitioner, or another optimizer."
        )


class _Reference(keras.Variable):
    """Variable whose name, but not its path, is a mark: optimizers select variables by path and copy their names."""

    mark = ""

    @property
    def name(self) -> str:
        return self.mark


def _slots_of(optimizer: keras.optimizers.Optimizer, specs: Sequence[ArraySpec]) -> list[_Slot]:
    """Return the variables that an optimizer of this configuration makes for these variables, in its order."""
    make, found = trainer.optimizer_maker(optimizer), list[_Slot]()

    def build() -> None:
        another = make()
        variables = []
        for number, spec in enumerate(specs):
            variables.append(make_variable(spec, kind=_Reference))
            variables[-1].mark = f"<{number}>"
        marked = [
            (each, "add_variable_from_reference", _marked_add_variable(each))
            for each in trainer.nested_optimizers(another)
        ]
        install(OPTIMIZER_SLOTS, marked)
        another.build(variables)
        for number, variable in enumerate(another.variables):
            mark = _MARK.search(variable.name)
            name = variable.path if mark is None else _MARK.sub(f"{specs[int(mark[1])].name} ", variable.path).strip()
            spec = ArraySpec(name, tuple(variable.shape), str(variable.dtype))
            found.append(_Slot(number, spec, int(mark[1]) if mark else None))

    jax.eval_shape(build)
    return found


def _marked_add_variable(optimizer: keras.optimizers.Optimizer) -> Callable[..., keras.Variable]:
    """Return the optimizer's ``add_variable_from_reference``, with names that begin with the reference's mark instead of its path."""

    def add(reference_variable: keras.Variable, name: str | None = None, initializer: Any = "zeros") -> keras.Variable:
        marked = f"{reference_variable.name}{name or 'var'}"
        return optimizer.add_variable(
            reference_variable.shape, initializer, dtype=reference_variable.dtype, name=marked
        )

    return add


def _by_owner(slots: Sequence[_Slot]) -> defaultdict[int | None, list[_Slot]]:
    found: defaultdict[int | None, list[_Slot]] = defaultdict(list)
    for slot in slots:
        found[slot.owner].append(slot)
    return found


def _name(slot: _Slot) -> str:
    return f"{OPTIMIZER}{slot.number}"
