"""The last worker is different in one thing after the other; what each worker is told of it."""

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

ODD = int(config["index"] == config["workers"] - 1)
x, y = np.ones((16, 2), "float32"), np.ones((16, 1), "float32")


def told(work):
    try:
        work()
    except lockstep.ClusterError as error:
        return str(error)
    return None


def made(units=3, activation="tanh", rate=0.1, loss="mse", change=0.0):
    with strategy.scope():
        keras.backend.clear_session(free_memory=False)
        layers = [keras.layers.Dense(units, activation=activation), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(keras.optimizers.SGD(rate), loss)
    model.layers[-1].bias.assign([change])
    return model


def fitted(model, **options):
    return told(lambda: model.fit(x, y, **{"batch_size": 8, "epochs": 1, "verbose": 0, **options}))


tell(replicas=told(lambda: make_strategy(replicas=config["workers"] * (1 + ODD))))
packs = lockstep.CommunicationOptions(80 * (1 + ODD), config["timeout"], "RING")
tell(packs=told(lambda: make_strategy(communication_options=packs)))
keras.utils.set_random_seed(1 + ODD)
tell(seed=told(make_strategy))
keras.utils.set_random_seed(1)
np.random.normal(size=ODD)  # One number more.
tell(drawn=told(make_strategy))
keras.utils.set_random_seed(1)
strategy = make_strategy()

tell(
    layer=fitted(made(units=3 + ODD)),
    activation=fitted(made(activation="relu" if ODD else "tanh")),
    rate=fitted(made(rate=0.1 + ODD)),
    loss=fitted(made(loss="mae" if ODD else "mse")),
    weights=fitted(made(change=float(ODD))),
)
model = made()
tell(
    epochs=fitted(model, epochs=1 + ODD),
    batch_size=fitted(model, batch_size=6 + ODD),  # 3 batches of 6, 6, 4 or of 7, 7, 2 rows
    steps=fitted(model, steps_per_epoch=1 + ODD),
    call=told(lambda: (model.evaluate if ODD else model.fit)(x, y, batch_size=8, verbose=0)),
)
model.layers[-1].bias.assign([float(ODD)])
tell(
    evaluate=told(lambda: model.evaluate(x, y, verbose=0)),
    predict=told(lambda: model.predict(x, verbose=0)),
)
model.layers[-1].bias.assign([0.0])
tell(
    train_on_batch=told(lambda: model.train_on_batch(x + ODD, y)),
    test_on_batch=told(lambda: model.test_on_batch(x, y, sample_weight=y[:, 0] + ODD)),
    predict_on_batch=told(lambda: model.predict_on_batch(x + ODD)),
    self_check=told(lambda: strategy.self_check(model, x + ODD, y)),
    doctor=told(lambda: strategy.doctor(model, x, y, batch_size=8 + ODD)),
)
tell(nothing=fitted(model))
