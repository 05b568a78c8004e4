"""An optimizer that would mean something else on shards is refused, with the cure."""

import keras
import pytest

from lockstep import OptionError
from lockstep.parameter_server.optimizer_sharding import check_optimizer
from lockstep.parameter_server.sharding import FixedShardsPartitioner, plan_shards
from tests.parameter_server.threaded_servers import SPECS

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
