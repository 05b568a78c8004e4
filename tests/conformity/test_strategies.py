"""Behaviours of tf.distribute's strategies, contexts, values and loops that no other test holds."""

import contextlib
import copy

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from keras import layers

import lockstep
from lockstep import get_replica_context
from tests.support.marks import quick_first


def make(replicas=2, devices=None):
    return lockstep.MirroredStrategy([f"cpu:{i}" for i in range(devices or replicas)], replicas=replicas)


def central():
    return lockstep.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")


def own(strategy, value_of):
    """One value for each replica, of its number."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: value_of(context.replica_id_in_sync_group)
    )


def number():
    return get_replica_context().replica_id_in_sync_group


def lists(value):
    return [np.asarray(one).tolist() for one in value.values]


def same(found, expected):
    """Compare two trees of numbers."""
    jax.tree.map(np.testing.assert_allclose, found, expected)
    return True


STRATEGIES = {"one": lambda: make(1), "two": make, "three on two": lambda: make(3, 2), "central": central}


@pytest.fixture(params=["two", "three on two"])
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(params=STRATEGIES)
def each_kind(request):
    return STRATEGIES[request.param]()


# --- run -----------------------------------------------------------------------------------------------------------------


def test_what_run_returned_is_an_argument_of_the_next_run(each_kind):
    strategy = each_kind
    first = strategy.run(lambda: number() + 1)
    second = strategy.run(lambda x: {"a": x * 2, "b": x * x}, args=(first,))
    third = strategy.run(lambda b, a: a + 2 * b + 2, kwargs=second)
    numbers = np.arange(1, 1 + strategy.num_replicas_in_sync)
    assert lists(first) == numbers.tolist()
    assert lists(third) == (2 * numbers + 2 * numbers**2 + 2).tolist()


def test_one_replica_gives_one_value():
    strategy = make(1)
    first = strategy.run(lambda: 4.0)
    second = strategy.run(lambda x: {"a": x * 2, "b": x * x}, args=(first,))
    assert strategy.experimental_local_results(second) == ({"a": 8.0, "b": 16.0},)
    assert strategy.experimental_local_results(strategy.run(lambda b, a: a + 2 * b + 2, kwargs=second)) == (42.0,)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_each_replica_has_a_number_of_its_own(strategy, wrap):
    found = wrap(lambda: strategy.run(wrap(lambda: number())))()
    assert lists(found) == list(range(strategy.num_replicas_in_sync))


def fails(_=None):
    raise ZeroDivisionError("of the user")


def fails_in_a_merge_call():
    return get_replica_context().merge_call(fails)


@pytest.mark.parametrize(
    "function",
    [
        fails,
        fails_in_a_merge_call,
        lambda: get_replica_context().merge_call(lambda strategy: strategy.run(fails)),
        lambda: get_replica_context().merge_call(lambda strategy: strategy.run(fails_in_a_merge_call)),
    ],
    ids=["run", "merge", "run in merge", "merge in run in merge"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_error_of_the_function_comes_out_as_it_is_and_the_strategy_continues(function, replicas):
    strategy = make(replicas)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        strategy.run(function)
    assert not lockstep.has_strategy()
    assert lists(strategy.run(number)) == list(range(replicas))


def test_run_works_inside_a_merge_call_also_where_the_strategy_has_a_model():
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    inner = strategy.run(lambda: get_replica_context().merge_call(lambda strategy: strategy.run(number)))
    assert lists(inner) == [0, 1]
    assert model.built


def test_a_function_may_return_nothing_and_a_merge_call_too():
    def step():
        return get_replica_context().merge_call(lambda strategy: None), 0.0

    nothing, zero = make().run(step)
    assert nothing is None
    assert lists(zero) == [0.0, 0.0]
    assert make().run(lambda: None) is None


def test_a_function_runs_on_as_many_devices_as_there_are():
    strategy = make(3)
    found = strategy.run(lambda x: get_replica_context().merge_call(lambda _, x: x, (x,)) + 1, (own(strategy, float),))
    assert lists(found) == [1.0, 2.0, 3.0]
    assert len(found.groups[0].sharding.device_set) == 3


def test_replicas_may_meet_inside_a_compiled_function():
    def step():
        merge = lambda strategy, x: strategy.reduce("SUM", x, axis=None)  # noqa: E731
        return jax.jit(lambda x: get_replica_context().merge_call(merge, (x,)))(number() + 1)

    assert int(make().run(step)) == 3


def test_replicas_cannot_merge_inside_a_while_loop():
    def step():
        merge = lambda strategy, x: strategy.reduce("SUM", x, axis=None)  # noqa: E731
        return lax.while_loop(lambda i: i < 2, lambda i: get_replica_context().merge_call(merge, (i,)), 0)

    with pytest.raises(lockstep.ModelError, match=r"cannot sync inside jax\.lax\.while"):
        make().run(step)


def test_run_may_stand_inside_a_compiled_loop(strategy):
    @jax.jit
    def steps(x):
        def body(_, total):
            return total + strategy.reduce("SUM", strategy.run(lambda x: x * 2, (x,)), axis=None)

        return lax.fori_loop(0, 3, body, 0.0)

    assert float(steps(own(strategy, np.float32))) == 6 * sum(range(strategy.num_replicas_in_sync))


def test_python_cannot_branch_on_the_number_of_a_replica_and_is_told_so():
    with pytest.raises(lockstep.LockstepError, match=r"jnp\.where"):
        make().run(lambda: 1.0 if number() == 0 else 2.0)


def test_a_number_reaches_a_function_that_merges_as_it_is():
    def step():
        merge = lambda strategy, x, factor: strategy.reduce("SUM", x, axis=None) * factor  # noqa: E731
        return get_replica_context().merge_call(merge, (number(), 5))

    assert int(make().run(step)) == 5


COMPILED = {
    "mean": jax.jit(lambda x: get_replica_context().all_reduce("MEAN", x)),
    "average loss": jax.jit(lambda x: get_replica_context().all_reduce("SUM", lockstep.compute_average_loss(x[None]))),
    "number": jax.jit(lambda x: x + get_replica_context().replica_id_in_sync_group),
    "gathered": jax.jit(lambda x: get_replica_context().all_gather(x[None], axis=0).mean()),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_function_is_right_under_a_second_strategy(name):
    found = []
    for replicas in (2, 3):
        strategy = make(replicas, 1)
        value = strategy.run(COMPILED[name], (own(strategy, lambda replica: np.float32(replica + 1)),))
        found.append([float(one) for one in strategy.experimental_local_results(value)])
    assert found == ([[1.0, 3.0], [1.0, 3.0, 5.0]] if name == "number" else [[1.5], [2.0]])


def test_a_compiled_function_that_asks_for_the_replicas_number_takes_an_uneven_batch():
    strategy, compiled = make(2, 1), jax.jit(lambda: number())
    (batch,) = strategy.experimental_distribute_dataset([np.arange(3.0)])
    assert lists(strategy.run(lambda x: compiled() + 0 * x[0], (batch,))) == [0.0, 1.0]


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x * jnp.ones_like(x),
        lambda x: x * jnp.arange(1.0, x.shape[0] + 1),
        lambda x: x * jnp.full(x.shape, 1.0),
    ],
    ids=["ones_like", "arange", "full"],
)
def test_a_replica_without_rows_may_make_arrays_of_their_shape(made):
    strategy = make()
    (batch,) = strategy.experimental_distribute_dataset([np.ones(1, "float32")])
    assert lists(strategy.run(lambda x: made(x).sum(), (batch,))) == [1.0, 0.0]


# --- values of replicas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value_of", "expected"),
    [
        (lambda _: 1, lambda _: 1),
        (lambda _: np.array([1.0, 2.0, 3.0]), lambda _: [1.0, 2.0, 3.0]),
        (lambda _: (1.0, 2.0), lambda _: (1.0, 2.0)),
        (
            lambda replica: (1.0 * replica, {"x": [2.0 * replica]}),
            lambda replica: (1.0 * replica, {"x": [2.0 * replica]}),
        ),
        (lambda replica: range(9)[replica], lambda replica: replica),
        (lambda _: jnp.ones(2), lambda _: [1.0, 1.0]),
    ],
    ids=["number", "numpy", "tuple", "tree", "picked", "jax"],
)
def test_a_function_makes_a_value_for_each_replica(each_kind, value_of, expected):
    strategy = each_kind
    found = strategy.experimental_local_results(own(strategy, value_of))
    assert len(found) == strategy.num_replicas_in_sync
    for replica, value in enumerate(found):
        assert jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value) == expected(replica)


def test_values_that_a_function_made_are_arguments_of_run(strategy):
    squares = strategy.run(lambda x: x**2, args=(own(strategy, int),))
    assert lists(squares) == [replica**2 for replica in range(strategy.num_replicas_in_sync)]


def test_values_and_batches_lie_on_the_devices_of_their_replicas():
    strategy = make()
    (batch,) = strategy.experimental_distribute_dataset([np.arange(4.0)])
    for value in own(strategy, float), batch:
        assert [one.devices() for one in value.held.values()] == [{jax.devices()[0]}, {jax.devices()[1]}]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: [1.0, 2.0], [[1.0, 2.0]] * 2),
        (lambda: (1.0, 2.0, 3.0), [(1.0, 2.0, 3.0)] * 2),
        (lambda: {"a": 1.0, "b": 2.0}, [{"a": 1.0, "b": 2.0}] * 2),
        (lambda: ({"a": 1.0}, {"a": 4.0, "b": 6.0}), [({"a": 1.0}, {"a": 4.0, "b": 6.0})] * 2),
        (lambda: number(), [0, 1]),
        (lambda: {"a": number() + 1.0, "b": number() + 2.0}, [{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 3.0}]),
        (lambda: jnp.asarray([2.0, 3.0]), [[2.0, 3.0]] * 2),
    ],
    ids=["list", "tuple", "dict", "nested", "number", "differs", "array"],
)
def test_local_results_have_the_form_of_what_the_function_returned(function, expected):
    strategy = make()
    with strategy.scope():
        found = strategy.experimental_local_results(strategy.run(function))
    assert isinstance(found, tuple)
    assert [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), one) for one in found] == expected


def test_a_value_of_replicas_is_copied_mapped_and_compiled_like_any_tree():
    strategy, traces = make(), []
    value = own(strategy, lambda replica: np.full(replica + 1, replica, "float32"))

    @jax.jit
    def doubled(value):
        traces.append(value)
        return jax.tree.map(lambda x: 2 * x, value)

    for _ in range(3):
        found = doubled(value)
    assert len(traces) == 1
    assert lists(found) == [[0.0], [2.0, 2.0]]
    assert lists(copy.deepcopy(value)) == lists(value) == [[0.0], [1.0, 1.0]]
    assert lists(jax.tree.map(lambda x: x + 10, value)) == [[10.0], [11.0, 11.0]]


def test_a_condition_chooses_between_values_of_replicas():
    strategy = make()
    first, second = own(strategy, np.float32), own(strategy, lambda replica: np.float32(replica + 7))
    choose = jax.jit(lambda which: lax.cond(which, lambda: first, lambda: second))
    assert [lists(choose(which)) for which in (True, False)] == [[0.0, 1.0], [7.0, 8.0]]


@pytest.mark.parametrize(
    "use",
    [
        lambda strategy, value: strategy.run(lambda x: x, (value,)),
        lambda strategy, value: strategy.reduce("MEAN", value, axis=None),
        lambda strategy, value: strategy.gather(value, axis=0),
    ],
    ids=["run", "reduce", "gather"],
)
def test_values_of_a_strategy_with_other_replicas_are_refused(use):
    value = own(make(2), lambda replica: np.ones(2, "float32"))
    with pytest.raises(lockstep.InputError, match="expected a value of each of 3 replicas, got one of 2 replicas"):
        use(make(3, 1), value)


def sparse_of(replica):
    """Two numbers in four places, at ``replica`` and behind it."""
    return sparse.BCOO((jnp.asarray([1.0, 2.0]), jnp.stack([replica, replica + 1])[:, None]), shape=(4,))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "all_gather", "gather"])
def test_a_sparse_array_is_neither_summed_nor_joined(operation):
    strategy = make()
    value = own(strategy, sparse_of)
    calls = {
        "all_reduce": lambda: strategy.run(lambda x: get_replica_context().all_reduce("SUM", x), (value,)),
        "reduce": lambda: strategy.reduce("SUM", value, axis=None),
        "all_gather": lambda: strategy.run(lambda x: get_replica_context().all_gather(x, axis=0), (value,)),
        "gather": lambda: strategy.gather(value, axis=0),
    }
    with pytest.raises(lockstep.InputError, match=f"^{operation}: .*a sparse array, BCOO, cannot be combined"):
        calls[operation]()


def test_a_sparse_array_of_each_replica_reaches_run():
    strategy = make()
    found = strategy.run(lambda x: x.todense(), (own(strategy, sparse_of),))
    assert lists(found) == [[1.0, 2.0, 0.0, 0.0], [0.0, 1.0, 2.0, 0.0]]


# --- reduce, all_reduce ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_sum_is_the_same_inside_and_outside_of_the_scope(each_kind, wrap):
    strategy = each_kind
    value = own(strategy, lambda _: np.float32(1))
    total = wrap(lambda value: strategy.reduce("SUM", value, axis=None))
    with strategy.scope():
        inside = total(value)
    assert inside == total(value) == strategy.num_replicas_in_sync


def test_what_run_made_of_nothing_is_reduced_over_replicas_and_rows(strategy):
    value = strategy.run(lambda: jnp.asarray([1.0, 2.0]))
    assert strategy.reduce("MEAN", value, axis=0) == 1.5
    assert strategy.reduce("SUM", value, axis=0) == 3 * strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None) == strategy.num_replicas_in_sync


def rows_of_each(dtype):
    """Replica ``r`` has ``r + 1`` rows, each the number ``r``."""
    return lambda replica: np.full(replica + 1, replica, dtype)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_rows_of_unequal_replicas_are_summed(each_kind, dtype):
    strategy = each_kind
    found = strategy.reduce("SUM", own(strategy, rows_of_each(dtype)), axis=0)
    assert found.dtype == dtype
    assert found == sum(x * (x + 1) for x in range(strategy.num_replicas_in_sync))


def test_the_mean_over_unequal_replicas_counts_each_row_once(strategy):
    count = strategy.num_replicas_in_sync
    expected = sum(x * (x + 1) for x in range(count)) / sum(x + 1 for x in range(count))
    assert float(strategy.reduce("MEAN", own(strategy, rows_of_each("float32")), axis=0)) == pytest.approx(expected)


def test_the_mean_of_rows_of_whole_numbers_is_a_fraction():
    strategy = make()
    (batch,) = strategy.experimental_distribute_dataset([np.arange(2)])
    assert strategy.reduce("MEAN", batch, axis=0) == strategy.reduce("MEAN", np.arange(2), axis=0) == 0.5


def test_a_value_that_all_share_is_its_own_mean(each_kind):
    strategy = each_kind
    with strategy.scope():
        assert strategy.reduce("MEAN", 1.5, axis=None) == 1.5
    assert strategy.reduce("MEAN", keras.Variable(3.0), axis=None) == 3.0


@pytest.mark.parametrize("alone", [lockstep.get_strategy, lambda: make(1)], ids=["no strategy", "one replica"])
def test_a_single_value_of_one_replica_is_its_own_sum(alone):
    strategy = alone()
    assert strategy.reduce("SUM", 1.0, axis=None) == 1.0
    assert strategy.reduce("SUM", strategy.run(lambda weight: 2 * weight, (jnp.float32(3),)), axis=None) == 6.0


@pytest.mark.parametrize("op", ["sum", "SUM", "mean", "MEAN", lockstep.ReduceOp.SUM, lockstep.ReduceOp.MEAN])
def test_an_operation_is_a_member_or_its_name_in_any_case(op):
    strategy = make()
    value = own(strategy, np.float32)
    expected = 1.0 if str(getattr(op, "name", op)).upper() == "SUM" else 0.5
    assert strategy.reduce(op, value, axis=None) == expected
    assert strategy.run(lambda x: get_replica_context().all_reduce(op, x), (value,)) == expected


TWO = ([1.0, 3.0], [[39.0, 2.0], [3.0, 41.0]])


@pytest.mark.parametrize(("op", "expected"), [("SUM", (4.0, [42.0, 43.0])), ("MEAN", (2.0, [21.0, 21.5]))])
@pytest.mark.parametrize("kind", [make, lambda: make(2, 1), central], ids=["two", "two on one", "central"])
def test_trees_are_reduced_array_by_array(kind, op, expected):
    strategy = kind()
    value = own(strategy, lambda replica: tuple(np.asarray(part[replica], "float32") for part in TWO))
    inside = strategy.run(lambda *parts: get_replica_context().all_reduce(op, parts), value)
    assert same(inside, tuple(map(np.asarray, expected)))
    assert same(strategy.reduce(op, value, axis=None), tuple(map(np.asarray, expected)))


@pytest.mark.parametrize(("op", "expected"), [("SUM", 4.0), ("MEAN", 4.0)])
def test_one_replica_reduces_to_its_own_value(op, expected):
    strategy = make(1)
    assert strategy.run(lambda x: get_replica_context().all_reduce(op, x), (own(strategy, lambda _: 4.0),)) == expected


@pytest.mark.parametrize(
    ("op", "factors", "expected"),
    [("SUM", [1.0, 3.0], 4.0), ("MEAN", [1.0, 3.0], 2.0), ("SUM", [4.0], 4.0), ("MEAN", [5.0], 5.0)],
)
def test_the_gradient_of_a_reduction_has_the_factors_of_all_replicas(op, factors, expected):
    strategy = make(len(factors))

    def step(factor):
        return jax.grad(lambda x: get_replica_context().all_reduce(op, x) * factor)(42.0)

    found = strategy.run(step, (own(strategy, lambda replica: np.float32(factors[replica])),))
    assert {float(one) for one in strategy.experimental_local_results(found)} == {expected}


# --- gather, all_gather ------------------------------------------------------------------------------------------------------


def gathered(strategy, value, axis, how):
    if how == "gather":
        return strategy.gather(value, axis=axis)
    return strategy.run(lambda x: get_replica_context().all_gather(x, axis=axis), (value,))


HOWS = pytest.mark.parametrize("how", ["gather", "all_gather"])


@pytest.mark.slow
@HOWS
@pytest.mark.parametrize(
    ("value", "axis"),
    [
        ([1, 2, 3], 0),
        ([[1, 2, 3]], 0),
        ([[1, 2, 3]], 1),
        ([[[1, 2], [1, 2]]], 0),
        ([[[1, 2], [1, 2]]], 1),
        ([[[1, 2], [1, 2]]], -1),
    ],
)
def test_equal_arrays_are_joined_along_each_axis(strategy, how, value, axis):
    found = gathered(strategy, own(strategy, lambda _: np.asarray(value)), axis, how)
    np.testing.assert_array_equal(found, np.concatenate([value] * strategy.num_replicas_in_sync, axis=axis))
    assert jnp.issubdtype(found.dtype, jnp.integer)


@HOWS
@pytest.mark.parametrize("axis", [0, 1])
def test_arrays_of_other_lengths_are_joined_along_that_axis(each_kind, how, axis):
    strategy = each_kind

    def value_of(replica):
        return np.full((replica + 1, 1) if axis == 0 else (1, replica + 1), replica)

    found = gathered(strategy, own(strategy, value_of), axis, how)
    expected = [value_of(replica) for replica in range(strategy.num_replicas_in_sync)]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=axis))


@pytest.mark.parametrize("shape_of", [lambda r: (1, r + 1), lambda r: (1,) * (r + 1)], ids=["length", "rank"])
@pytest.mark.parametrize(
    "how",
    [
        "gather",
        "all_gather",
    ],
)
def test_arrays_that_differ_along_another_axis_are_refused_by_name(how, shape_of):
    strategy = make()
    with pytest.raises(lockstep.InputError, match=rf"{how}:.*along axis 0 only"):
        gathered(strategy, own(strategy, lambda replica: np.ones(shape_of(replica))), 0, how)


def test_a_tree_is_gathered_array_by_array():
    strategy = make()

    def step(x):
        return get_replica_context().all_gather([x, jnp.asarray([[[1, 2], [1, 2]]])], axis=1)

    first, second = strategy.run(step, (own(strategy, lambda replica: np.full((1, replica + 1), replica)),))
    assert first.tolist() == [[0, 1, 1]]
    assert second.tolist() == [[[1, 2]] * 4]


def test_the_gradient_of_a_gathering_has_the_factors_of_all_replicas(strategy):
    def step(factor):
        def loss(x):
            return sum((get_replica_context().all_gather(part, axis=1) * factor).sum() for part in x)

        return jax.grad(loss)([jnp.asarray([[3.0], [5.0]]), jnp.asarray([[2.0], [4.0]])])

    found = strategy.run(step, (own(strategy, lambda replica: np.float32(replica + 1)),))
    expected = float(sum(range(1, strategy.num_replicas_in_sync + 1)))
    for one in strategy.experimental_local_results(found):
        assert [np.asarray(part).tolist() for part in one] == [[[expected], [expected]]] * 2


# --- without a strategy --------------------------------------------------------------------------------------------------------


def test_without_a_strategy_values_are_made_and_run_as_for_one_replica():
    strategy = lockstep.get_strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    assert strategy.experimental_local_results(value) == ((0, 1),)
    assert get_replica_context().replica_id_in_sync_group == 0
    assert strategy.reduce("MEAN", 1.0, axis=None) == 1.0
    assert strategy.gather(np.asarray([1, 2]), axis=0).tolist() == [1, 2]


def test_without_a_strategy_a_merge_call_takes_what_it_is_given():
    found = get_replica_context().merge_call(lambda strategy, s: (strategy, "foo_" + s), args=("bar",))
    assert found == (lockstep.get_strategy(), "foo_bar")


def test_without_a_strategy_a_merge_call_is_in_the_cross_replica_context():
    def merge(strategy):
        return strategy, get_replica_context(), lockstep.in_cross_replica_context(), lockstep.has_strategy()

    assert get_replica_context().merge_call(merge) == (lockstep.get_strategy(), None, True, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda context: context.all_reduce("MAX", 5.0), "all_reduce: reduce_op: expected one of SUM, MEAN, got 'MAX'"),
        (lambda context: context.all_gather(np.ones(2), axis=7), "axis 7 is not one of a value of shape"),
        (lambda context: context.all_gather(1.0, axis=0), "axis 0 is not one of a value of shape"),
    ],
    ids=["operation", "axis", "number"],
)
def test_without_a_strategy_a_wrong_argument_is_refused_too(call, message):
    with pytest.raises(lockstep.LockstepError, match=message):
        call(get_replica_context())


def test_the_scope_of_no_strategy_changes_nothing():
    strategy, plain = make(), lockstep.get_strategy()
    with plain.scope(), plain.scope():
        assert not lockstep.has_strategy()
        assert lockstep.get_strategy() is plain
        with strategy.scope():
            assert lockstep.get_strategy() is strategy
        assert not lockstep.has_strategy()


# --- what contexts and strategies say of themselves ------------------------------------------------------------------------------


def test_an_input_context_knows_its_pipelines_and_replicas():
    context = lockstep.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="6 replicas do not divide a global batch of 13 rows"):
        context.get_per_replica_batch_size(13)


def test_a_strategy_of_one_process_has_no_resolver(each_kind):
    strategy = each_kind
    with strategy.scope():
        assert strategy.cluster_resolver is None
    assert strategy.cluster_resolver is None


def test_the_resolver_that_a_strategy_was_given_is_its_own():
    resolver = lockstep.cluster_resolver.SimpleClusterResolver(
        {"worker": ["localhost:12421"]}, task_type="worker", task_id=0
    )
    strategy = lockstep.MultiWorkerMirroredStrategy(resolver, devices=["cpu:0"])
    with strategy.scope():
        assert strategy.cluster_resolver is resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


@pytest.mark.parametrize("name", ["extended", "unwrap", "group", "make_dataset_iterator", "experimental_run_v2"])
def test_a_strategy_has_nothing_of_tensorflow_1(name):
    assert not hasattr(make(), name)


def test_a_replica_knows_its_strategy_and_how_many_there_are():
    strategy, seen = make(3, 2), []

    def step():
        context = get_replica_context()
        seen.append((context.strategy, context.num_replicas_in_sync, lockstep.get_strategy()))
        return 0

    strategy.run(step)
    assert set(seen) == {(strategy, 3, strategy)}


def test_a_function_that_makes_data_is_asked_again_by_each_pass():
    strategy = make()
    dataset = strategy.distribute_datasets_from_function(lambda context: [np.full(1, i) for i in range(6)])
    for _ in range(2):
        iterator = iter(dataset)
        assert [lists(next(iterator)) for _ in range(3)] == [[[0], [1]], [[2], [3]], [[4], [5]]]
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_loop_over_a_data_set_may_be_compiled_step_by_step(strategy):
    dataset = strategy.experimental_distribute_dataset([np.arange(2 * i, 2 * i + 2) for i in range(5)])
    square = jax.jit(lambda x: strategy.run(lambda x: x**2, (x,)))
    for step, outside in zip((lambda x: strategy.run(lambda x: x**2, (x,)), square), (False, True), strict=True):
        found = [strategy.gather(step(batch), axis=0).tolist() for batch in dataset]
        assert found == [[i**2, (i + 1) ** 2] for i in range(0, 10, 2)], outside


# --- variables -----------------------------------------------------------------------------------------------------------------


def test_a_variable_is_read_by_each_replica_and_outside(each_kind):
    strategy = each_kind
    with strategy.scope():
        variable = keras.Variable(1.0)
    variable.assign(3)
    assert isinstance(variable, keras.Variable)
    assert variable.value.dtype == "float32"
    count = strategy.num_replicas_in_sync
    found = strategy.run(lambda value: variable + value, (own(strategy, np.float32),))
    assert lists(found) == [3.0 + replica for replica in range(count)]
    assert float(variable + 1) == 4.0
    total = strategy.run(lambda: get_replica_context().all_reduce("SUM", variable) + number())
    assert lists(total) == [3.0 * count + replica for replica in range(count)]


@pytest.mark.parametrize(
    ("method", "start", "expected"), [("assign", 1, 0.5), ("assign_add", 1, 1.5), ("assign_sub", 5, 4.5)]
)
def test_a_variable_takes_the_mean_of_what_the_replicas_give(method, start, expected):
    strategy = make()
    with strategy.scope():
        variable = keras.Variable(float(start))
    mean = strategy.run(lambda x: get_replica_context().all_reduce("MEAN", x), (own(strategy, np.float32),))
    getattr(variable, method)(mean)
    assert float(variable.value) == expected
    assert lists(strategy.run(lambda value, x: value + 0 * x, (variable, own(strategy, np.float32)))) == [expected] * 2


def assigned():
    variable = keras.Variable(0.0)
    return lambda x: variable.assign(x), [variable]


def added():
    variable = keras.Variable(0.0)
    return lambda x: variable.assign_add(x), [variable]


def measured():
    metric = keras.metrics.Mean()
    return metric.update_state, metric.variables


def updated():
    variable, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.1)
    optimizer.build([variable])
    return lambda x: optimizer.apply([x], [variable]), [variable]


def normalized():
    layer = layers.BatchNormalization()
    layer.build((None, 1))
    return lambda x: layer(x[None, None], training=True), [layer.moving_mean]


def noisy():
    model = keras.Sequential([keras.Input((1,)), layers.BatchNormalization(), layers.Dropout(0.5)])
    return lambda x: model(x[None, None], training=True), model.variables


@pytest.mark.parametrize("is_made_in_scope", [True, False])
@pytest.mark.parametrize(
    ("assign", "name"),
    [
        (assigned, "variable"),
        (added, "variable"),
        (measured, "total"),
        (updated, "iteration"),
        (normalized, "moving_mean"),
        (noisy, "seed_generator_state"),
    ],
)
def test_a_variable_that_a_replica_assigns_is_refused_and_stays_what_it_was(assign, name, is_made_in_scope):
    strategy = make()
    with strategy.scope() if is_made_in_scope else contextlib.nullcontext():
        step, variables = assign()
        before = [np.array(variable.value) for variable in variables]
    with pytest.raises(lockstep.ModelError, match=f"fn assigned to .*{name}"):
        strategy.run(step, (own(strategy, lambda replica: np.float32(replica + 1)),))
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)


def test_every_device_starts_with_the_same_weights():
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    before = model.get_weights()
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    for variable, start in zip(model.trainable_variables, before, strict=True):
        shards = variable.value.addressable_shards
        assert len(shards) == 2
        assert all(np.array_equal(shard.data, start) for shard in shards)


def test_a_moving_average_takes_the_mean_of_the_replicas(strategy):
    count, decay = strategy.num_replicas_in_sync, 0.25

    def step(average, value):
        mean = get_replica_context().all_reduce("MEAN", value)
        return average * decay + mean * (1 - decay)

    value = own(strategy, lambda replica: np.float32([1.0 + replica, 2.0 - replica]))
    found = strategy.run(step, (jnp.asarray([10.0, 11.0]), value))
    mean = np.array([1 + (count - 1) / 2, 2 - (count - 1) / 2])
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, np.array([10.0, 11.0]) * decay + mean * (1 - decay), rtol=1e-6)


def test_a_loop_passes_averages_of_weights_on(strategy):
    """An average with 0.8 of a weight that goes from 1 to 0.5 is 0.9."""

    def step(weight, average):
        weight = weight - get_replica_context().all_reduce("MEAN", jnp.asarray([0.5]))
        return weight, average * 0.8 + weight * 0.2

    weight = average = jnp.asarray([1.0])
    weight, average = strategy.run(step, (weight, average))
    assert (weight.tolist(), average.tolist()) == ([0.5], [pytest.approx(0.9)])


# --- loops with gradients, optimizers, metrics, models ------------------------------------------------------------------------------


def test_each_replica_has_the_gradient_of_its_rows(strategy):
    dataset = strategy.experimental_distribute_dataset([np.float32([5, 6]), np.float32([7, 8])])
    gradient = jax.grad(lambda x: (x**2).sum())
    compiled = jax.jit(lambda x: strategy.run(gradient, (x,)))
    for step in (lambda x: strategy.run(jax.jit(gradient), (x,)), compiled):
        assert [strategy.gather(step(x), axis=0).tolist() for x in dataset] == [[10.0, 12.0], [14.0, 16.0]]


def test_the_gradient_of_a_shared_variable_is_one_value():
    strategy = make()
    variable = keras.Variable(1.0)
    found = strategy.run(lambda x: jax.grad(lambda x: x * x)(x), (variable,))
    assert strategy.experimental_local_results(found) == (2.0,)


@pytest.mark.parametrize(
    ("kind", "aggregated", "expected"),
    [
        (make, True, [[-0.3, -0.3]]),
        (make, False, [[-0.1, -0.1], [-0.2, -0.2]]),
        (lambda: make(1), True, [[-0.1, -0.1]]),
        (lambda: make(1), False, [[-0.1, -0.1]]),
        (central, True, [[-0.3, -0.3]]),
    ],
)
def test_an_optimizer_applies_the_gradients_that_it_is_given(kind, aggregated, expected):
    strategy = kind()
    weight, optimizer = keras.Variable([0.0, 0.0]), keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def step(weights, state, gradient):
        if aggregated:
            gradient = get_replica_context().all_reduce("SUM", gradient)
        return optimizer.stateless_apply(state, [gradient], weights)

    gradient = own(strategy, lambda replica: np.full(2, replica + 1, "float32"))
    (found,), state = strategy.run(step, ([weight.value], [one.value for one in optimizer.variables], gradient))
    np.testing.assert_allclose(strategy.experimental_local_results(found), expected, rtol=1e-6)
    assert int(state[0]) == 1  # One step, however many replicas.


@pytest.mark.parametrize(("kind", "operation", "share"), [(make, "SUM", 0.5), (central, "MEAN", 1.0)])
def test_adam_takes_the_sum_or_mean_of_unequal_gradients(kind, operation, share):
    strategy, weight = kind(), keras.Variable(2.0)
    optimizer = keras.optimizers.Adam(0.01, beta_1=0.2, beta_2=0.2)
    optimizer.build([weight])
    values, state, found = [weight.value], [one.value for one in optimizer.variables], []

    def step(values, state):
        gradient = jax.grad(lambda value: share * (number() + 1) * value)(values[0])
        return optimizer.stateless_apply(state, [get_replica_context().all_reduce(operation, gradient)], values)

    for _ in range(2):
        values, state = strategy.run(step, (values, state))
        found.append([float(values[0]), *(float(one) for one in state[2:])])  # After the counter and the rate.
    np.testing.assert_allclose(found, [[1.99, 1.2, 1.8], [1.98, 1.44, 2.16]], rtol=1e-6)


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_a_loop_are_those_of_all_rows(strategy, rows, weighted):
    numbers = np.arange(10, dtype="float32")
    metrics = [keras.metrics.Mean(), keras.metrics.Mean()]
    values = [[one.value for one in metric.variables] for metric in metrics]

    def step(x):
        weights = 0 * x + 0.1 if weighted else None
        new = [
            metric.stateless_update_state([jnp.zeros(()), jnp.zeros(())], x, sample_weight=weights)
            for metric in metrics
        ]
        return get_replica_context().all_reduce("SUM", new)

    dataset = [numbers[start : start + rows] for start in range(0, 10, rows)]
    for batch in strategy.experimental_distribute_dataset(dataset):
        values = jax.tree.map(jnp.add, values, strategy.run(step, (batch,)))
    results = [float(metric.stateless_result(own)) for metric, own in zip(metrics, values, strict=True)]
    assert results == [pytest.approx(4.5)] * 2


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x, training=False):
        return self.dense(x)


def functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(4)(inputs))


def with_pictures():
    inputs = keras.Input((3, 3, 3))
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(layers.BatchNormalization()(inputs))))


MODELS = {
    "layer": (lambda: layers.Dense(4), (3,)),
    "functional": (functional, (3,)),
    "subclassed": (Own, (3,)),
    "normalized": (with_pictures, (3, 3, 3)),
    "recurrent": (lambda: keras.Sequential([layers.LSTM(4)]), (10, 1)),
}


def trained(name, nested=False):
    """31 rows in batches of 10 on two replicas: the last batch has one row, and one replica none."""
    build, shape = MODELS[name]
    strategy = make()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
        model(jnp.ones((1, *shape)))
    optimizer = keras.optimizers.RMSprop(0.01)
    optimizer.build(model.trainable_variables)

    def replica_step(trainable, others, x, y, rows):
        def loss(trainable):
            outputs, state = model.stateless_call(trainable, others, x, training=True)
            return lockstep.compute_average_loss(jnp.square(outputs - y).mean(axis=-1), global_batch_size=rows), state

        loss = jax.jit(loss) if nested else loss
        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        return *get_replica_context().all_reduce("SUM", (value, gradients)), state

    @jax.jit
    def step(trainable, others, variables, batch, rows):
        value, gradients, others = strategy.run(replica_step, (trainable, others, *batch, rows))
        trainable, variables = optimizer.stateless_apply(variables, gradients, trainable)
        return value, trainable, others, variables

    x = np.random.default_rng(0).normal(size=(31, *shape)).astype("float32")
    batches = [(x[start : start + 10], np.ones((min(10, 31 - start), 4), "float32")) for start in range(0, 31, 10)]
    kinds = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    values = [[variable.value for variable in kind] for kind in kinds]
    losses = []
    for (rows, _), batch in zip(batches, strategy.experimental_distribute_dataset(batches), strict=True):
        value, *values = step(*values, batch, len(rows))
        losses.append(float(value))
    return model, losses, values


@pytest.mark.parametrize("name", quick_first(MODELS))
def test_models_and_layers_train_in_a_loop(name):
    model, losses, (trainable, others, variables) = trained(name)
    assert np.isfinite(losses).all()
    assert int(variables[0]) == 4
    assert all(isinstance(leaf, jax.Array) and np.isfinite(leaf).all() for leaf in (*trainable, *others))
    assert any((new != old.value).any() for new, old in zip(trainable, model.trainable_variables, strict=True))


@pytest.mark.slow
def test_a_loss_that_is_compiled_by_itself_leads_to_the_same_weights():
    (_, losses, values), (_, expected_losses, expected) = trained("functional", nested=True), trained("functional")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (values, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_losses_of_rows_have_the_mean_over_all_of_them():
    strategy = make(3, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    x, y = np.random.default_rng(0).normal(size=(10, 4)).astype("float32"), np.arange(10)[:, None] % 3
    (batch,) = strategy.experimental_distribute_dataset([(x, y)])
    loss = strategy.run(lambda x, y: keras.losses.sparse_categorical_crossentropy(y, model(x)), batch)
    expected = np.mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))
    np.testing.assert_allclose(strategy.reduce("MEAN", loss, axis=0), expected, rtol=1e-5)


def test_a_function_of_arrays_is_a_model_too(strategy):
    """Neither layers nor models of Keras are needed: ten steps towards a weight of one."""

    @jax.jit
    def step(weight, x):
        def replica_step(weight, x):
            gradient = jax.grad(lambda weight: ((x * weight - x) ** 2).sum())(weight)
            return get_replica_context().all_reduce("MEAN", gradient)

        return weight - 0.2 * strategy.run(replica_step, (weight, x))

    weight = jnp.float32(3)
    (batch,) = strategy.experimental_distribute_dataset([np.ones(strategy.num_replicas_in_sync, "float32")])
    for _ in range(10):
        weight = step(weight, batch)
    assert abs(float(weight) - 1) < 0.05


@pytest.mark.parametrize("reduction", ["sum", "mean", "sum_over_batch_size"])
def test_a_reduction_of_the_loss_means_in_fit_what_it_means_on_one_device(reduction):
    def trained(kind):
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.001), keras.losses.MeanSquaredError(reduction=reduction))
        model.fit(np.float32([[2], [7]]), np.float32([[6], [21]]), verbose=0)
        return float(model.get_weights()[0][0, 0]), kind

    with make().scope():
        found, _ = trained("two replicas")
    expected = 1 + 0.001 * 4 * 53 / (1 if reduction == "sum" else 2)
    assert found == pytest.approx(expected, rel=1e-5)


# --- saving ----------------------------------------------------------------------------------------------------------------------


def saved_and_loaded(tmp_path, first, second):
    """Train under one, save the model with its optimizer and go on under the other; returns weights of both."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 4)).astype("float32"), rng.normal(size=(9, 1)).astype("float32")
    with first.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    with second.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in model, loaded:
        one.fit(x, y, shuffle=False, verbose=0)
    pairs = [(*one.get_weights(), *[np.asarray(v.value) for v in one.optimizer.variables]) for one in (model, loaded)]
    return pairs, loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [("none", "two"), ("two", "none"), ("two", "three on two"), ("two", "central"), ("central", "two")],
)
def test_a_model_and_its_optimizer_continue_under_another_strategy(tmp_path, first, second):
    kinds = STRATEGIES | {"none": lockstep.get_strategy}
    (ours, theirs), loaded = saved_and_loaded(tmp_path, kinds[first](), kinds[second]())
    assert int(loaded.optimizer.iterations) == 2
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_variable_is_made_of_a_saved_value(tmp_path):
    np.save(tmp_path / "saved.npy", np.ones(5))
    with make().scope():
        variable = keras.Variable(np.load(tmp_path / "saved.npy"))
    assert np.asarray(variable.value).tolist() == [1.0] * 5
    variable.assign(np.zeros(5))
    assert not np.asarray(variable.value).any()
