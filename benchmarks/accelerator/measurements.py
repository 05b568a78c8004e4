"""The parts that measure time and memory."""

import statistics
import time

import jax
import keras
import numpy as np
from steps import Steps, scalars, state_of

from accelerator.common import ROWS, Finding, replicas_on_one
from accelerator.nets import compiled
from lockstep.collectives.cost_model import link_between
from lockstep.tools.plan.compile_process import check_steps, keep_checks
from lockstep.tools.plan.estimate import TrainingCall
from lockstep.tools.plan.hardware import known_accelerators

# Rows of a batch, and batches of an epoch: enough that starting an epoch does not count.
ROUNDS = 3
SIZES = {"MLP": (64, 400), "CNN": (128, 100), "LM": (16, 20), "ResNet50": (64, 20)}


def steps_mlp(small):
    """Milliseconds of a step of the dense net: in ``fit``, and the bare compiled step."""
    return steps_of("MLP", small, {f"{count} replicas": replicas_on_one(count) for count in (1, 2, 4)})


def steps_cnn(small):
    """The same for the convolutional net."""
    return steps_of("CNN", small, {"2 replicas": replicas_on_one(2)})


def steps_lm(small):
    """The same for the language model, also in mixed precision."""
    for policy in ("float32", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        yield from steps_of("LM", small, {"2 replicas": replicas_on_one(2)})


def steps_resnet50(small):
    """The same for ResNet50."""
    return steps_of("ResNet50", small, {"2 replicas": replicas_on_one(2)})


def deterministic(small):
    """The same for deterministic strategies, with kernels whose order is fixed also in plain Keras."""
    for net in ("CNN", "LM"):
        strategy = replicas_on_one(4, deterministic=True)
        yield from steps_of(net, small, {"4 replicas, deterministic": strategy}, "plain Keras, deterministic kernels")


def steps_of(net, small, strategies, plain="plain Keras"):
    """Findings on the time of a step of plain Keras and under strategies, by their names."""
    rows, batches = (8, 3) if small else SIZES[net]
    policy = keras.config.dtype_policy().name
    what = f"{net}, {rows} rows" if policy == "float32" else f"{net}, {rows} rows, {policy}"
    turns, data = {}, None
    for who, strategy in {plain: None, **strategies}.items():
        if strategy:
            with strategy.scope():
                model, batch = compiled(net, small)
        else:
            model, batch = compiled(net, small)
        data = data or batch(rows * batches)
        turns[who] = Steps(model, strategy, *data, rows)
    times = {who: ([], []) for who in turns}
    for _ in range(ROUNDS):  # in turns
        for who, one in turns.items():
            times[who][0].append(one.in_fit())
            if not (one.strategy and one.strategy.deterministic):  # Its step is several programs.
                times[who][1].append(one.bare())
    for who, (fit, bare) in times.items():
        yield Finding(f"{what}, {who}: ms of a step in fit", round(1e3 * statistics.median(fit), 3))
        if bare:
            yield Finding(f"{what}, {who}: ms of the bare step", round(1e3 * statistics.median(bare), 3))


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
        checks, failures = check_steps(
            call, net, known_accelerators(), ("replicated",), (), link_between("100GbE", None)
        )
        keep_checks(checks)
        yield from (Finding(f"{net}: not measured", line) for line in failures)
        for one in checks:
            yield Finding(f"{net}: ms of a step", round(1e3 * one.measured_seconds, 3))
            told = one.predicted_seconds and round(1e3 * one.predicted_seconds, 3)
            yield Finding(f"{net}: ms that the plan predicts", told or "not predicted here")
            for what, size in (("predicts", one.predicted_memory), ("is measured", one.measured_memory)):
                yield Finding(
                    f"{net}: MiB of a device, {what}", round(size / 2**20, 1) if size else "not measured here"
                )


def torch(small):
    """Milliseconds of a step of torch, eager and compiled, on the nets of the parts ``steps``; products as JAX computes them, in TF32."""
    try:
        import torch as library
    except ImportError:
        yield Finding("torch", "not installed here")
        return
    from accelerator.torch_nets import NETS

    library.set_float32_matmul_precision("high")
    where = library.device("cuda" if library.cuda.is_available() else "cpu")
    for net, rows, steps in (("MLP", 64, 100), ("LM", 16, 10), ("ResNet50", 64, 10)):
        try:
            make, batch = NETS[net]
            module = make().to(where)
        except ImportError as error:
            yield Finding(f"{net}: torch", f"not run: {error}")
            continue
        x, y = (part.to(where) for part in batch(8 if small else rows))
        for way in ("eager", "compiled"):
            run = library.compile(module) if way == "compiled" else module
            optimizer = library.optim.Adam(module.parameters(), fused=True)
            seconds = torch_seconds(library, run, optimizer, x, y, 3 if small else steps)
            yield Finding(f"{net}, {rows} rows, torch {way}: ms of a step", round(1e3 * seconds, 3))


def torch_seconds(library, module, optimizer, x, y, steps):
    """Median seconds of a training step of torch."""
    criterion, times = library.nn.CrossEntropyLoss(), []
    for _ in range(4):
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            criterion(module(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
        if x.is_cuda:
            library.cuda.synchronize()
        times.append((time.perf_counter() - begun) / steps)
    return statistics.median(times[1:])
