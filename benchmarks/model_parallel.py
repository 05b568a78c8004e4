"""Claim: ``layout="auto"`` finds Megatron's layout, each device keeps its part of the state, and a step is as fast as Keras's.

``python benchmarks/model_parallel.py TARGET``: a language model of two blocks (width 1,024, 16 heads, 32,768 words, 8 sequences of 256
positions for each row of the mesh) with Adam, compiled for devices that are only described, in the environment of
``./scripts/test-accelerators``. Rows of other targets stay in the table. The peer is Keras's step under ``jax.jit`` with the variables
sharded by annotation along the same axes, as ``keras.distribution.ModelParallel`` does it.

``python benchmarks/model_parallel.py cpu``: ``fit`` of a smaller one on four CPU devices under both, each in a process of its own, in turn.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "KERAS_BACKEND": "jax",
}
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax
import keras
import numpy as np
from results_file import write

import lockstep
from benchmarks.accelerator import nets
from lockstep._keras import trainer
from lockstep.tools.plan.hlo import collectives
from tests.accelerators.steps import devices
from tests.support.described import described

MIB, ROWS = 1 << 20, 8
SIZES = {"words": 32_768, "length": 256, "width": 1024, "blocks": 2, "heads": 16}
MESHES = {"v5e 2x2": (2, 2), "v5e 2x4": (2, 4), "v5e 4x4": (4, 4), "H100 x 8": (2, 4)}
MEGATRON = nets.megatron_rules(SIZES["blocks"])
PEER = "Keras, annotated"
PLANS = {
    "replicated": None,
    "auto": {},
    "Megatron, by hand": {"layout": MEGATRON},
    "auto, sharded over rows, recomputed": {"shard": "variables", "recompute": "blocks"},
}
NAMES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
COLUMNS = ("target", "mesh", "plan", "state", "arguments", "temporaries", *NAMES)
NOTE = (
    "MiB on each device. State: of the variables and of the optimizer, as the layout says; arguments: the same and the batch. Collectives of a "
    "training step: their number, and the MiB of their results on a device."
)
CPU_SIZES = {"words": 2048, "length": 64, "width": 128, "blocks": 2, "heads": 4}
COMPETITORS = {
    "ours": "ModelParallelStrategy, auto",
    "keras": "keras.distribution.ModelParallel",
    "keras-threads": "the same, with Lockstep's pool of threads",
}
CPU_MESH, TURNS, STEPS, CPU_ROWS = (2, 2), 5, 12, 16


def made(rows, sizes=SIZES):
    """Return a compiled model and a batch."""
    model, batch = nets.compiled("LM", small=False, **sizes)
    return model, batch(rows)


def compiled(target, plan):
    """Compile a training step; return it and the bytes of the state on a device."""
    data, model_axis = MESHES[target]
    places, rows = devices(target), ROWS * data
    if plan == PEER:
        return compiled_by_annotation(target)
    options = PLANS[plan]
    if options is None:
        strategy = lockstep.MirroredStrategy(places)
    else:
        strategy = lockstep.ModelParallelStrategy({"data": data, "model": model_axis}, devices=places, **options)
    keras.backend.clear_session()
    with strategy.scope():
        model, batch = made(rows)
    state = trainer.training_state(model, batch)
    executor = strategy._functions_of(model).executor
    executor.prepare(batch)
    step = executor.train_step(strategy._functions_of(model).build_step(executor, "train"))
    return step.compile_for(state, strategy._placement.abstract_batch(batch)), strategy.layout(model).device_bytes


def compiled_by_annotation(target):
    """Compile Keras's own step with the state sharded as Megatron's layout says, and the batch by rows."""
    data, model_axis = MESHES[target]
    strategy = lockstep.ModelParallelStrategy({"data": data, "model": model_axis}, MEGATRON, devices=devices(target))
    keras.backend.clear_session()
    with strategy.scope():
        model, batch = made(ROWS * data)
    state = trainer.training_state(model, batch)
    executor = strategy._functions_of(model).executor
    executor.prepare(batch)
    shardings = executor.state_shardings(state)
    keras.backend.clear_session()
    plain, batch = made(ROWS * data)
    state = trainer.training_state(plain, batch)
    state = jax.tree.map(lambda leaf, place: described(leaf)(place), state, jax.tree.broadcast(shardings, state))
    batch = jax.tree.map(lambda leaf: described(leaf)(strategy._placement.row_sharding), batch)
    step = jax.jit(plain.train_step, donate_argnums=0, out_shardings=(None, shardings))
    return step.lower(state, batch).compile(), strategy.layout(model).device_bytes


def cell(found, name):
    """Return number and MiB of one kind of collective."""
    sizes = [one.bytes for one in found if one.name == name]
    return f"{len(sizes)}: {sum(sizes) / MIB:.1f}" if sizes else "none"


def measure(target):
    """Measure one target, and put it into the table."""
    mesh, rows = "x".join(map(str, MESHES[target])), []
    for plan in (*PLANS, PEER):
        program, state = compiled(target, plan)
        memory, found = program.memory_analysis(), collectives(program.as_text())
        sizes = [state, memory.argument_size_in_bytes, memory.temp_size_in_bytes]
        rows.append(
            (target, mesh, plan, *(round(size / MIB) for size in sizes), *(cell(found, name) for name in NAMES))
        )
        print(rows[-1], flush=True)
    file = ROOT / "benchmarks" / "results" / "model_parallel.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    kept = [row for row in (tuple(row[column] for column in COLUMNS) for row in before) if row[0] != target]
    title = "A language model on a mesh, compiled for devices that are only described"
    write("model_parallel", title, COLUMNS, sorted([*kept, *rows], key=lambda row: row[0]), NOTE, arguments=())


def cpu():
    """Time ``fit`` under both in turn, each in a process of its own."""
    times = {who: [] for who in COMPETITORS}
    for _ in range(TURNS):
        for who, found in times.items():
            command = [sys.executable, __file__, "one", who]
            found.append(
                json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
            )
            print(who, found[-1], flush=True)
    rows = []
    for who, name in COMPETITORS.items():
        ratios = [theirs["step"] / ours["step"] for theirs, ours in zip(times[who], times["ours"], strict=True)]
        steps = [each["step"] for each in times[who]]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((name, round(statistics.median(steps) * 1000, 1), spread, times[who][0]["loss"]))
    note = (
        f"Median of {TURNS} turns of {2 * STEPS} steps of {CPU_ROWS} rows on a mesh of {CPU_MESH[0]} x {CPU_MESH[1]} CPU devices on two cores; "
        "the first epoch is left out. Lockstep starts JAX with four threads for each device, as collectives can deadlock on fewer; the last row "
        "is Keras with as many."
    )
    columns = ("strategy", "ms a step", "ratio to ours in the same turn", "loss of the last epoch")
    write("model_parallel_cpu", "Steps on a mesh of CPU devices", columns, rows, note)


def one(who):
    """Train under one of the two, and print the seconds of a step."""
    count, (data, model_axis) = CPU_MESH[0] * CPU_MESH[1], CPU_MESH
    if who == "ours":
        names = [f"cpu:{number}" for number in range(count)]
        scope = lockstep.ModelParallelStrategy({"data": data, "model": model_axis}, devices=names).scope()
    else:
        if who == "keras":
            jax.config.update("jax_num_cpu_devices", count)
        else:
            lockstep.config.set_logical_cpu_devices(count)
        mesh = keras.distribution.DeviceMesh((data, model_axis), ("data", "model"))
        layout = keras.distribution.LayoutMap(mesh)
        for pattern, axes in MEGATRON.items():
            layout[pattern] = axes
        scope = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data").scope()
    with scope:
        model, (x, y) = made(CPU_ROWS * STEPS, CPU_SIZES)
        options = {"batch_size": CPU_ROWS, "shuffle": False, "verbose": 0}
        model.fit(x, y, **options)
        start = time.perf_counter()
        history = model.fit(x, y, epochs=2, **options).history
        print(json.dumps({"step": (time.perf_counter() - start) / 2 / STEPS, "loss": round(history["loss"][-1], 5)}))


if __name__ == "__main__":
    np.random.seed(0)
    if sys.argv[1:] == ["cpu"]:
        cpu()
    elif sys.argv[1:2] == ["one"]:
        one(sys.argv[2])
    else:
        measure(*sys.argv[1:] or ["v5e 2x2"])
