"""An optimizer that would mean something else on shards is refused, with the cure."""

import socket

import keras
import pytest

from lockstep import OptionError
from lockstep.parameter_server.optimizer_sharding import check_optimizer
from lockstep.parameter_server.sharding import FixedShardsPartitioner, plan_shards
from lockstep.parameter_server.variable_server import serve
from tests.parameter_server.threaded_servers import SPECS, Servers, peer, values_of

CUT = {"servers": 2, "partitioner": FixedShardsPartitioner(2)}
TWO = {"servers": 2}
ONE = {"servers": 1}


@pytest.mark.parametrize(
    ("optimizer", "where", "message"),
    [
        (lambda: keras.optimizers.Adafactor(), CUT, "Adafactor needs each variable as a whole"),
        (lambda: keras.optimizers.Lamb(), CUT, "Lamb needs each variable as a whole"),
        (lambda: keras.optimizers.Muon(), CUT, "cuts 'dense/kernel' into 2 shards"),
        (lambda: keras.optimizers.SGD(clipnorm=1.0), CUT, "clipnorm needs the norm of each variable"),
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), TWO, "they are on 2 servers"),
        (
            lambda: keras.optimizers.MultiOptimizer(lambda variable: None),
            CUT,
            "MultiOptimizer counts the steps of each",
        ),
    ],
)
def test_optimizers_that_need_whole_variables_are_refused(optimizer, where, message):
    with pytest.raises(OptionError, match=message):
        check_optimizer(optimizer(), plan_shards(SPECS, **where))
    check_optimizer(optimizer(), plan_shards(SPECS, **ONE))


def test_elementwise_optimizers_may_be_sharded():
    for optimizer in (keras.optimizers.Adam(), keras.optimizers.SGD(clipvalue=1.0), keras.optimizers.Lion()):
        check_optimizer(optimizer, plan_shards(SPECS, **CUT))


class Scaled(keras.optimizers.SGD):
    """Keras cannot make one from its configuration, which lacks an argument."""

    def __init__(self, factor):
        super().__init__(0.1 * factor)


def no_optimizer(variable):
    """A function that is not registered."""


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A class that is not registered."""

    def __call__(self, step):
        return 0.01 * (step + 1)

    def get_config(self):
        return {}


def test_an_optimizer_of_which_keras_makes_no_other_is_refused():
    for optimizer, reason in (
        (Scaled(2.0), "unexpected keyword argument"),
        (keras.optimizers.MultiOptimizer(no_optimizer), "Could not locate"),
    ):
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(
                OptionError, match=f"an optimizer of its own, and Keras cannot .*{reason}.* Fix: give the class"
            ),
        ):
            serve(peer(0), plan_shards(SPECS, **ONE), optimizer, listener)


def test_a_schedule_need_not_be_registered():
    with Servers(optimizer=lambda: keras.optimizers.SGD(Warmup())) as servers:
        client = servers.client(0)
        client.fill(values_of())
        assert client.pull().keys() == values_of().keys()
