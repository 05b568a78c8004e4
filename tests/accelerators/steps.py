"""Steps of Lockstep, compiled for devices that are only described, and what their programs exchange and need.

A case is a net, a plan and a target. :func:`measure` compiles its step, and :func:`measure_keras` what one would write without
Lockstep: ``jax.jit`` of Keras's own step, with the batch cut over the devices. The tests and ``benchmarks/compiled.py`` use them.
"""

import math
from collections import Counter
from dataclasses import dataclass

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lockstep
from benchmarks.accelerator import nets
from lockstep._keras import trainer
from lockstep.custom_loops.per_replica import split_batch
from lockstep.tools.plan.hardware import parse_target
from lockstep.tools.plan.hlo import collectives
from tests.support import hlo
from tests.support.described import described, recording

# Names in the tables, and as `lockstep plan` takes them.
TARGETS = {"v5e 2x2": "v5e:2x2", "v5e 2x4": "v5e:2x4", "v5e 16x16": "v5e:16x16", "H100 x 8": "h100:8"}
LARGE_TARGETS = {
    "v5e 4x4": "v5e:4x4",
    "v5e 8x8": "v5e:8x8",
    "H100 x 64": "h100:64",
    "H100 x 256": "h100:256",
}  # for sharded variables and meshes
# Options of each net, and rows of a device. The small language model is compiled in seconds, and its logits are large as well.
NETS = {"MLP": {}, "CNN": {}, "ResNet50": {}, "LM": {}}
NETS["small LM"] = {"words": 10_000, "length": 64, "width": 128, "blocks": 2, "heads": 4}
ROWS = {"MLP": 32, "CNN": 32, "ResNet50": 16, "LM": 8, "small LM": 8}
MORE_ROWS = 3  # of an uneven batch, which has one row more on as many devices
KINDS = {"evaluate": "test", "predict": "predict"}  # of the plans that do not train
OPTIONS = {
    "shard_optimizer": {"shard": "optimizer"},
    "deterministic": {"deterministic": True},
    "shard_variables": {"shard": "variables"},  # not in the table of plans: benchmarks/sharded.py has its figures
}
PLANS = ("fast", "uneven", "shard_optimizer", "run", "deterministic", "evaluate", "predict")
STATE = {"train": (0, 1, 2, 3), "test": (0, 1, 3), "predict": (0, 1)}  # the parts of a training state that a step gets


@dataclass(frozen=True)
class Case:
    """One step: a net of ``nets.NETS``, a plan of ``PLANS``, a target of ``TARGETS``."""

    net: str
    plan: str
    target: str

    def __str__(self):
        return f"{self.net}-{self.plan}-{self.target}".replace(" ", "")


def devices(target):
    """Return the devices of a target."""
    return parse_target((TARGETS | LARGE_TARGETS)[target]).devices()


@dataclass(frozen=True)
class Measured:
    """What the programs of a step exchange and need on one device.

    Attributes:
        programs: number of different programs that the step starts.
        exchanged: for each collective its number and the bytes of its results, over all programs.
        arguments: bytes of the arguments, of the program that has most.
        memory: bytes of arguments, temporaries and results that are no arguments, of the program that needs most.
        donated: number of arrays whose memory results reuse.
        from_host: instructions that exchange data with the host, or call it.
    """

    programs: int
    exchanged: dict[str, tuple[int, int]]
    arguments: int
    memory: int
    donated: int
    from_host: tuple[str, ...]

    def number_of(self, name):
        """Return the number of one kind of collective."""
        return self.exchanged.get(name, (0, 0))[0]

    def reduced(self, devices):
        """Return the bytes that are summed over the devices."""
        return self.exchanged.get("all-reduce", (0, 0))[1] + devices * self.exchanged.get("reduce-scatter", (0, 0))[1]


@dataclass(frozen=True)
class Sizes:
    """What a model implies.

    Attributes:
        gradients: bytes of the trainable variables.
        statistics: bytes of the non-trainable variables that are averaged, such as those of batch normalization.
        outputs: bytes of the outputs of one row.
        trainable: number of trainable variables.
        averaged: number of non-trainable variables that are averaged.
        metrics: number of variables of metrics.
        state: number of all variables.
    """

    gradients: int
    statistics: int
    outputs: int
    trainable: int
    averaged: int
    metrics: int
    state: int


def measure(case):
    """Compile the step of a case."""
    return _measured(_programs(case, rows_of(case)))


def measure_mesh(net, sizes, target, **options):
    """Compile the step of a net on a mesh of a target; return what its program exchanges and needs, and its layout."""
    keras.backend.clear_session()  # The rules name layers.
    strategy = lockstep.ModelParallelStrategy(
        dict(zip(("data", "model"), sizes, strict=True)), devices=devices(target), **options
    )
    with strategy.scope():
        model, state, batch = _made(net, ROWS[net] * sizes[0], "train")
    functions = strategy._functions_of(model)
    with recording() as programs:
        functions.executor.compile(functions.build_step(functions.executor, "train"), "train")(state, batch)
    return _measured(programs), strategy.layout(model)


def measure_keras(case):
    """Compile Keras's own step for the batch of a case, or the next even one, cut over the devices."""
    kind, rows = KINDS.get(case.plan, "train"), padded_rows(case)
    model, state, batch = _made(case.net, rows, kind)
    mesh = Mesh(np.asarray(devices(case.target)), ("batch",))
    whole, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",)))
    state = jax.tree.map(lambda leaf: described(leaf)(whole), state)
    batch = jax.tree.map(lambda leaf: described(leaf)(cut), batch)
    step = {"train": model.train_step, "test": model.test_step, "predict": model.predict_step}[kind]
    with recording() as programs:
        jax.jit(step, donate_argnums=0, out_shardings=(None, whole))(state, batch)
    return _measured(programs)


def measure_joined(case, count):
    """Compile so many joined training steps of a case."""
    strategy, rows = lockstep.MirroredStrategy(devices(case.target)), rows_of(case)
    with strategy.scope():
        model, state, batch = _made(case.net, rows, "train")
    functions = strategy._functions_of(model)
    step = functions.build_step(functions.executor, "train")
    with recording() as programs:
        functions.executor.compile_multi_step(step)(state, (batch,) * count)
    return _measured(programs)


def sizes(net):
    """Return what the model of a net implies."""
    model, state, _ = _made(net, 1, "train")
    averaged = [value for value in state[1] if np.issubdtype(value.dtype, np.floating)]
    return Sizes(
        gradients=sum(value.nbytes for value in state[0]),
        statistics=sum(value.nbytes for value in averaged),
        outputs=math.prod(model.output_shape[1:]) * 4,
        trainable=len(state[0]),
        averaged=len(averaged),
        metrics=len(state[3]),
        state=sum(map(len, state)),
    )


def even_rows(case):
    """Return the rows of a batch that all devices of a case share evenly."""
    return ROWS[case.net] * len(devices(case.target))


def rows_of(case):
    """Return the rows of the batch of a case."""
    return even_rows(case) + (MORE_ROWS if case.plan == "uneven" else 0)


def padded_rows(case):
    """Return the rows of a case with padding, which devices of fewer rows get."""
    count = len(devices(case.target))
    return -(-rows_of(case) // count) * count


def _programs(case, rows):
    kind = KINDS.get(case.plan, "train")
    strategy = lockstep.MirroredStrategy(devices(case.target), **OPTIONS.get(case.plan, {}))
    with strategy.scope():
        model, state, batch = _made(case.net, rows, kind)
    if case.plan == "run":
        return _programs_of_loop(strategy, model, state, batch)
    functions = strategy._functions_of(model)
    with recording() as programs:
        functions.executor.compile(functions.build_step(functions.executor, kind), kind)(state, batch)
    return programs


def _programs_of_loop(strategy, model, state, batch):
    """Programs of a custom training loop like that of docs/custom_loops.md."""
    rows = len(batch[0])

    def replica_step(trainable, non_trainable, x, y):
        def loss(trainable):
            outputs, state = model.stateless_call(trainable, non_trainable, x, training=True)
            each = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            return lockstep.compute_average_loss(each, global_batch_size=rows), state

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        value, gradients = lockstep.get_replica_context().all_reduce("SUM", (value, gradients))
        return value, gradients, state

    def step(state, batch):
        trainable, non_trainable, variables = state
        value, gradients, non_trainable = strategy.run(replica_step, args=(trainable, non_trainable, *batch))
        trainable, variables = model.optimizer.stateless_apply(variables, gradients, trainable)
        return value, (trainable, non_trainable, variables)

    with recording() as programs:
        placed = split_batch(batch, strategy._placement)
        jax.jit(step, donate_argnums=0)(strategy._placement.put(state[:3]), placed)
    return programs


def _made(net, rows, kind):
    """Return a model, and state and batch of its step."""
    model, batch_of = nets.compiled(net.removeprefix("small "), small=False, **NETS[net])
    row = batch_of(1)
    state = trainer.training_state(model, row)
    batch = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape[1:])), row)
    return model, tuple(state[part] for part in STATE[kind]), batch[:1] if kind == "predict" else batch


def _measured(programs):
    exchanged, from_host, donated, arguments, memory = Counter(), [], 0, [], []
    for program in programs:
        text, analysis = program.compiled.as_text(), program.compiled.memory_analysis()
        for one in collectives(text):
            exchanged[one.name] += program.runs * np.array([1, one.bytes])
        from_host += hlo.host_instructions(text)
        donated += hlo.donated(text)
        arguments.append(analysis.argument_size_in_bytes)
        new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        memory.append(arguments[-1] + analysis.temp_size_in_bytes + new)
    found = {name: (int(number), int(size)) for name, (number, size) in sorted(exchanged.items())}
    return Measured(len(programs), found, max(arguments), max(memory), donated, tuple(from_host))
