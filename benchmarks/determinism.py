"""Claim: the cost of ``deterministic=True`` against the default executor, on two logical CPU devices.

Each executor runs in a separate process, started as a user would start it (with its own thread pool). The two take turns, a few steps at
a time; the result is the median of the ratios. The parts of a deterministic step are then timed one by one; as each part is waited for,
their sum is slightly longer than the step.
"""

import json
import os
import statistics
import subprocess
import sys

from results_file import write

ROUNDS, SECONDS = 9, 0.4
MODELS = {  # net, global batch
    "MNIST MLP, 256": ("mlp", 256),
    "MNIST MLP, 2048": ("mlp", 2048),
    "wide MLP, 1024": ("wide", 1024),
    "CIFAR-10 CNN, 128": ("cnn", 128),
    "Reuters Conv1D, 256": ("text", 256),
    "transformer, 32 of 64 tokens": ("transformer", 32),
}


# --- one executor, in a separate process: reads a line, runs some steps, prints milliseconds a step -------------------------


def work(net, batch, replicas, deterministic):
    import time

    import jax

    import lockstep

    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=replicas, deterministic=deterministic)
    step = stepper(strategy, net, batch)
    start = time.perf_counter()
    for _ in range(5):
        jax.block_until_ready(step())
    count = max(2, round(SECONDS / ((time.perf_counter() - start) / 5)))
    parts = {}
    for line in sys.stdin:
        parts = timed_parts() if line.strip() == "parts" else parts
        parts.clear()
        start = time.perf_counter()
        for _ in range(count):
            logs = step()
        jax.block_until_ready(logs)
        spent = (time.perf_counter() - start) / count
        print(json.dumps({"ms": 1e3 * spent} | {k: 1e3 * v / count for k, v in parts.items()}), flush=True)


def stepper(strategy, net, batch):
    """A function that makes one training step on the same batch; the state stays on the devices."""
    import jax
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, x = NETS[net](rng, batch)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    y = rng.integers(0, 10, batch)
    model.train_on_batch(x, y)
    optimizer = model.optimizer.variables
    kinds = model.trainable_variables, model.non_trainable_variables, optimizer, model.metrics_variables
    state = [[jax.numpy.copy(variable.value) for variable in variables] for variables in kinds]
    function = model.train_function

    def step():
        nonlocal state
        logs, state = function(state, iter([(x, y)]))
        return logs

    return step


def mlp(rng, batch, width=256):
    import keras
    from keras import layers

    hidden = [layers.Dense(width, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)]), normal(rng, batch, 784)


def wide(rng, batch):
    return mlp(rng, batch, width=1024)


def cnn(rng, batch):
    import keras
    from keras import layers

    inner = []
    for filters in (32, 64):
        inner += [
            layers.Conv2D(filters, 3),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ]
    inner += [layers.Flatten(), layers.Dropout(0.3), layers.Dense(64, activation="relu"), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *inner]), normal(rng, batch, 32, 32, 3)


def text(rng, batch):
    import keras
    from keras import layers

    inner = [layers.Embedding(10_000, 7), layers.Conv1D(64, 5, activation="relu"), layers.MaxPooling1D(2)]
    inner += [layers.Conv1D(32, 3, activation="relu"), layers.MaxPooling1D(2), layers.Flatten(), layers.Dense(46)]
    return keras.Sequential([keras.Input((300,), dtype="int32"), *inner]), rng.integers(0, 10_000, (batch, 300))


def transformer(rng, batch):
    import keras
    from keras import layers

    x = keras.Input((64,), dtype="int32")
    h = layers.Embedding(1000, 128)(x)
    for _ in range(2):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(4, 32)(h, h, use_causal_mask=True))
        h = layers.LayerNormalization()(h + layers.Dense(128)(layers.Dense(512, activation="gelu")(h)))
    model = keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling1D()(h)))
    return model, rng.integers(0, 1000, (batch, 64))


NETS = {"mlp": mlp, "wide": wide, "cnn": cnn, "text": text, "transformer": transformer}


def normal(rng, *shape):
    return rng.normal(size=shape).astype("float32")


def timed_parts():
    """From now on every part of a deterministic step is waited for; returns seconds by part, which grow."""
    import gc
    import time

    import jax

    from lockstep.execution import deterministic_replicas
    from lockstep.execution.deterministic_replicas import ReplicaProgram, ReplicasForward, TreeAdder
    from lockstep.execution.deterministic_step import ProgramPart
    from lockstep.execution.spmd import PerDevice

    seconds = {}

    def timed(owner, attribute, part):
        original = getattr(owner, attribute)

        def call(*args, **kwargs):
            start = time.perf_counter()
            result = original(*args, **kwargs)
            jax.block_until_ready([list(leaf) if isinstance(leaf, PerDevice) else leaf for leaf in result])
            seconds[part] = seconds.get(part, 0) + time.perf_counter() - start
            return result

        owner.__dict__[attribute] = call

    parts = {
        ReplicaProgram: {"forward": "replicas, forward", "backward": "replicas, backward"},
        ReplicasForward: {"collect": "join rows, add means"},
        TreeAdder: {"_over_devices": "add over devices"},
    }
    timed(deterministic_replicas, "_pair", "add on a device")
    for owner in gc.get_objects():
        for attribute, part in parts.get(type(owner), {}).items():
            timed(owner, attribute, part)
        is_isolated = type(owner) is ProgramPart and hasattr(getattr(owner.run, "__self__", None), "row_inputs")
        if type(owner) is ProgramPart and not is_isolated:
            timed(owner, "run", "loss, metrics, optimizer")
    return seconds


# --- the comparison --------------------------------------------------------------------------------------------------------


class ExecutorProcess:
    """A process that trains with one executor, some steps at a time."""

    def __init__(self, net, batch, replicas, deterministic, threads=None):
        environment = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
        environment |= {"PJRT_NPROC": str(threads)} if threads else {}
        command = [sys.executable, __file__, "--work", net, str(batch), str(replicas), str(deterministic)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment | {"KERAS_BACKEND": "jax"}
        )

    def steps(self, what="steps"):
        """Run some steps; returns milliseconds."""
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        """Let the process end."""
        self.process.stdin.close()
        self.process.wait(timeout=60)


def in_turn(executors):
    """Milliseconds of every executor, in each round."""
    for executor in executors:
        executor.steps()
    return [[executor.steps()["ms"] for executor in executors] for _ in range(ROUNDS)]


def pools():
    """The default executor on thread pools of several sizes."""
    rows = []
    for name, (net, batch) in MODELS.items():
        executors = [ExecutorProcess(net, batch, 2, False, threads) for threads in POOLS]
        times = in_turn(executors)
        for executor in executors:
            executor.end()
        rows.append((name, *(round(statistics.median(row[i] / row[0] for row in times), 2) for i in range(len(POOLS)))))
        print(*rows[-1], flush=True)
    columns = "net, global batch", *(f"{threads} threads" for threads in POOLS)
    write(
        "determinism_pool",
        f"Time of the default executor on larger thread pools, over that on {POOLS[0]} threads",
        columns,
        rows,
    )


def compare():
    """Both executors in turn, for every net."""
    rows = []
    for name, (net, batch) in MODELS.items():
        for replicas in (2, 8):
            executors = [ExecutorProcess(net, batch, replicas, deterministic) for deterministic in (False, True)]
            times = in_turn(executors)
            for executor in executors:
                executor.end()
            fast, slow = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(b / a for a, b in times)
            rows.append((name, replicas // 2, round(fast, 2), round(slow, 2), round(ratio, 2)))
            print(*rows[-1], flush=True)
    columns = "net, global batch", "replicas a device", "default, ms", "deterministic, ms", "ratio"
    write("determinism", "The cost of the same bits on any number of devices (2 logical CPU devices)", columns, rows)


def profile():
    """The parts of a deterministic step."""
    rows = []
    for name, (net, batch) in MODELS.items():
        for replicas in (2, 8):
            executor = ExecutorProcess(net, batch, replicas, True)
            executor.steps("parts")  # Waiting for everything is new to the process, too.
            parts = executor.steps("go on")
            executor.end()
            rows.append((name, replicas // 2, *(round(parts.get(part, 0), 2) for part in PARTS)))
            print(*rows[-1], flush=True)
    columns = "net, global batch", "replicas a device", *PARTS
    write("determinism_profile", "Where a deterministic step spends its time, in ms", columns, rows)


PARTS = (
    "replicas, forward",
    "join rows, add means",
    "loss, metrics, optimizer",
    "replicas, backward",
    "add on a device",
)
PARTS += ("add over devices",)
POOLS = 8, 16, 32

if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True")
    else:
        compare()
        profile()
        pools()
