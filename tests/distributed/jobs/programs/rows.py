"""Counts on which replica each row was, for every kind of input; then gives the workers different data, and goes on."""

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

ROWS, BATCH, EPOCHS = 37, 8, 2
STEPS = -(-ROWS // BATCH)
ODD = int(config["index"] == config["workers"] - 1)  # This one will read something else.


class Seen(keras.layers.Layer):
    """Counts how often each row, by its number, has come to a replica. These add up, so a row that two replicas had counts 2."""

    def build(self, shape):
        self.counts = self.add_weight(
            shape=(ROWS,), initializer="zeros", trainable=False, aggregation="sum", name="counts"
        )

    def call(self, x, training=False):
        if training:
            rows = keras.ops.one_hot(keras.ops.cast(x[:, 0], "int32"), ROWS)
            self.counts.assign_add(keras.ops.sum(rows, axis=0))
        return x / ROWS


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        return batch(number)


def batch(number):
    return x[number * BATCH : (number + 1) * BATCH], y[number * BATCH : (number + 1) * BATCH]


def generator(batches=STEPS * EPOCHS, order=range(STEPS)):
    for number in range(batches):
        yield batch(order[number % STEPS])


def step_function(step):
    return batch(step) if step < STEPS else None


def counted(**given):
    """For each epoch how often each row came by."""
    epochs, previous = [], np.asarray(seen.counts.value)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(np.asarray(seen.counts.value)))
    model.fit(**given, epochs=EPOCHS, callbacks=[note], verbose=0)
    return [(now - before).tolist() for before, now in zip([previous, *epochs], epochs, strict=False)]


def refused(**given):
    try:
        model.fit(**{"epochs": EPOCHS, "verbose": 0, **given})
    except lockstep.ClusterError as error:
        return str(error)
    return None


strategy = make_strategy()
x, y = np.arange(ROWS, dtype="float32")[:, None], np.ones((ROWS, 1), "float32")
with strategy.scope():
    seen = Seen()
    model = keras.Sequential([keras.Input((1,)), seen, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")

tell(
    arrays=counted(x=x, y=y, batch_size=BATCH),
    generator=counted(x=generator(), steps_per_epoch=STEPS),
    dataset=counted(x=Batches(workers=2)),
    function=counted(x=step_function),
    weights=np.asarray(model.layers[-1].kernel.value).tolist(),
)
tell(
    other_rows=refused(x=x + ODD, y=y, batch_size=BATCH),
    other_order=refused(x=generator(order=[0, 2, 1, 3, 4] if ODD else range(STEPS)), steps_per_epoch=STEPS),
    fewer_batches=refused(x=x[: ROWS - BATCH * ODD], y=y[: ROWS - BATCH * ODD], batch_size=BATCH),
    fewer_of_a_generator=refused(x=generator(STEPS * EPOCHS - 4 * ODD), epochs=1),
    more_of_a_function=refused(x=lambda step: batch(step % STEPS) if step < 6 + ODD else None, epochs=1),
    fewer_rows=refused(x=x[: ROWS - ODD], y=y[: ROWS - ODD], batch_size=BATCH, shuffle=False),
    fewer_rows_of_a_function=refused(
        x=lambda step: tuple(part[: BATCH - ODD * (step == 4)] for part in batch(0)) if step < 6 else None, epochs=1
    ),
    fewer_validation_batches=refused(
        x=x, y=y, batch_size=BATCH, validation_data=(x[: ROWS - BATCH * ODD], y[: ROWS - BATCH * ODD])
    ),
    other_validation=refused(x=x, y=y, batch_size=BATCH, validation_data=(x + ODD, y)),
)
tell(
    again=counted(x=x, y=y, batch_size=BATCH),
    line=[value.ravel().tolist()[0] for value in model.layers[-1].get_weights()],
    rows=model.predict(x, batch_size=BATCH, verbose=0).ravel().tolist(),
)
