"""What servers remember is what the optimizer of the whole model would, and training goes on from it on any number of servers."""

import jax
import keras
import numpy as np
import pytest

from lockstep import OptionError
from lockstep._array_encoding import ArraySpec
from lockstep.parameter_server.optimizer_sharding import OptimizerState, check_optimizer
from lockstep.parameter_server.sharding import FixedShardsPartitioner, plan_shards
from lockstep.parameter_server.variable_store import Push, VariableStore, make_variable
from tests.parameter_server.threaded_servers import Servers, values_of
from tests.support.marks import quick_first

# The first two have one name where "/" counts as "_"; one name stands in many places; paths begin with others.
SPECS = (
    ArraySpec("net/a/kernel", (5, 3), "float32"),
    ArraySpec("net/a_kernel", (5, 3), "float32"),
    ArraySpec("net/a/kernel_1", (5, 3), "float32"),
    ArraySpec("net/b/kernel", (2, 4, 3), "float32"),
    ArraySpec("net/b/bias", (3,), "float32"),
    ArraySpec("net/embedding/embeddings", (6, 6), "float32"),
    ArraySpec("scale", (), "float32"),
)
O = keras.optimizers  # noqa: E741
OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda: O.RMSprop(0.01),
    "centered": lambda: O.RMSprop(0.01, momentum=0.9, centered=True, use_ema=True),
    "Adam": lambda: O.Adam(0.01),
    "amsgrad": lambda: O.Adam(0.01, amsgrad=True, gradient_accumulation_steps=2),
    "AdamW": lambda: O.AdamW(0.01, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2),
    "Adadelta": lambda: O.Adadelta(0.1, use_ema=True, ema_overwrite_frequency=2),
    "Adagrad": lambda: O.Adagrad(O.schedules.ExponentialDecay(0.1, 2, 0.5), gradient_accumulation_steps=3),
    "Adamax": lambda: O.Adamax(0.01, use_ema=True),
    "Ftrl": lambda: O.Ftrl(0.01, l2_regularization_strength=0.1),
    "Nadam": lambda: O.Nadam(0.01, use_ema=True, gradient_accumulation_steps=2),
    "Lion": lambda: O.Lion(0.01, weight_decay=0.1),
    "Lamb": lambda: O.Lamb(0.01),
    "Adafactor": lambda: O.Adafactor(0.01, use_ema=True),
    "Muon": lambda: O.Muon(0.01, exclude_layers=["^net/a/", "kernel_1$"], gradient_accumulation_steps=2),
    "ScheduleFreeAdamW": lambda: O.ScheduleFreeAdamW(0.01, warmup_steps=2, gradient_accumulation_steps=2),
    "MultiOptimizer": lambda: O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1, momentum=0.9), {"net/b/.*": O.Nadam(0.01)})),
}
NEED_WHOLE_VARIABLES = ("Lamb", "Adafactor", "Muon")
PLACES = {
    "one": (1, None),
    "two": (2, None),
    "one, cut": (1, FixedShardsPartitioner(2)),
    "two, cut": (2, FixedShardsPartitioner(3)),
}
NEXT = {"one": "two, cut", "two": "one, cut", "one, cut": "two", "two, cut": "one"}


def is_refused(name, place):
    if name == "MultiOptimizer":
        return place != "one"
    return name in NEED_WHOLE_VARIABLES and PLACES[place][1] is not None


CASES = [(name, place) for name in OPTIMIZERS for place in PLACES if not is_refused(name, place)]


class OnOneDevice:
    """Keras's optimizer on the whole model."""

    def __init__(self, made):
        self.values = values_of(SPECS)
        self.optimizer = made()
        self.optimizer.build([make_variable(spec, self.values[spec.name]) for spec in SPECS])
        self.remembered = [np.array(variable.value) for variable in self.optimizer.variables]
        self._apply = jax.jit(self.optimizer.stateless_apply)

    def train(self, gradients):
        for each in gradients:
            each = [each[spec.name] for spec in SPECS]
            values, self.remembered = self._apply(self.remembered, each, list(self.values.values()))
            self.values = dict(zip(self.values, values, strict=True))


class OnServers:
    """Stores of so many servers, which go on from what ``before`` has."""

    def __init__(self, made, place, before):
        servers, partitioner = PLACES[place]
        self.optimizer = before.optimizer
        self.plan = plan_shards(SPECS, servers, partitioner)
        check_optimizer(self.optimizer, self.plan)
        self._stores = [VariableStore(self.plan.specs_at(number), made()) for number in range(servers)]
        self._state = OptimizerState(self.optimizer, self.plan)
        values = {name: np.array(value) for name, value in before.values.items()}
        known = self._state.split(before.remembered)
        for store, part, own in zip(self._stores, self.plan.split(values), known, strict=True):
            assert own.keys() == {spec.name for spec in store.optimizer_specs}
            store.load(*store.prepare(part | own))

    def train(self, gradients):
        for each in gradients:
            for store, part in zip(self._stores, self.plan.split(each), strict=True):
                store.apply([Push(part)])

    @property
    def remembered(self):
        return self._state.join([store.state() for store in self._stores])

    @property
    def values(self):
        states = [store.state() for store in self._stores]
        return {
            name: np.concatenate([states[s.server][s.spec.name].reshape(-1) for s in shards]).reshape(
                shards[0].variable.shape
            )
            for name, shards in self.plan.shards.items()
        }


def gradients(seeds):
    return [values_of(SPECS, seed) for seed in seeds]


def assert_alike(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # A few updates in float32, compiled two ways.


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, np.asarray(other).tobytes())


# A run that begins on one server continues on two (NEXT), so it tests both. Each optimizer begins with its variables cut, if
# they may be; Adam begins at each place. What else there is runs in the nightly set.
STARTS = [
    (name, place)
    if name == "Adam" or place == ("one" if is_refused(name, "one, cut") else "one, cut")
    else pytest.param(name, place, marks=pytest.mark.nightly)
    for name, place in CASES
]


@pytest.mark.parametrize(("name", "place"), quick_first(STARTS))
def test_servers_have_the_optimizer_state_of_one_device_and_others_continue_from_it(name, place):
    made = OPTIMIZERS[name]
    one = OnOneDevice(made)
    servers = OnServers(made, place, one)
    for device in (one, servers):
        device.train(gradients((1, 2, 3)))
    assert_alike(servers.remembered, one.remembered)
    others = OnServers(made, place if is_refused(name, NEXT[place]) else NEXT[place], servers)
    assert_same_bits(others.remembered, servers.remembered)
    for device in (one, others):
        device.train(gradients((4, 5)))
    assert_alike(others.remembered, one.remembered)
    assert_alike(others.values.values(), one.values.values())


@pytest.mark.parametrize(("name", "place"), CASES)
def test_splitting_and_joining_optimizer_state_keeps_its_bits(name, place):
    optimizer = OnOneDevice(OPTIMIZERS[name]).optimizer
    random = np.random.default_rng(0)
    values = [random.integers(0, 100, variable.shape).astype(str(variable.dtype)) for variable in optimizer.variables]
    servers, partitioner = PLACES[place]
    state = OptimizerState(optimizer, plan_shards(SPECS, servers, partitioner))
    assert_same_bits(state.join(state.split(values)), values)


@pytest.mark.slow
def test_optimizer_state_goes_to_servers_and_back():
    made = OPTIMIZERS["Adam"]
    one = OnOneDevice(made)
    one.train(gradients((1, 2)))
    with Servers(2, specs=SPECS, partitioner=FixedShardsPartitioner(2), optimizer=made) as servers:
        client = servers.client(0)
        state = OptimizerState(one.optimizer, servers.plan)
        values = {name: np.array(value) for name, value in one.values.items()}
        client.fill(values, state.split(one.remembered), version=2)
        assert_same_bits(state.join(client.state()), one.remembered)
        client.push(gradients([3])[0])
        one.train(gradients([3]))
        assert_alike(state.join(client.state()), one.remembered)


def test_a_number_of_another_dtype_on_another_server_is_cast():
    specs = (ArraySpec("a", (2,), "float32"), ArraySpec("b", (2,), "bfloat16"))
    optimizer = O.Nadam()
    optimizer.build([make_variable(spec) for spec in specs])
    values = [np.array(variable.value) for variable in optimizer.variables]
    made = plan_shards(specs, 2)
    for number, part in enumerate(OptimizerState(optimizer, made).split(values)):
        expected = VariableStore(made.specs_at(number), O.Nadam()).optimizer_specs
        assert [(name, value.shape, str(value.dtype)) for name, value in sorted(part.items())] == sorted(
            (spec.name, spec.shape, spec.dtype) for spec in expected
        )


class Columns(O.SGD):
    """Remembers one number for each column."""

    def build(self, variables):
        super().build(variables)
        self.columns = [self.add_variable(v.shape[1:], name=f"{v.name}_columns") for v in variables]


class Pairs(O.SGD):
    """Remembers two numbers for each of its numbers."""

    def build(self, variables):
        super().build(variables)
        self.pairs = [self.add_variable((2, *v.shape), name=f"{v.name}_pairs") for v in variables]


def test_slots_on_which_shards_disagree_are_refused_by_name():
    one = OnOneDevice(lambda: Columns(0.1))
    state = OptimizerState(one.optimizer, plan_shards(SPECS, 2, FixedShardsPartitioner(2)))
    parts = state.split(one.remembered)
    assert_same_bits(state.join(parts), one.remembered)
    parts[1]["optimizer/2"] = parts[1]["optimizer/2"] + 1
    with pytest.raises(
        OptionError, match=r"one 'columns/net/a/kernel _columns' for .* into 2 shards, and these do not agree"
    ):
        state.join(parts)


def test_what_cannot_be_divided_is_refused_by_name():
    one = OnOneDevice(lambda: Pairs(0.1))
    OptimizerState(one.optimizer, plan_shards(SPECS, 2))
    with pytest.raises(OptionError, match=r"Pairs has the state 'pairs/net/a/kernel _pairs' of shape \(2, 5, 3\)"):
        OptimizerState(one.optimizer, plan_shards(SPECS, 2, FixedShardsPartitioner(2)))


def test_an_optimizer_of_other_variables_is_refused():
    with pytest.raises(OptionError, match="a SGD that is built for the 7 trainable variables"):
        OptimizerState(O.SGD(momentum=0.9), plan_shards(SPECS, 1))
