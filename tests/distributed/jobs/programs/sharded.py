"""Trains with variables whose shards are on the devices of all workers, and reads, sets, saves and resumes them."""

import contextlib
import functools
import shutil
from pathlib import Path

import keras
import numpy as np
from keras import layers

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from tests.distributed.jobs.program import config, digest, make_strategy, tell
from tests.laws.compare import stored_arrays

folder = Path(config["folder"])
x = np.random.default_rng(0).normal(size=(22, 12)).astype("float32")
y = np.arange(22) % 4
TWO_SHAPES = 22, 8  # rows and batch: of the last batch with 6 rows one of four replicas has none
ONE_SHAPE = 18, 6  # Each batch is like that, and all are one program.
WIDTH = 13  # which no number of devices divides: most shards are padded
REPLICAS = config.get("replicas", 4)
SHARDED = {"shard": config.get("shard", "variables")}
if SHARDED["shard"] == "variables":
    SHARDED["recompute"] = "blocks"


def build(deterministic=False, use_ema=False, made_in_scope=True, **options):
    """A compiled model; without options of the first worker alone."""
    keras.utils.set_random_seed(3)
    strategy = make_strategy(replicas=REPLICAS, deterministic=deterministic, **options)
    with strategy.scope() if made_in_scope else contextlib.nullcontext():
        hidden = [layers.Dense(WIDTH, activation="tanh", name=f"hidden_{number}") for number in range(3)]
        model = keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(4, name="last")])
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, use_ema=use_ema, clipnorm=1.0), loss, metrics=["accuracy"])
    return strategy, model


def fit(model, epochs, *callbacks, sizes=TWO_SHAPES):
    rows, batch = sizes
    data = {"x": x[:rows], "y": y[:rows], "validation_data": (x[:batch], y[:batch])}
    return model.fit(**data, batch_size=batch, epochs=epochs, callbacks=list(callbacks), verbose=0)


def bytes_here(model):
    """Of all variables on the first device, and the whole of all."""
    arrays = stored_arrays([*model.variables, *model.optimizer.variables])
    return [sum(array.addressable_shards[0].data.nbytes for array in arrays), sum(array.nbytes for array in arrays)]


def reads_and_sets(model):
    """A model whose weights are read and set, saved, loaded and trained on is the same as before, or as one that was not."""
    before = digest(model)
    weights = model.get_weights()
    model.set_weights([0 * value for value in weights])
    zeros = sum(float(np.abs(np.asarray(value)).sum()) for value in model.weights)
    model.set_weights(weights)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    with make_strategy(replicas=REPLICAS, **SHARDED).scope():
        loaded = keras.models.load_model(folder / "model.keras")
    model.load_weights(folder / "model.weights.h5")
    same = [digest(each) == before for each in (model, loaded)]
    rows, batch = ONE_SHAPE
    options = {"batch_size": batch, "shuffle": False, "verbose": 0}
    losses = [each.fit(x[:rows], y[:rows], **options).history["loss"] for each in (model, loaded)]
    return {
        "zeros": zeros,
        "same again": same,
        "trained on": losses[0] == losses[1],
    }


def resumed(model, run, save_freq):
    """The digest after four epochs, from a copy of a run's checkpoints."""
    directory = folder / f"resumed {config['index']}"  # Each worker has a disk of its own.
    if config["index"] == 0:  # Only the chief reads them.
        shutil.copytree(run, directory)
    fit(model, 4, BackupAndRestore(directory, save_freq=save_freq))
    return digest(model)


def parts(directory):
    """Number of the parts of the newest checkpoint of worker 0."""
    newest = CheckpointStore(directory).paths()[-1]
    return len(list(newest.glob("part-*")))


def tell_bits():
    """Train for two epochs, which leaves checkpoints, and for four, without shards."""
    for epochs, callbacks in ((2, [BackupAndRestore(folder / "whole", save_freq=2)]), (4, [])):
        model = build(deterministic=True)[1]
        fit(model, epochs, *callbacks)
        tell(**{f"bits of {epochs}": digest(model)})


def run_alone():
    """One process without shards: the same numbers, uninterrupted and from the checkpoints of the workers."""
    tell_bits()
    tell(resumed=resumed(build(deterministic=True)[1], config["run"], 2))
    tell(history=fit(build()[1], 3, sizes=ONE_SHAPE).history["loss"])


def run_workers():
    strategy, model = build(deterministic=True, **SHARDED)
    fit(model, 2, BackupAndRestore(folder / "run", save_freq=2))
    tell(bits=digest(model), bytes=bytes_here(model), layout=strategy.layout(model).device_bytes)
    again = build(deterministic=True, **SHARDED)[1]
    tell(resumed=resumed(again, folder / "run", "0.001 s"))  # The chief finds when it is time.
    tell(parts=[parts(folder / "run"), parts(folder / "resumed 0")])

    model = build(made_in_scope=False, **SHARDED)[1]
    logs = lockstep.callbacks.TensorBoard(folder / "logs", histogram_freq=1)
    tell(history=fit(model, 3, logs, sizes=ONE_SHAPE).history["loss"], read=len(model.get_weights()))
    model.save(folder / "made_before.keras")
    strategy, model = build(use_ema=True, **SHARDED)
    best = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    files = keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss", save_best_only=True)
    fit(model, 3, best, files, keras.callbacks.SwapEMAWeights(swap_on_epoch=True), sizes=ONE_SHAPE)
    tell(eager=run_eagerly(), **reads_and_sets(model), checked=len(strategy.self_check(model, x[:8], y[:8])))


def run_eagerly():
    """Not compiled, and with what is recomputed chosen by a function without a name."""
    options = SHARDED | ({"recompute": functools.partial(bool)} if "recompute" in SHARDED else {})
    model = build(**options)[1]
    model.run_eagerly = True
    return fit(model, 1, sizes=ONE_SHAPE).history["loss"]


def resume_whole():
    """Train with shards for two epochs, and resume checkpoints that were written without."""
    model = build(deterministic=True, **SHARDED)[1]
    fit(model, 2)
    tell(bits=digest(model))
    tell(resumed=resumed(build(deterministic=True, **SHARDED)[1], config["whole"], 2))


def use_alone():
    """Only the first worker uses the variables; the other trains on."""
    model = build(**SHARDED)[1]
    if config["index"] == 1:
        fit(model, 1)
    elif config["alone"] == "read":
        model.get_weights()
    elif config["alone"] == "compute":
        print(model.layers[1].kernel.value + 1)  # An odd size: the value is gathered.
    elif config["alone"] == "set":
        model.layers[0].set_weights([np.zeros((12, WIDTH)), np.zeros(WIDTH)])
    else:
        model.save(folder / "model.keras")


BackupAndRestore = lockstep.callbacks.BackupAndRestore
if "alone" in config:
    use_alone()
elif "whole" in config:
    resume_whole()
elif config.get("tells_bits"):
    tell_bits()
elif "run" in config:
    run_alone()
else:
    run_workers()
