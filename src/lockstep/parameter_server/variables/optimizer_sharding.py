"""What a model's optimizer remembers, as the optimizers of servers hold it, and back.

Which of an optimizer's variables belongs to which of the model's is seen, not read from names: optimizers of the same configuration are
built in the abstract, for the whole variables and for the shards of each server, and what each makes for each is noted. What it makes for
none, such as its count of steps, is the same everywhere.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError
from lockstep._keras.patches import OPTIMIZER_SLOTS, install
from lockstep.parameter_server.variables.sharding import Shard, ShardingPlan, VariableSpec
from lockstep.parameter_server.variables.variable_store import OPTIMIZER, as_variable

__all__ = ["OptimizerState"]

_MARK = re.compile(r"<(\d+)>")  # In a name: number of the variable that it was made from.


@dataclass(frozen=True)
class _Slot:
    """A variable of an optimizer.

    Args:
        number: among all of the optimizer.
        spec: of it.
        owner: number of the variable that it belongs to, among those for which the optimizer is built; None: to none.
    """

    number: int
    spec: VariableSpec
    owner: int | None


@dataclass(frozen=True)
class _SlotLocation:
    """Where a variable of the whole model's optimizer is.

    Args:
        slot: the variable.
        held: for each server that has it, or some of its rows, the server's number and what that has.
        rows: of which shards each has the rows; none: each has all of it.
    """

    slot: _Slot
    held: tuple[tuple[int, _Slot], ...]
    rows: tuple[Shard, ...]


class OptimizerState:
    """How the values of a model's optimizer fall to servers; made once, before training, and takes no memory for values.

    Args:
        optimizer: of the model, built for the variables of the plan in their order.
        plan: where these are.

    Raises:
        OptionError: the optimizer is built for others, or remembers something that cannot be divided.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.variables.optimizer_sharding import OptimizerState
        >>> from lockstep.parameter_server.variables.sharding import VariableSpec, plan
        >>> optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        >>> optimizer.build([keras.Variable(np.zeros((4, 2), "float32"), name="w")])
        >>> state = OptimizerState(optimizer, plan([VariableSpec("w", (4, 2), "float32")], 2, lambda shape, dtype: [2, 1]))
        >>> parts = state.split([variable.numpy() for variable in optimizer.variables])
        >>> [part["optimizer/2"].shape for part in parts]
        [(2, 2), (2, 2)]
        >>> [value.shape for value in state.joined(parts)]
        [(), (), (4, 2)]
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, plan: ShardingPlan) -> None:
        self._kind = type(optimizer).__name__
        slots = _slots_of(optimizer, plan.variables)
        shapes = [tuple(variable.shape) for variable in optimizer.variables]
        if shapes != [slot.spec.shape for slot in slots]:
            raise OptionError(
                f"optimizer: expected a {self._kind} that is built for the {len(plan.variables)} trainable variables of the model, with "
                f"{len(slots)} variables of its own; got {len(shapes)}, or other shapes. Build the model before."
            )
        self._servers = [_slots_of(optimizer, plan.specs_at(number)) for number in range(plan.servers)]
        self._places = sorted(self._placed(slots, plan), key=lambda place: place.slot.number)

    def split(self, values: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """For each server what :meth:`lockstep.parameter_server.variables.variable_store.VariableStore.fill` takes besides values of variables.

        Args:
            values: of ``optimizer.variables``, in their order.
        """
        parts: list[dict[str, np.ndarray]] = [{} for _ in self._servers]
        for given, place in zip(values, self._places, strict=True):
            value = np.asarray(given)
            pieces = [shard.of(value) for shard in place.rows] or [value] * len(place.held)
            for (server, there), piece in zip(place.held, pieces, strict=True):
                parts[server][_name(there)] = piece.astype(there.spec.dtype, copy=False)
        return parts

    def joined(self, states: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
        """The values of ``optimizer.variables``, in their order. What belongs to no variable is taken from server 0.

        Args:
            states: for each server its arrays by name, as :meth:`lockstep.parameter_server.variables.variable_client.VariableClient.state` gives them.

        Raises:
            OptionError: shards of one variable remember different values of what is one for the whole variable.
        """
        return [self._value(place, [states[n][_name(there)] for n, there in place.held]) for place in self._places]

    def _value(self, place: _SlotLocation, found: list[np.ndarray]) -> np.ndarray:
        if place.rows:
            return np.concatenate(found)
        if place.slot.owner is not None and any(one.tobytes() != found[0].tobytes() for one in found[1:]):
            raise OptionError(
                f"{self._kind} has one {place.slot.spec.name!r} for a variable that variable_partitioner cuts into {len(found)} "
                f"shards, and these do not agree on its value. Leave the partitioner out, or take another optimizer."
            )
        return found[0]

    def _placed(self, slots: Sequence[_Slot], plan: ShardingPlan) -> Iterator[_SlotLocation]:
        there = [_by_owner(each) for each in self._servers]
        for owner, mine in _by_owner(slots).items():
            shards = () if owner is None else plan.shards[plan.variables[owner].name]
            held = [(shard.server, there[shard.server][plan.at(shard.server).index(shard)]) for shard in shards]
            held = held or [(number, each[None]) for number, each in enumerate(there)]
            for turn, slot in enumerate(mine):
                if any(len(theirs) != len(mine) for _, theirs in held):
                    raise self._indivisible(slot)
                yield self._place(slot, tuple((server, theirs[turn]) for server, theirs in held), shards)

    def _place(self, slot: _Slot, held: tuple[tuple[int, _Slot], ...], shards: Sequence[Shard]) -> _SlotLocation:
        shape, shapes = slot.spec.shape, [there.spec.shape for _, there in held]
        if all(each == shape for each in shapes):
            return _SlotLocation(slot, held, ())
        by_rows = [(shard.end - shard.begin, *shape[1:]) for shard in shards]
        if shape and shapes == by_rows and shape[0] == shards[0].variable.shape[0]:
            return _SlotLocation(slot, held, tuple(shards))
        raise self._indivisible(slot)

    def _indivisible(self, slot: _Slot) -> OptionError:
        return OptionError(
            f"{self._kind} remembers {slot.spec.name!r} of shape {slot.spec.shape}, which cannot be divided among {len(self._servers)} "
            f"servers. Use one server without variable_partitioner, or another optimizer."
        )


class _Reference(keras.Variable):
    """A variable whose name, but not its path, is a mark: optimizers choose by paths and take over names."""

    mark = ""

    @property
    def name(self) -> str:
        return self.mark


def _slots_of(optimizer: keras.optimizers.Optimizer, specs: Sequence[VariableSpec]) -> list[_Slot]:
    """What an optimizer of this configuration makes for these variables, in its order."""
    config, found = optimizer.get_config(), []

    def build() -> None:
        another = type(optimizer).from_config(config)
        variables = []
        for number, spec in enumerate(specs):
            variables.append(as_variable(spec, kind=_Reference))
            variables[-1].mark = f"<{number}>"
        install(OPTIMIZER_SLOTS, [(each, "add_variable_from_reference", _marking(each)) for each in _all_of(another)])
        another.build(variables)
        for number, variable in enumerate(another.variables):
            mark = _MARK.search(variable.name)
            name = variable.path if mark is None else _MARK.sub(f"{specs[int(mark[1])].name} ", variable.path).strip()
            spec = VariableSpec(name, tuple(variable.shape), str(variable.dtype))
            found.append(_Slot(number, spec, int(mark[1]) if mark else None))

    jax.eval_shape(build)
    return found


def _all_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer, and those inside it."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer, *_all_of(optimizer.inner_optimizer)]
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return [optimizer, *optimizer.optimizers]
    return [optimizer]


def _marking(optimizer: keras.optimizers.Optimizer) -> Any:
    """The optimizer's ``add_variable_from_reference``, whose names begin with the mark of the reference in place of its path."""

    def add(reference_variable: keras.Variable, name: str | None = None, initializer: Any = "zeros") -> keras.Variable:
        of, named = reference_variable, f"{reference_variable.name}{name or 'var'}"
        return optimizer.add_variable(of.shape, initializer, dtype=of.dtype, name=named)

    return add


def _by_owner(slots: Sequence[_Slot]) -> defaultdict[int | None, list[_Slot]]:
    found: defaultdict[int | None, list[_Slot]] = defaultdict(list)
    for slot in slots:
        found[slot.owner].append(slot)
    return found


def _name(slot: _Slot) -> str:
    return f"{OPTIMIZER}{slot.number}"
