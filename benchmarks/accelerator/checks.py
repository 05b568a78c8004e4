"""The parts that compare: each yields findings with a limit."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import keras
import numpy as np

import lockstep
from accelerator.common import ROWS, UNEVEN, Finding, device_names, difference, digest, replicas_on_one, trained
from accelerator.nets import compiled
from lockstep.devices.xla_flags import describe_determinism
from lockstep.distributed.cluster.env_reader import visible_gpus


def numbers(small):
    """Law 1: the weights of plain Keras, for 1, 2 and 4 replicas of one device, with an uneven last batch."""
    jax.config.update("jax_default_matmul_precision", "highest")  # not the rounding of TF32 or bfloat16
    for net in ("MLP", "LM"):
        plain = trained(net, small, optimizer="sgd")
        for replicas in (1, 2, 4):
            found = trained(net, small, replicas_on_one(replicas), optimizer="sgd")
            yield Finding(
                f"{net}, {replicas} replicas: relative difference from plain Keras", difference(found, plain), 1e-4
            )
        found = trained(net, small, replicas_on_one(4, deterministic=True), optimizer="sgd")
        yield Finding(f"{net}, 4 replicas, deterministic: relative difference", difference(found, plain), 1e-4)


def bits(small):
    """Law 2: equal bits from run to run, and on 1, 2 and 4 devices where there are so many."""
    for net in ("MLP", "CNN", "LM"):
        found = {}
        for count in (1, 1, 2, 4):
            if count <= jax.local_device_count():
                strategy = lockstep.MirroredStrategy(device_names(count), replicas=4, deterministic=True)
                found.setdefault(count, []).append(digest(trained(net, small, strategy, epochs=1)))
        yield Finding(f"{net}: what the strategy says of its bits", describe_determinism(jax.local_devices()[0]))
        distinct = len({one for runs in found.values() for one in runs})
        yield Finding(
            f"{net}: distinct results of {sum(map(len, found.values()))} runs on {list(found)} devices", distinct, 1
        )


def inputs(small):
    """Every kind of input gives the weights of arrays."""

    class Batches(keras.utils.PyDataset):
        def __init__(self, x, y):
            super().__init__()
            self.data = x, y

        def __len__(self):
            return -(-len(self.data[0]) // ROWS)

        def __getitem__(self, number):
            return tuple(part[number * ROWS : (number + 1) * ROWS] for part in self.data)

    def generated(x, y):
        batches = Batches(x, y)
        return (batches[number] for _ in range(2) for number in range(len(batches)))

    kinds = {
        "PyDataset": lambda x, y: (Batches(x, y),),
        "arrays of JAX": lambda x, y: (jax.numpy.asarray(x), jax.numpy.asarray(y)),
        "arrays on the device": lambda x, y: (jax.device_put(x, jax.local_devices()[0]), y),
    }
    options = {"optimizer": "sgd", "rows": 3 * ROWS + 3}
    arrays = fitted(small, lambda x, y: (x, y), **options)
    for kind, data in kinds.items():
        yield Finding(
            f"{kind}: relative difference from arrays", difference(fitted(small, data, **options), arrays), 1e-5
        )
    found = fitted(small, lambda x, y: (generated(x, y),), steps=4, **options)
    yield Finding("generator: relative difference from arrays", difference(found, arrays), 1e-5)
    cached = lockstep.InputOptions(cache="device")
    found = fitted(small, lambda x, y: (Batches(x, y),), input_options=cached, **options)
    yield Finding("PyDataset, kept on the device: relative difference from arrays", difference(found, arrays), 1e-5)


def fitted(small, data, optimizer, rows, steps=None, **strategy):
    """Weights of the dense net after two epochs on some kind of input, not shuffled."""
    with replicas_on_one(2, **strategy).scope():
        model, batch = compiled("MLP", small, optimizer)
    given = data(*batch(rows))
    size = ROWS if isinstance(given[0], (np.ndarray, jax.Array)) else None
    model.fit(*given, batch_size=size, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
    return model.get_weights()


def uneven(small):
    """Batches of 1 to 7 rows on 4 replicas: training, evaluation and prediction as plain Keras."""
    jax.config.update("jax_default_matmul_precision", "highest")
    plain, batch = compiled("MLP", small, "sgd")
    with replicas_on_one(4).scope():
        model, _ = compiled("MLP", small, "sgd")
    for rows in (1, 3, 7):
        x, y = batch(rows)
        plain.train_on_batch(x, y)
        model.train_on_batch(x, y)
        yield Finding(f"{rows} rows: weights", difference(model.get_weights(), plain.get_weights()), 1e-4)
        yield Finding(
            f"{rows} rows: predictions", difference([model.predict(x, verbose=0)], [plain.predict(x, verbose=0)]), 1e-4
        )


def strategies(small):
    """Law 1 for other ways to keep and add: the variables on the host, in shards, on a mesh."""
    jax.config.update("jax_default_matmul_precision", "highest")
    plain = trained("LM", small, optimizer="sgd")
    ways = {
        "variables on the host": lambda: lockstep.CentralStorageStrategy(device_names(), "cpu:0", replicas=2),
        "variables in shards, blocks recomputed": lambda: replicas_on_one(2, shard="variables", recompute="blocks"),
        "optimizer in shards": lambda: replicas_on_one(2, shard="optimizer"),
        "several workers, of which this is one": lambda: lockstep.MultiWorkerMirroredStrategy(replicas=2),
    }
    for way, make in ways.items():
        found = trained("LM", small, make(), optimizer="sgd")
        yield Finding(f"{way}: relative difference from plain Keras", difference(found, plain), 1e-4)


def loops(small):
    """A loop of one's own with ``strategy.run``, jitted, beside ``fit``."""
    jax.config.update("jax_default_matmul_precision", "highest")
    for replicas in (1, 4):
        strategy = replicas_on_one(replicas)
        with strategy.scope():
            model, batch = compiled("MLP", small, "sgd")
            fitted_model, _ = compiled("MLP", small, "sgd")
        data = batch(3 * ROWS + 3)
        batches = [tuple(part[first : first + ROWS] for part in data) for first in range(0, len(data[0]), ROWS)]
        fitted_model.fit(*data, batch_size=ROWS, shuffle=False, verbose=0)
        looped = own_loop(strategy, model, batches)
        what = f"strategy.run, {replicas} replicas: relative difference from fit"
        yield Finding(
            what, difference(looped, [variable.numpy() for variable in fitted_model.trainable_variables]), 1e-4
        )


def own_loop(strategy, model, batches):
    """Trainable weights after one pass with gradients that the replicas add themselves."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)

    def replica_step(weights, state, x, y, rows):
        def loss(weights):
            logits, after = model.stateless_call(weights, state, x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return lockstep.compute_average_loss(losses, global_batch_size=rows), after

        (_, after), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return lockstep.get_replica_context().all_reduce("SUM", gradients), after

    @jax.jit
    def step(weights, state, slots, batch, rows):
        gradients, state = strategy.run(replica_step, (weights, state, *batch, rows))
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
        return weights, state, slots

    kinds = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    values = tuple([variable.value for variable in kind] for kind in kinds)
    for own, batch in zip(batches, strategy.experimental_distribute_dataset(batches), strict=True):
        values = step(*values, batch, len(own[0]))
    return [np.asarray(weight) for weight in values[0]]


def joined(small):
    """Several steps as one program, and one after the other."""
    jax.config.update("jax_default_matmul_precision", "highest")
    weights = {}
    for who, strategy in {"plain Keras": None, "2 replicas": replicas_on_one(2)}.items():
        if strategy:
            with strategy.scope():
                model, batch = compiled("MLP", small, "sgd", steps_per_execution=4)
        else:
            model, batch = compiled("MLP", small, "sgd")
        model.fit(*batch(10 * ROWS + 3), batch_size=ROWS, epochs=2, verbose=0)
        weights[who] = model.get_weights()
    yield Finding(
        "4 steps at a time: relative difference from plain Keras", difference(*reversed(weights.values())), 1e-4
    )


def precision(small):
    """Mixed precision beside plain Keras with the same policy; float16 with a loss scale."""
    for policy, limit in (("mixed_bfloat16", 5e-2), ("mixed_float16", 5e-2)):
        keras.config.set_dtype_policy(policy)
        try:
            plain, found = trained("MLP", small), trained("MLP", small, replicas_on_one(2))
        finally:
            keras.config.set_dtype_policy("float32")
        yield Finding(f"{policy}: relative difference from plain Keras", difference(found, plain), limit)


def nan_guard(small):
    """A batch with NaN is skipped, and the weights stay finite."""
    with replicas_on_one(2).scope():
        model, batch = compiled("MLP", small)
    x, y = batch(4 * ROWS)
    x[ROWS + 3, 0] = np.nan
    guard = lockstep.callbacks.NanGuard("skip")
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[guard])
    yield Finding("steps that were skipped, less the one that had to be", abs(guard.skipped - 1), 0)
    yield Finding("weights that are not finite", sum(int((~np.isfinite(w)).sum()) for w in model.get_weights()), 0)


def monitoring(small):
    """What is logged of the time of steps; on devices whose peak is known, the share that the model uses of it."""
    with replicas_on_one(2).scope():
        model, batch = compiled("LM", small)
    speed = lockstep.callbacks.ThroughputMonitor()
    rows = 8
    model.fit(*batch(12 * rows), batch_size=rows, epochs=2, verbose=0, callbacks=[speed])
    for name, value in speed.last.items():
        yield Finding(f"LM: {name}", round(value, 5), 1 if name == "mfu" else None)


def resume(small):
    """A run that was killed with SIGKILL resumes, and ends with the bits of one that was not."""
    command = program_of("resume", small)
    results = []
    for kill in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            if kill:
                process = subprocess.Popen([*command, folder], stdout=subprocess.DEVNULL)
                await_checkpoint(Path(folder), process, deadline=time.monotonic() + 200)
                process.send_signal(signal.SIGKILL)
                process.wait(60)
            done = subprocess.run([*command, folder], capture_output=True, text=True, check=True, timeout=300)
            results.append(done.stdout.splitlines()[-1])
    yield Finding("distinct results of an undisturbed and a killed run", len(set(results)), 1)


def await_checkpoint(folder, process, deadline):
    """Wait until a run has written its second checkpoint."""
    while len(list(folder.glob("step-*"))) < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run wrote no two checkpoints; its exit code is {process.poll()}")
        time.sleep(0.01)


def program_of(part, small):
    """The command that runs the program of a part; its argument follows."""
    return [
        sys.executable,
        str(Path(__file__).with_name("parts.py")),
        part,
        *(["--small"] if small else []),
        "--program",
    ]


def resumed_run(folder, small):
    """Train with checkpoints in ``folder``, and print the digest of the weights."""
    with replicas_on_one(2, deterministic=True).scope():
        model, batch = compiled("MLP", small)
    backup = lockstep.callbacks.BackupAndRestore(folder, save_freq=5)
    model.fit(*batch(100 * ROWS), batch_size=ROWS, epochs=3, verbose=0, callbacks=[backup])
    print(digest(model.get_weights()))


def jobs(small):
    """Jobs of ``lockstep run``: one worker, and a chief with a worker and a server; of more workers than GPUs: what is said."""
    alone = job_of(small, "mirrored")
    one = job_of(small, "several workers", "-n", "1")
    yield Finding("one worker: distinct results of it and of no job", len({digest_in(alone), digest_in(one)}), 1)
    servers = job_of(small, "servers", "--workers", "1", "--servers", "1")
    yield Finding("a worker and a server: exit code", servers.returncode, 0)
    yield Finding("a worker and a server: last line", last_line(servers))
    if len(visible_gpus(os.environ)) == 1:
        two = job_of(small, "several workers", "-n", "2")
        yield Finding("two workers on one GPU: exit code", two.returncode)
        yield Finding("two workers on one GPU: last line", last_line(two))


def job_of(small, kind, *processes):
    """Train under one kind of strategy, with options of ``lockstep run`` in its processes, else in one."""
    python, *program = program_of("jobs", small)
    launcher = ["-m", "lockstep.cli", "run", "--timeout", "240", *processes] if processes else []
    command = [python, *launcher, *program, kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def digest_in(done):
    """The digest that a program printed last, without the name of its worker."""
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1000:]}")
    return last_line(done).split()[-1]


def last_line(done):
    """What a program printed last: its error, or else its result."""
    return ((done.stderr if done.returncode else done.stdout).strip().splitlines() or [""])[-1]


def job(kind, small):
    """Train under one kind of strategy, and print the digest of the weights."""
    strategy = {
        "mirrored": lambda: replicas_on_one(2, deterministic=True),
        "several workers": lambda: lockstep.MultiWorkerMirroredStrategy(replicas=2, deterministic=True),
        "servers": lockstep.ParameterServerStrategy,
    }[kind]()
    with strategy.scope():
        model, batch = compiled("MLP", small, "sgd")
    model.fit(*batch(2 * ROWS + UNEVEN), batch_size=ROWS, epochs=2, verbose=0)
    print(digest(model.get_weights()))


def out_of_memory(small):
    """A batch that does not fit: the search says so; a step that fails on the device: ``fit`` hears of it."""
    with replicas_on_one(2).scope():
        model, batch = compiled("LM", small, blocks=1)
    x, y = batch(8 if small else 4096)
    if not small:
        found = lockstep.batch_size_finder(model, x, y, batch_sizes=(8, len(x)), steps=2)
        yield Finding("largest batch that fits, of 8 and 4,096 rows", found.largest, 8)
        yield Finding("what is said of 4,096 rows", found.measurements[-1].note)
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    before = model.get_weights()
    if not small:
        free = jax.local_devices()[0].memory_stats()
        taken = jax.numpy.zeros(free["bytes_limit"] - free["bytes_in_use"] - (1 << 28), "int8")
        taken.block_until_ready()
        try:
            model.fit(x[:8], y[:8], batch_size=8, verbose=0)
            yield Finding("steps without memory that fit did not hear of", 1, 0)
        except jax.errors.JaxRuntimeError as error:
            yield Finding("steps without memory that fit did not hear of", 0, 0)
            yield Finding("what it says", f"{str(error)[:400]} {' '.join(getattr(error, '__notes__', ()))}")
        del taken, model
        with replicas_on_one(2).scope():  # As that error says.
            model, _ = compiled("LM", small, blocks=1)
        model.set_weights(before)
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    yield Finding(
        "weights that are not finite after a step with memory",
        sum(int((~np.isfinite(w)).sum()) for w in model.get_weights()),
        0,
    )


def devices(small):
    """Several devices: law 1, every all-reduce, and the time of a step beside one device."""
    count = min(8, jax.local_device_count())
    if count < 2:
        yield Finding("devices", "one: nothing to run")
        return
    jax.config.update("jax_default_matmul_precision", "highest")
    plain = trained("MLP", small, optimizer="sgd")
    for ops in ("auto", "nccl", "ring", "halving_doubling", "hierarchical_copy", "reduce_to_one"):
        options = {} if ops == "auto" else {"cross_device_ops": ops}
        found = trained("MLP", small, lockstep.MirroredStrategy(device_names(count), **options), optimizer="sgd")
        yield Finding(f"{count} devices, {ops}: relative difference from plain Keras", difference(found, plain), 1e-4)
    sharded = lockstep.MirroredStrategy(device_names(count), shard="optimizer")
    found = trained("MLP", small, sharded, optimizer="sgd")
    yield Finding(f"{count} devices, sharded optimizer: relative difference", difference(found, plain), 1e-4)


def mesh(small):
    """A mesh of all devices: numbers of plain Keras with an uneven last batch, equal bits from run to run, and a part of each variable."""
    count = min(8, jax.local_device_count())
    sizes = {"data": count // 2, "model": 2} if count % 2 == 0 else {"data": count, "model": 1}
    jax.config.update("jax_default_matmul_precision", "highest")
    plain = trained("LM", small, optimizer="sgd")
    for options in ({}, {"shard": "variables", "recompute": "blocks"}):
        what = f"mesh {sizes['data']} x {sizes['model']}{', sharded over rows, recomputed' if options else ''}"
        found, again = (
            trained(
                "LM",
                small,
                lockstep.ModelParallelStrategy(sizes, devices=device_names(count), **options),
                optimizer="sgd",
            )
            for _ in range(2)
        )
        yield Finding(f"{what}: relative difference from plain Keras", difference(found, plain), 1e-4)
        yield Finding(f"{what}: arrays whose bits differ from run to run", int(digest(found) != digest(again)), 0)
