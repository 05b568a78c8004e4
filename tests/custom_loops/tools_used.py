"""Results of the strategy's methods in a custom training loop: the same program for one process and for several."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import losses

import lockstep

# With 4 replicas the last one has none of 3 rows. Batch normalization of two rows would give 1 and -1 for nearly any weights, whose
# gradient is then nothing but rounding.
BATCHES = (16, 16, 3)


def data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(BATCHES), 5)).astype("float32"), rng.integers(0, 3, sum(BATCHES))
    ends = np.cumsum(BATCHES)
    return [(x[end - rows : end], y[end - rows : end]) for rows, end in zip(BATCHES, ends, strict=True)]


def own_batches(context):
    """One batch for each replica of each process; the last process has one round more than the others."""
    pipeline = context.input_pipeline_id
    rounds = 2 + (pipeline == context.num_input_pipelines - 1)
    per_round = context.num_replicas_in_sync // context.num_input_pipelines
    return [np.full((2, 1), 10 * pipeline + number, "float32") for number in range(rounds * per_round)]


def trained(strategy):
    """Weights and losses after two epochs, in a compiled step."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inner = keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
        model = keras.Sequential([keras.Input((5,)), *inner, keras.layers.Dense(3)])
    # Not Adam, which divides by the size of the gradient: it hides a wrong scale, and magnifies the rounding of a sum that nearly cancels.
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def replica_step(trainable, non_trainable, x, y, rows):
        def loss(trainable):
            logits, state = model.stateless_call(trainable, non_trainable, x, training=True)
            each = losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return lockstep.compute_average_loss(each, global_batch_size=rows), state

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        value, gradients = lockstep.get_replica_context().all_reduce("SUM", (value, gradients))
        return value, gradients, state

    @jax.jit
    def step(trainable, non_trainable, variables, batch, rows):
        args = trainable, non_trainable, *batch, rows
        value, gradients, state = strategy.run(replica_step, args=args)
        trainable, variables = optimizer.stateless_apply(variables, gradients, trainable)
        return value, trainable, state, variables

    kinds = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = [[variable.value for variable in kind] for kind in kinds]
    lost = []
    for _ in range(2):
        for rows, batch in zip(BATCHES, strategy.experimental_distribute_dataset(data()), strict=True):
            value, *state = step(*state, batch, rows)
            lost.append(value)
    return [np.asarray(value) for value in (*lost, *jax.tree.leaves(state))]


def brought_together(strategy):
    """What ``reduce``, ``gather`` and the context of a replica give, by name."""

    def on_replica(x):
        context = lockstep.get_replica_context()
        return {
            "sum": x.sum(axis=0),
            "rows": x.shape[0],
            "number": jnp.atleast_1d(context.replica_id_in_sync_group),
            "of all": context.all_reduce("MEAN", x.sum()),
            "merged": context.merge_call(lambda own, value: own.reduce("SUM", value, axis=None), args=(x.sum(),)),
        }

    found = {}
    for number, (x, _) in enumerate(strategy.experimental_distribute_dataset(data())):
        results = strategy.run(on_replica, args=(x,))
        found |= {
            f"{number} {name} summed": strategy.reduce("SUM", results[name], axis=None) for name in ("sum", "rows")
        }
        found[f"{number} mean of rows"] = strategy.reduce("MEAN", x, axis=0)
        found[f"{number} all rows"] = strategy.gather(x, axis=0)
        found[f"{number} numbers"] = strategy.gather(results["number"], axis=0)
        found |= {f"{number} {name}": results[name] for name in ("of all", "merged")}
    values = strategy.experimental_distribute_values_from_function(lambda own: np.float32(own.replica_id_in_sync_group))
    found["values"] = strategy.reduce("SUM", values, axis=None)
    return {name: np.asarray(value) for name, value in found.items()}


def drawn(strategy):
    """The rows of each batch that the processes draw for themselves, by replica."""
    batches = strategy.distribute_datasets_from_function(own_batches)
    return [np.asarray(strategy.gather(batch, axis=0)).ravel().tolist() for batch in batches]


def padded(strategy):
    """Sums of batches of other lengths on each replica, as padded texts have them."""
    all_lengths = 5, 7, 6, 9, 5, 5, 5, 5

    def batches(context):
        count = context.num_replicas_in_sync // context.num_input_pipelines
        for start in range(0, len(all_lengths), context.num_replicas_in_sync):
            first = start + count * context.input_pipeline_id
            yield from (np.ones((2, length), "int32") for length in all_lengths[first : first + count])

    found = strategy.distribute_datasets_from_function(batches)
    totals = [strategy.run(lambda x: jnp.atleast_1d(x.sum()), (batch,)) for batch in found]
    return [np.asarray(strategy.gather(total, axis=0)).tolist() for total in totals]


def left_and_read_on(strategy):
    """The rows of a loop that is left and of the next one, from generators whose batches differ from process to process."""
    first = strategy.num_replicas_in_sync

    def batches(context):
        count = context.num_replicas_in_sync // context.num_input_pipelines
        for turn in range(8):
            numbers = range(count * context.input_pipeline_id, count * (context.input_pipeline_id + 1))
            yield from (np.full((1 + number % 2,), first * turn + number) for number in numbers)

    data = strategy.distribute_datasets_from_function(batches)
    loops = [[batch for _, batch in zip(range(2), data, strict=False)] for _ in range(2)]
    return [np.asarray(strategy.gather(batch, axis=0)).tolist() for batches in loops for batch in batches]


def dtypes(strategy):
    """The dtypes of bfloat16 rows times numbers of Python, which JAX gives the dtype of the rows."""
    (rows,) = strategy.experimental_distribute_dataset([np.ones(8, jnp.bfloat16)])
    found = strategy.run(lambda x, rate, count: (x * rate, x * count), (rows, 0.5, 3))
    return [str(value.groups[0].dtype) for value in found]
