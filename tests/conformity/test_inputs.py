"""Inputs, clusters and partitioners: what the tests of TensorFlow hold, and no other test here does."""

import json

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import lockstep
from lockstep._array_encoding import ArraySpec
from lockstep.cluster_resolver import (
    ClusterSpec,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from lockstep.parameter_server.sharding import plan_shards
from lockstep.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner


@pytest.fixture(scope="module")
def strategy():
    return lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=2)


@pytest.fixture(params=[1, 2, 3], ids=lambda replicas: f"R{replicas}")
def any_strategy(request):
    return lockstep.MirroredStrategy(["cpu:0", "cpu:1"][: request.param], replicas=request.param)


def distributed(strategy, *batches):
    return strategy.experimental_distribute_dataset([np.asarray(batch, "float32") for batch in batches])


def own(strategy, *batches):
    """Each replica draws one of the batches."""
    return strategy.distribute_datasets_from_function(lambda context: list(batches))


def of_replicas(strategy, value):
    return [np.asarray(each).tolist() for each in strategy.experimental_local_results(value)]


def flat(strategy, value):
    return np.concatenate([np.atleast_1d(each) for each in strategy.experimental_local_results(value)]).tolist()


# --- passes and iterators -----------------------------------------------------


WAYS = {
    "as it is": lambda strategy: lambda batch: strategy.run(jnp.square, args=(batch,)),
    "step compiled": lambda strategy: lambda batch: strategy.run(jax.jit(jnp.square), args=(batch,)),
    "run compiled": lambda strategy: jax.jit(lambda batch: strategy.run(jnp.square, args=(batch,))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("last", [[7.0, 8.0], [7.0]])
def test_replicas_square_their_rows_wherever_the_step_is_compiled(any_strategy, way, last):
    step = WAYS[way](any_strategy)
    found = [flat(any_strategy, step(batch)) for batch in distributed(any_strategy, [5, 6], last)]
    assert found == [[25.0, 36.0], [each**2 for each in last]]


@pytest.mark.parametrize("rows", [8, 16])
def test_a_loop_asks_for_optional_batches_until_there_is_none(any_strategy, rows):
    iterator = iter(distributed(any_strategy, *np.arange(rows).reshape(-1, 2)))
    found = []
    for _ in range(6):
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            break
        found += flat(any_strategy, any_strategy.run(lambda x: x, args=(batch.get_value(),)))
    assert found == list(range(min(rows, 12)))


def test_an_empty_data_set_has_no_optional_batch_and_no_other(strategy):
    dataset = distributed(strategy)
    assert not iter(dataset).get_next_as_optional().has_value()
    assert list(dataset) == []


def test_two_passes_over_one_data_set_do_not_disturb_each_other(strategy):
    dataset = distributed(strategy, [0, 1], [2, 3])
    one, other = iter(dataset), iter(dataset)
    assert [flat(strategy, next(each)) for each in (one, other, one, other)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_an_iterator_gives_the_batches_that_are_left_to_a_loop(any_strategy):
    iterator = iter(distributed(any_strategy, *np.arange(10).reshape(5, 2)))
    assert flat(any_strategy, iterator.get_next()) == [0, 1]
    assert [flat(any_strategy, batch) for batch in iterator] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_two_loops_over_one_data_set_in_a_step_see_it_twice(any_strategy):
    dataset = distributed(any_strategy, [5, 6], [7, 8])
    product = 2.0
    for batch in dataset:
        product *= float(any_strategy.reduce("MEAN", batch, axis=0))
    steps = sum(1 for batch in dataset if any_strategy.run(jnp.sum, (batch,)) is not None)
    assert (product, steps) == (2 * 5.5 * 7.5, 2)


def test_the_end_of_a_pass_is_told_again_and_again_and_all_rows_came_before(any_strategy):
    iterator, total = iter(distributed(any_strategy, [5, 6], [7, 8])), 0.0
    for _ in range(2):
        sums = any_strategy.run(jnp.sum, (iterator.get_next(),))
        total += float(any_strategy.reduce("SUM", sums, axis=None))
    for _ in range(2):
        with pytest.raises(StopIteration):
            iterator.get_next()
    assert total == 26.0


def test_rows_of_named_columns_add_up_over_uneven_batches(any_strategy):
    rows = np.arange(10, dtype="float32") ** 2
    total = 0.0
    for batch in any_strategy.experimental_distribute_dataset([{"y": rows[i : i + 4]} for i in range(0, 10, 4)]):
        sums = any_strategy.run(lambda data: data["y"].sum(), (batch,))
        total += float(any_strategy.reduce("SUM", sums, axis=None))
    assert total == 285.0


class Shuffled(keras.utils.PyDataset):
    """Twelve rows in an order of its own, another one after each pass if that is asked for."""

    def __init__(self, reshuffle):
        super().__init__()
        self.random, self.reshuffle = np.random.default_rng(0), reshuffle
        self.order = self.random.permutation(12)

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return self.order[4 * number : 4 * number + 4]

    def on_epoch_end(self):
        if self.reshuffle:
            self.order = self.random.permutation(12)


@pytest.mark.parametrize("reshuffle", [False, True])
def test_a_second_pass_has_another_order_only_where_the_input_shuffles_again(any_strategy, reshuffle):
    dataset = any_strategy.experimental_distribute_dataset(Shuffled(reshuffle))
    first, second = ([flat(any_strategy, batch) for batch in dataset] for _ in range(2))
    assert sorted(np.ravel(first)) == sorted(np.ravel(second)) == list(range(12))
    assert (first == second) is not reshuffle


def test_a_compiled_step_is_traced_once_for_passes_of_one_shape(strategy):
    dataset, traces = distributed(strategy, *np.arange(10).reshape(5, 2)), []

    @jax.jit
    def step(batch):
        traces.append(1)
        return strategy.reduce("SUM", batch, axis=0)

    assert [sum(float(step(batch)) for batch in dataset) for _ in range(3)] == [45.0] * 3
    assert len(traces) == 1


def test_a_batch_is_not_taken_by_a_function_of_replicas(strategy):
    iterator = iter(distributed(strategy, [0, 1], [2, 3]))
    with pytest.raises(lockstep.ScopeError, match="asked for the next batch of a distributed data set"):
        strategy.run(lambda batches: next(batches), args=(iterator,))


@pytest.mark.parametrize("way", ["experimental_distribute_dataset", "distribute_datasets_from_function"])
def test_options_of_another_class_are_refused(strategy, way):
    with pytest.raises(lockstep.OptionError, match=r"options: expected a lockstep\.InputOptions or None"):
        getattr(strategy, way)(lambda given: [np.ones(1)], options=object())


# --- how rows fall to replicas -----------------------------------------------------


def test_batches_are_split_and_stay_whole_over_many_steps(strategy):
    found = [of_replicas(strategy, batch) for batch in distributed(strategy, *np.arange(100).reshape(10, 10))]
    assert found == [[list(range(i, i + 5)), list(range(i + 5, i + 10))] for i in range(0, 100, 10)]


def test_pairs_of_columns_stay_together(strategy):
    rows = [np.asarray([i, i + 1]) for i in range(0, 10, 2)]
    pairs = strategy.experimental_distribute_dataset([(batch, batch**2) for batch in rows])
    alone = strategy.distribute_datasets_from_function(
        lambda context: [(np.asarray([i]), np.asarray([i**2])) for i in range(10)]
    )
    expected = [[([i], [i**2]), ([i + 1], [(i + 1) ** 2])] for i in range(0, 10, 2)]
    for dataset in (pairs, alone):
        found = [[*zip(*(of_replicas(strategy, column) for column in batch), strict=True)] for batch in dataset]
        assert found == expected


def test_a_full_batch_of_named_columns_has_equal_shapes_on_all_replicas(any_strategy):
    replicas = any_strategy.num_replicas_in_sync
    batch = {"feature": np.ones((6, 10)), "label": np.ones(6)}
    (found,) = any_strategy.experimental_distribute_dataset([batch])
    shapes = {name: [each.shape for each in value.values] for name, value in found.items()}
    assert shapes == {"feature": [(6 // replicas, 10)] * replicas, "label": [(6 // replicas,)] * replicas}


def test_what_is_nested_comes_back_nested(strategy):
    (batch,) = distributed(strategy, [0, 1])
    (found,) = strategy.run(lambda x: [{"a": x - 1, "b": x + 1}], args=(batch,))
    assert {name: of_replicas(strategy, value) for name, value in found.items()} == {
        "a": [[-1.0], [0.0]],
        "b": [[1.0], [2.0]],
    }


def test_columns_keep_their_structure_in_a_compiled_step(any_strategy):
    x, y = np.full((10, 2), 5.0), np.full((10, 3), 6.0)
    given = [(x[i : i + 2], {"wide": y[i : i + 2]}) for i in range(0, 10, 2)]
    step = jax.jit(lambda batch: any_strategy.run(lambda batch: batch, (batch,)))
    for batch in any_strategy.experimental_distribute_dataset(given):
        narrow, named = step(batch)
        assert flat(any_strategy, narrow) == [[5.0] * 2] * 2
        assert flat(any_strategy, named["wide"]) == [[6.0] * 3] * 2


UNEVEN = {
    "mean of its rows": ([5.0, 6.0, 7.0], jnp.mean, [5.5, 7.0]),
    "number of rows": ([5.0, 6.0, 7.0], lambda x: x.size, [2, 1]),
    "weighted mean": ([5.0, 6.0, 7.0], lambda x: (x * jnp.ones_like(x)).sum() / jnp.ones_like(x).sum(), [5.5, 7.0]),
    "masked sum": ([5.0, 6.0, 7.0], lambda x: jnp.where(x == 6, 0, x).sum(), [5.0, 7.0]),
    "no row for the last": ([5.0], lambda x: x + x, [[10.0], []]),
    "fixed shape beside rows": ([5.0], lambda x: jnp.zeros(3) + 0 * x.sum(), [[0.0] * 3] * 2),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_a_replica_computes_on_its_true_rows_of_an_uneven_batch(strategy, case):
    rows, step, expected = UNEVEN[case]
    (batch,) = distributed(strategy, rows)
    assert of_replicas(strategy, strategy.run(step, (batch,))) == expected


def test_whole_numbers_double_on_a_replica_with_one_row_and_on_one_with_none(strategy):
    (batch,) = strategy.experimental_distribute_dataset([np.asarray([5])])
    assert of_replicas(strategy, strategy.run(lambda x: x + x, (batch,))) == [[10], []]


@pytest.mark.parametrize("number", [2**31, 2**40, -(2**33) - 1])
def test_large_whole_numbers_are_refused(strategy, number):
    dataset = strategy.experimental_distribute_dataset([np.asarray([number, 1])])
    with pytest.raises(lockstep.InputError, match=f"int32 numbers, .*; got {number} to {number}"):
        next(iter(dataset))


@pytest.mark.parametrize(("rows", "mean"), [([5, 6, 7], 6.0), ([[1, 1]] * 3, [1.0, 1.0]), ([4], 4.0)])
def test_a_mean_over_rows_counts_each_row_once(any_strategy, rows, mean):
    (batch,) = distributed(any_strategy, rows)
    assert np.asarray(any_strategy.reduce("MEAN", batch, axis=0)).tolist() == mean
    taken_in_a_step = jax.jit(lambda batch: any_strategy.reduce("MEAN", batch, axis=0))(batch)
    assert np.asarray(taken_in_a_step).tolist() == mean


SHAPES = {
    "as many sums as rows": (jnp.int32, (), lambda x: jnp.zeros(x.shape[0]).at[x].add(1), [(3,), (2,)]),
    "tiled and reshaped": (
        jnp.int32,
        (1, 2),
        lambda x: jnp.tile(x, [1, x.shape[0], 1]).reshape(-1, 2).reshape(x.shape[0], -1, 2),
        [(3, 3, 2), (2, 2, 2)],
    ),
    "an embedding row by row": (
        jnp.int32,
        (4,),
        lambda x: jax.lax.map(lambda row: jnp.zeros((1, 5))[row], x),
        [(3, 4, 5), (2, 4, 5)],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_that_follow_the_rows_differ_between_replicas(strategy, case):
    dtype, shape, step, expected = SHAPES[case]
    (batch,) = own(strategy, *(np.zeros((rows, *shape), dtype) for rows in (3, 2)))
    assert [each.shape for each in strategy.experimental_local_results(strategy.run(step, (batch,)))] == expected


@pytest.mark.parametrize("widths", [(2, 3), (3, 2)])
def test_own_batches_may_differ_in_every_axis(strategy, widths):
    (batch,) = own(strategy, *(np.tile(np.arange(1.0, width + 1), (2, 1)) for width in widths))
    assert of_replicas(strategy, strategy.run(jnp.mean, (batch,))) == [(width + 1) / 2 for width in widths]


# --- where values lie, own batches -----------------------------------------------------


PLACED = {
    "a batch": lambda strategy: next(iter(distributed(strategy, [5, 6]))),
    "own batches": lambda strategy: next(iter(own(strategy, np.ones(2), np.ones(2)))),
    "without reading ahead": lambda strategy: next(
        iter(
            strategy.distribute_datasets_from_function(
                lambda context: [np.ones(1)] * 2, lockstep.InputOptions(prefetch=0)
            )
        )
    ),
    "values of replicas": lambda strategy: strategy.experimental_distribute_values_from_function(lambda context: 1.0),
    "results": lambda strategy: strategy.run(jnp.square, args=(next(iter(distributed(strategy, [5, 6]))),)),
}


@pytest.mark.parametrize("kind", PLACED)
def test_each_value_lies_on_the_device_of_its_replica(strategy, kind):
    found = strategy.experimental_local_results(PLACED[kind](strategy))
    assert [each.devices() for each in found] == [{device} for device in jax.local_devices()[:2]]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", [8, 9])
def test_replicas_draw_in_turn_and_the_last_one_may_go_without(strategy, prefetch, rows):
    batches = [np.arange(rows)[start : start + 2] for start in range(0, rows, 2)]
    options = lockstep.InputOptions(prefetch=prefetch)
    dataset = strategy.distribute_datasets_from_function(lambda context: batches, options)
    expected = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]][: len(batches) // 2 + rows % 2]
    assert [of_replicas(strategy, batch) for batch in dataset] == expected


def test_a_function_that_makes_a_data_set_is_asked_once_for_all_passes(strategy):
    asked = []
    dataset = strategy.distribute_datasets_from_function(lambda context: asked.append(context) or [np.ones(1)] * 4)
    assert [len(list(dataset)) for _ in range(2)] == [2, 2]
    assert asked == [lockstep.InputContext(1, 0, 2)]


def test_a_value_from_outside_is_the_same_for_all_replicas(any_strategy):
    variable = keras.Variable(1.0)
    batches = iter(own(any_strategy, *[np.asarray([2.0]), np.asarray([3.0])] * 5))
    step = lambda rows: (rows**2 + variable.value)[0]  # noqa: E731
    means = [float(any_strategy.reduce("MEAN", any_strategy.run(step, (next(batches),)), axis=None)) for _ in range(2)]
    expected = {1: [5.0, 10.0], 2: [7.5, 7.5], 3: [(5 + 10 + 5) / 3, (10 + 5 + 10) / 3]}
    np.testing.assert_allclose(means, expected[any_strategy.num_replicas_in_sync], rtol=1e-6)


def test_an_input_context_knows_its_place_and_the_rows_of_a_replica():
    context = lockstep.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="do not divide"):
        context.get_per_replica_batch_size(13)
    assert all(str(number) in str(context) for number in (2, 1, 6))


# --- clusters -----------------------------------------------------


SERVERS, WORKERS = ["p0:2222", "p1:2222"], ["w0:2222", "w1:2222", "w2:2222"]
JOBS = {"ps": SERVERS, "worker": WORKERS}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"worker": ["a:1"]}, {"worker": ["a:1"]}, True),
        ({"worker": {0: "a:1"}}, {"worker": ["a:1"]}, True),
        ({"worker": ["a:1"]}, {"worker": ["a:2"]}, False),
        ({"worker": ["a:1"]}, {"ps": ["a:1"]}, False),
        ({"worker": ["a:1", "a:2"]}, {"worker": ["a:2", "a:1"]}, False),
        ({"worker": {1: "a:1"}}, {"worker": ["a:1"]}, False),
    ],
)
def test_clusters_are_equal_where_every_task_has_one_address_in_both(one, other, equal):
    assert (ClusterSpec(one) == ClusterSpec(other)) is equal
    assert (ClusterSpec(one) != ClusterSpec(other)) is not equal
    assert bool(ClusterSpec(one))


def test_a_cluster_made_of_another_or_of_its_dict_is_the_same():
    for jobs in (JOBS, {"ps": SERVERS, "worker": {0: "w0:2222", 2: "w2:2222"}}):
        spec = ClusterSpec(jobs)
        assert spec == ClusterSpec(spec) == ClusterSpec(spec.as_dict()) == jobs


@pytest.mark.parametrize("ask", ["num_tasks", "task_indices", "job_tasks"])
def test_an_unknown_job_is_an_error_of_every_question(ask):
    with pytest.raises(lockstep.ClusterError, match="there is no job 'chief'; there are: ps, worker"):
        getattr(ClusterSpec(JOBS), ask)("chief")
    with pytest.raises(lockstep.ClusterError, match="there is no job 'chief'"):
        ClusterSpec(JOBS).task_address("chief", 0)


def of_config(task=("ps", 0), arguments=(), **others):
    job, index = task
    config = {"cluster": JOBS, "task": {"type": job, "index": index}, **others}
    return TFConfigClusterResolver(*arguments, environ={"TF_CONFIG": json.dumps(config)})


def test_tf_config_tells_the_cluster_and_the_task():
    resolver = of_config(rpc_layer="grpc")
    assert resolver.cluster_spec() == JOBS
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "grpc")


@pytest.mark.parametrize(
    ("resolver", "asked", "master"),
    [
        (of_config(), (), "p0:2222"),
        (of_config(), ("worker", 1), "w1:2222"),
        (of_config(rpc_layer="grpc"), (), "grpc://p0:2222"),
        (of_config(("ps", 1), ("ps", 0), rpc_layer="grpc"), (), "grpc://p0:2222"),
        (of_config(("ps", "1")), (), "p1:2222"),
        (SimpleClusterResolver(JOBS, task_type="worker", task_id=1, environ={}), ("worker", 2), "w2:2222"),
        (
            SimpleClusterResolver(JOBS, task_type="worker", task_id=1, environ={}),
            ("worker", 0, "grpc"),
            "grpc://w0:2222",
        ),
        (SimpleClusterResolver({"worker": ["a:1"]}, environ={}), (), ""),
    ],
)
def test_a_master_is_the_address_of_the_task_that_is_asked_for(resolver, asked, master):
    assert resolver.master(*asked) == master


def test_a_master_that_tf_config_names_comes_first():
    assert of_config(session_master="m:2222").master() == "m:2222"


def test_what_is_said_of_this_process_is_what_the_resolver_answers():
    resolver = SimpleClusterResolver(
        ClusterSpec(JOBS), "", "ps", 1, environment="cloud", num_accelerators={"GPU": 8}, rpc_layer="grpc", environ={}
    )
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.num_accelerators() == {"GPU": 8}


SRUN = {
    "SLURM_JOB_ID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
}


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({"NODELIST": "t02n13,t02n41,t02n43", "TASKS_PER_NODE": "1(x3)"}, ["t02n13", "t02n41", "t02n43"]),
        ({"NODELIST": "n[1-2],m5", "TASKS_PER_NODE": "1(x3)"}, ["n1", "n2", "m5"]),
        ({"NODELIST": "n[0009-0010],o7", "TASKS_PER_NODE": "1,1,1"}, ["n0009", "n0010", "o7"]),
    ],
)
def test_srun_tells_the_addresses_of_all_tasks(variables, hosts):
    step = {f"SLURM_STEP_{name}": value for name, value in variables.items()}
    resolver = SlurmClusterResolver({**SRUN, **step, "SLURM_NODEID": "1", "LOCKSTEP_PORT": "8888"})
    assert resolver.cluster_spec() == {"worker": [f"{host}:8888" for host in hosts]}
    assert resolver.master("worker", 0, rpc_layer="grpc") == f"grpc://{hosts[0]}:8888"
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_a_pod_finds_the_address_of_any_other():
    pod = {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "3", "JOB_NAME": "train", "SERVICE_NAME": "pods"}
    resolver = KubernetesClusterResolver(pod)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "train-0.pods:12421"
    assert resolver.master("worker", 2, "grpc") == "grpc://train-2.pods:12421"


# --- variables on servers -----------------------------------------------------


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(num_shards=2), (10, 3), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=10), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
    ],
)
def test_partitioners_give_the_shards_that_tensorflow_gives(partitioner, shape, expected):
    assert list(partitioner(shape, "float32")) == expected


@pytest.mark.parametrize(
    ("shape", "partitioner", "expected"),
    [
        ((5, 2), FixedShardsPartitioner(2), {0: [[0, 1], [2, 3], [4, 5]], 1: [[6, 7], [8, 9]]}),
        ((6, 1), FixedShardsPartitioner(2), {0: [[0], [1], [2]], 1: [[3], [4], [5]]}),
        ((3,), FixedShardsPartitioner(4), {0: [0], 1: [1], 2: [2]}),
        ((10,), FixedShardsPartitioner(4), {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7], 3: [8, 9]}),
        ((10,), MinSizePartitioner(64 << 20, 2), {0: list(range(10))}),
        ((4,), None, {0: [0, 1, 2, 3]}),
    ],
)
def test_shards_hold_the_rows_of_the_variable_in_order(shape, partitioner, expected):
    made = plan_shards([ArraySpec("table", shape, "int32")], 2, partitioner)
    values = np.arange(np.prod(shape)).reshape(shape)
    parts = made.split({"table": values})
    shards = made.shards["table"]
    assert {i: parts[shard.server][shard.spec.name].tolist() for i, shard in enumerate(shards)} == expected
    assert [shard.server for shard in shards] == [i % 2 for i in range(len(shards))]


def test_variables_go_to_one_server_after_the_other():
    made = plan_shards([ArraySpec(name, (), "float32") for name in "abcd"], 3)
    assert {name: [shard.server for shard in shards] for name, shards in made.shards.items()} == {
        "a": [0],
        "b": [1],
        "c": [2],
        "d": [0],
    }


@pytest.mark.parametrize("partitions", [None, 2])
def test_a_partitioner_that_gives_no_list_is_refused(partitions):
    with pytest.raises(lockstep.OptionError, match="variable_partitioner"):
        plan_shards([ArraySpec("table", (2, 2), "float32")], 2, lambda shape, dtype: partitions)
