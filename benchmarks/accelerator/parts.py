"""The parts of ``./scripts/accelerator``: each returns what it has measured or checked on the devices of this process.

``python benchmarks/accelerator/parts.py PART [--small]`` runs one part and prints its findings as JSON in the last line.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path[:0] = [str(Path(__file__).parents[1])]

import jax
import keras
import numpy as np
from steps import Steps, scalars, state_of

import lockstep
from accelerator.nets import compiled
from lockstep.devices.determinism import describe_determinism, prepare_determinism
from lockstep.tools.plan.compiled_step import TrainingCall
from lockstep.tools.plan.hardware import known_accelerators
from lockstep.tools.plan.measured import check_steps, keep_checks
from lockstep.tools.scaling.prediction import link_between

ROWS, UNEVEN = 64, 67  # of a batch; and of one that no number of replicas but one divides


@dataclasses.dataclass
class Finding:
    """One number that was measured.

    Attributes:
        what: what it is the number of.
        value: the number, or a short text.
        limit: the largest value that is right; None: a measurement without a limit.
    """

    what: str
    value: object
    limit: float | None = None

    @property
    def is_right(self):
        """Whether it is within its limit."""
        return self.limit is None or (isinstance(self.value, (int, float)) and self.value <= self.limit)


def device_names(count=1):
    """Names of the first devices, as strategies take them."""
    platform = "gpu" if jax.local_devices()[0].platform in ("cuda", "rocm", "gpu") else jax.local_devices()[0].platform
    return [f"{platform}:{number}" for number in range(count)]


def trained(net, small, strategy=None, epochs=2, **options):
    """Weights after training with batches of ``ROWS``, and a last one that is uneven; plain Keras without a strategy."""
    if strategy is None:
        model, batch = compiled(net, small, **options)
    else:
        with strategy.scope():
            model, batch = compiled(net, small, **options)
    model.fit(*batch(2 * ROWS + UNEVEN), batch_size=ROWS, epochs=epochs, verbose=0)
    return model.get_weights()


def difference(weights, others):
    """Largest difference between two lists of weights, relative to the largest weight of each array."""
    return max(
        float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6)) if np.isfinite(one).all() else float("inf")
        for one, other in zip(weights, others, strict=True)
        if one.size
    )


def digest(weights):
    """SHA-256 of weights."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)).hexdigest()


def replicas_on_one(replicas, **options):
    """A strategy with some replicas on the first device."""
    return lockstep.MirroredStrategy(device_names(), replicas=replicas, **options)


# --- parts ----------------------------------------------------------------------------------------------------------------


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
    for net in ("MLP", "CNN"):
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


def fitted(small, data, optimizer, rows, steps=None):
    """Weights of the dense net after two epochs on some kind of input, not shuffled."""
    with replicas_on_one(2).scope():
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


def resume(small):
    """A run that was killed with SIGKILL resumes, and ends with the bits of one that was not."""
    command = [sys.executable, __file__, *(["--small"] if small else []), "--resumed"]
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


def resumed_run(folder, small):
    """Train with checkpoints in ``folder``, and print the digest of the weights."""
    with replicas_on_one(2, deterministic=True).scope():
        model, batch = compiled("MLP", small)
    backup = lockstep.callbacks.BackupAndRestore(folder, save_freq=5)
    model.fit(*batch(100 * ROWS), batch_size=ROWS, epochs=3, verbose=0, callbacks=[backup])
    print(digest(model.get_weights()))


def steps(small):
    """Milliseconds of a step: in ``fit``, and the bare compiled step, of plain Keras and of one, two and four replicas."""
    sizes = {"MLP": (64, 50), "CNN": (128, 20), "LM": (16, 6), "ResNet50": (64, 6)}
    for net, (rows, batches) in sizes.items():
        if small:
            rows, batches = 8, 3
        turns = {}
        for replicas in (None, 1, 2, 4):
            strategy = replicas and replicas_on_one(replicas)
            if strategy:
                with strategy.scope():
                    model, batch = compiled(net, small)
            else:
                model, batch = compiled(net, small)
            turns[replicas] = Steps(model, strategy, *batch(rows * batches), rows)
        times = {replicas: ([], []) for replicas in turns}
        for _ in range(3):  # in turns
            for replicas, one in turns.items():
                times[replicas][0].append(one.in_fit())
                times[replicas][1].append(one.bare())
        for replicas, (fit, bare) in times.items():
            who = "plain Keras" if replicas is None else f"{replicas} replicas"
            yield Finding(f"{net}, {rows} rows, {who}: ms of a step in fit", round(1e3 * statistics.median(fit), 3))
            yield Finding(f"{net}, {rows} rows, {who}: ms of the bare step", round(1e3 * statistics.median(bare), 3))
        del turns


def host(small):
    """Microseconds of the host in a step, for models that compute nearly nothing."""
    for variables in (20, 100) if small else (20, 1000):
        times = {}
        for who, strategy in {"plain Keras": None, "2 replicas": replicas_on_one(2)}.items():
            if strategy:
                with strategy.scope():
                    model = scalars(variables)
                    model.compile("sgd", "mse")
            else:
                model = scalars(variables)
                model.compile("sgd", "mse")
            x = np.ones((ROWS * (10 if small else 200), 1), "float32")
            one = Steps(model, strategy, x, x, ROWS)
            times[who] = 1e6 * statistics.median(one.in_fit() - one.bare() for _ in range(3))
            yield Finding(f"{variables} variables, {who}: us of the host in a step", round(times[who], 1))


def memory(small):
    """Peak memory of a device beside what the compiler says of its program, for a language model."""
    return memory_of("LM", 16, small)


def memory_resnet50(small):
    """The same for ResNet50, in a process of its own, as the peak is that of a process."""
    return memory_of("ResNet50", 64, small)


def memory_of(net, rows, small):
    """Findings on the memory of one net."""
    with replicas_on_one(1).scope():
        model, batch = compiled(net, small)
    x, y = batch(8 if small else rows)
    model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    functions = vars(model)["_lockstep_functions"]
    step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
    program = step.compile_for(state_of(model), functions.placement.abstract_batch((x, y)))
    found = program.memory_analysis()
    said = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
    said -= found.alias_size_in_bytes
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    yield Finding(f"{net}: MiB that the compiler says of the step", round(said / 2**20, 1))
    yield Finding(f"{net}: MiB at the peak of the process", round(peak / 2**20, 1) if peak else "not measured here")


def plan(small):
    """What ``lockstep plan`` predicts for a step on the devices here, beside what is measured; later plans print the ratios."""
    for net, rows in (("MLP", 256), ("CNN", 128), ("LM", 8), ("ResNet50", 64)):
        model, batch = compiled(net, small)
        call = TrainingCall.of_fit(model, batch(8 if small else rows), {"batch_size": 8 if small else rows})
        checks = check_steps(call, net, known_accelerators(), ("replicated",), (), link_between("100GbE", None))
        keep_checks(checks)
        for one in checks:
            yield Finding(f"{net}: ms of a step", round(1e3 * one.measured_seconds, 3))
            told = one.predicted_seconds and round(1e3 * one.predicted_seconds, 3)
            yield Finding(f"{net}: ms that the plan predicts", told or "not predicted here")
            for what, size in (("predicts", one.predicted_memory), ("is measured", one.measured_memory)):
                yield Finding(
                    f"{net}: MiB of a device, {what}", round(size / 2**20, 1) if size else "not measured here"
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
    sharded = lockstep.MirroredStrategy(device_names(count), shard_optimizer=True)
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


def torch(small):
    """Milliseconds of a step of torch, eager and compiled, on the nets that torch has here."""
    try:
        import torch as library
    except ImportError:
        yield Finding("torch", "not installed here")
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
    from rows import rows as rows_of
    from torch_nets import build

    where = library.device("cuda" if library.cuda.is_available() else "cpu")
    for net, count in (("mnist", 64), ("cifar", 128)):
        x, y = (library.from_numpy(part.copy()) for part in rows_of(net, count))
        x, y = (x.permute(0, 3, 1, 2) if x.ndim == 4 else x).contiguous().to(where), y.long().to(where)
        for way in ("eager", "compiled"):
            module, make_optimizer = build(net)
            module = module.to(where)
            run = library.compile(module) if way == "compiled" else module
            seconds = torch_seconds(library, run, make_optimizer(module.parameters()), x, y, 5 if small else 100)
            yield Finding(f"{net}, {count} rows, torch {way}: ms of a step", round(1e3 * seconds, 3))


def torch_seconds(library, module, optimizer, x, y, steps):
    """Median seconds of a training step of torch."""
    criterion, times = library.nn.CrossEntropyLoss(), []
    for _ in range(4):
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
        if x.is_cuda:
            library.cuda.synchronize()
        times.append((time.perf_counter() - begun) / steps)
    return statistics.median(times[1:])


PARTS = {
    part.__name__: part
    for part in (
        numbers,
        bits,
        inputs,
        uneven,
        precision,
        nan_guard,
        resume,
        steps,
        host,
        memory,
        memory_resnet50,
        plan,
        devices,
        mesh,
        torch,
    )
}


def main():
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS, nargs="?")
    parser.add_argument("--resumed", metavar="FOLDER", help="the run that the part resume kills")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU trains in seconds")
    options = parser.parse_args()
    if options.resumed or options.part in ("numbers", "bits", "mesh"):
        prepare_determinism()  # before JAX starts, which it does as soon as a part names devices
    if options.resumed:
        resumed_run(options.resumed, options.small)
        return
    found = [{**dataclasses.asdict(one), "right": one.is_right} for one in PARTS[options.part](options.small)]
    print(json.dumps({"device": jax.local_devices()[0].device_kind, "findings": found}))


if __name__ == "__main__":
    main()
