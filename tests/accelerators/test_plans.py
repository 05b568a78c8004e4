"""Plans for TPUs and GPUs that are only described: the same collectives as the steps of a strategy, and the compiler's own limit of memory."""

import keras
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: ./scripts/test-accelerators")

import lockstep
from tests.accelerators import steps
from tests.accelerators.steps import Case
from tests.support import compile_cache

TARGETS = {"v5e 2x2": "v5e:2x2", "H100 x 8": "h100:8"}
PLANS = {"replicated": "fast", "optimizer": "shard_optimizer", "variables": "shard_variables"}


@pytest.fixture(autouse=True, scope="module")
def _compiled_anew():
    """JAX cannot read a program for devices that are only described from its cache."""
    with compile_cache.unused():
        yield


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("target", TARGETS)
def test_collectives_of_a_plan_are_those_of_the_strategy(target, strategy):
    case = Case("MLP", PLANS[strategy], target)
    model, _, batch = steps._made("MLP", steps.even_rows(case), "train")
    plan = lockstep.plan(
        model, batch[:2], hardware=TARGETS[target], batch=len(batch[0]), strategy=strategy, search=False
    )
    (row,) = plan.rows
    assert row.fits
    assert {name: (number, size) for name, number, size, _ in row.step.collectives} == steps.measure(case).exchanged


def wide(layer=None):
    """A net whose activations fill a TPU at batches that compile in seconds, and data of one epoch."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(131_072, "tanh"), layer or keras.layers.Identity()])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    return model, (np.zeros((512, 8), "float32"), np.zeros((512, 1), "float32"))


@pytest.mark.timeout(900)
def test_the_largest_batch_is_the_compilers_own_limit_within_a_tenth():
    model, data = wide()
    plan = lockstep.plan(model, data, hardware="v5e:1", batch=512)
    fits, fails = plan.rows[0].largest
    assert fits > 512
    assert plan.rows[0].certainty == "exact"
    sizes = [fits, fails or int(1.1 * fits)]
    below, above = lockstep.plan(model, data, hardware="v5e:1", batch=sizes, search=False).rows
    assert below.step.memory is not None
    assert above.step.memory is None, "a batch that is a tenth larger compiles"
    assert (above.fits, above.step.failure) == (False, "")
    assert "needs " in above.reason


class Spectrum(keras.layers.Layer):
    """Uses an operation that XLA has for CPUs only."""

    def call(self, inputs):
        """Add the first eigenvalue of a matrix."""
        matrix = keras.ops.reshape(keras.ops.stop_gradient(inputs[0, :4]), (2, 2))
        return inputs + keras.ops.real(keras.ops.eig(matrix)[0][0])


@pytest.mark.timeout(900)
def test_what_cannot_be_compiled_is_named_with_the_line_of_the_user():
    model, data = wide(Spectrum())
    (row,) = lockstep.plan(model, data, hardware="v5e:1", batch=512).rows
    assert row.fits is None
    assert "eig" in row.reason
    assert "(at test_plans.py:" in row.reason
    assert ", in spectrum" in row.reason


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "target", ["v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "a100:8", "h200:8", "b200:8", "l4:4", "t4:2", "h100:16"]
)
def test_every_accelerator_has_a_compiler_and_a_time(target):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = np.zeros((32, 64), "float32"), np.zeros((32, 1), "float32")
    (row,) = lockstep.plan(model, data, hardware=target, batch=32, strategy="replicated", search=False).rows
    assert row.fits
    assert row.estimate.seconds > 0
    assert sum(number for _, number, *_ in row.step.collectives) == 1
    assert row.links
