"""Steps that are compiled for a plan: memory, collectives, the search for the largest batch, and failures."""

import dataclasses

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep import OptionError
from lockstep._keras import trainer
from lockstep.tools.plan import estimate as estimate_module
from lockstep.tools.plan.compile_process import compile_target
from lockstep.tools.plan.estimate import (
    CLOSE_ENOUGH,
    MAX_COMPILED,
    STRATEGIES,
    CompiledStep,
    Memory,
    StepCompiler,
    TrainingCall,
    check_strategies,
    describe_failure,
    largest_batch,
    last_batch,
    survey,
)
from lockstep.tools.plan.hardware import parse_target
from tests.laws.cases import case_named

DEVICES = 4
NETS = (
    *("mse", "adam", "lamb", "layer_normalization", "attention"),
    *("conv2d", "simple_rnn", "gradient_accumulation", "mixed_float16", "add_loss"),
)


def planned(name):
    case = case_named(name)
    keras.utils.set_random_seed(0)
    model = case.build()
    data = case.data(np.random.default_rng(0))
    return model, TrainingCall.of_fit(model, (), {**data, "batch_size": 8})


def nets_and_strategies():
    """Each net under one strategy, the first under each; all under all in the nightly set."""
    for number, name in enumerate(NETS):
        for turn, strategy in enumerate(["replicated", "variables", "model-recompute:2"]):
            yield pytest.param(name, strategy, marks=pytest.mark.nightly if number and (number + turn) % 3 else ())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), list(nets_and_strategies()))
def test_memory_is_that_of_live_arrays(name, strategy):
    """Weights and optimizer as the devices hold them under the strategy, and all arguments as XLA counts them."""
    _, call = planned(name)
    found = StepCompiler(call, parse_target(f"cpu:{DEVICES}"), strategy).compile(8)
    assert not found.failure

    planned_as, names = STRATEGIES[strategy.partition(":")[0]], [f"cpu:{n}" for n in range(DEVICES)]
    options = {"shard": planned_as.shard, "recompute": planned_as.recompute}
    if planned_as.has_mesh:
        live = lockstep.ModelParallelStrategy({"data": DEVICES // 2, "model": 2}, devices=names, **options)
    else:
        live = lockstep.MirroredStrategy(names, **options)
    with live.scope():
        own = case_named(name).build()
    own.optimizer.build(own.trainable_variables)
    state = trainer.training_state(own, call.row)
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(call.first)) / len(jax.tree.leaves(call.first)[0]) * 8
    assert found.memory.weights + found.memory.optimizer == sum(
        variable.device_bytes for variable in live.layout(own).variables
    )
    assert found.memory.weights + found.memory.optimizer >= on_first_device(state[:3]) / DEVICES
    assert found.memory.batch == pytest.approx(rows / DEVICES, abs=4096)  # and seeds, metrics, numbers of rows


def on_first_device(values):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(values))


def test_memory_is_that_of_the_compiler(monkeypatch):
    """All figures together are what XLA's analysis of the program says."""
    analysed = []
    _, call = planned("adam")
    measured = StepCompiler._measured
    monkeypatch.setattr(
        StepCompiler, "_measured", lambda self, rows, program, s: analysed.append(program) or measured(self, rows, program, s)
    )  # fmt: skip
    found = StepCompiler(call, parse_target("cpu:2"), "replicated").compile(16).memory
    analysis = analysed[0].memory_analysis()
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert found.total == (
        analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + kept + analysis.generated_code_size_in_bytes
    )


def test_planning_changes_neither_weights_nor_optimizer():
    model, call = planned("adam")
    before = [np.array(variable) for variable in model.variables]
    StepCompiler(call, parse_target("cpu:2"), "variables").compile(7)
    assert all(map(np.array_equal, before, model.variables))
    assert int(model.optimizer.iterations.numpy()) == 0


def test_the_first_batch_is_read_as_fit_reads_it():
    model, call = planned("adam")
    x, y = np.zeros((50, *model.input_shape[1:])), np.zeros((50, 1))
    assert TrainingCall.of_fit(model, (x, y), {"validation_split": 0.2}).rows == 40
    call = TrainingCall.of_fit(model, (x, y), {"batch_size": 64})
    assert (call.batch, call.rows, call.has_own_batches) == (50, 50, False)
    call = TrainingCall.of_fit(model, (x, y), {"steps_per_epoch": 4, "validation_split": 0.2})
    assert (call.batch, call.rows) == (10, 40)
    call = TrainingCall.of_fit(model, (x, y), {"validation_split": 0.2, "validation_data": (x[:5], y[:5])})
    assert (call.batch, call.rows) == (32, 50)
    batches = ((x[first : first + 6], y[first : first + 6]) for first in (0, 6, 12))
    call = TrainingCall.of_fit(model, (batches,), {"steps_per_epoch": 3})
    assert (call.batch, call.rows, call.has_own_batches) == (6, None, True)


def test_survey_counts_operations_of_a_row_and_the_dtype_of_most_weights():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, dtype="bfloat16"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = survey(TrainingCall.of_fit(model, (np.zeros((8, 64)), np.zeros((8, 1))), {}))
    assert found.dtype == "bfloat16"
    assert 4 * 64 * 64 < found.flops_per_row < 10 * 64 * 64


@pytest.mark.parametrize("batch", [1, 16])
def test_operations_of_the_optimizer_do_not_grow_with_the_rows(batch):
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
    model.compile("adam", "mse")
    data = np.zeros((32, 256)), np.zeros((32, 256))
    found = survey(TrainingCall.of_fit(model, data, {"batch_size": batch}))
    assert found.flops_per_row == pytest.approx(4 * 256 * 256, rel=0.2)
    assert 5 * 256 * 256 < found.flops_per_step < 30 * 256 * 256


def test_operations_of_a_model_for_batches_of_one_size_are_counted():
    model = keras.Sequential([keras.Input(batch_shape=(8, 64)), keras.layers.Dense(64)])
    model.compile("sgd", "mse")
    found = survey(TrainingCall.of_fit(model, (np.zeros((32, 64)), np.zeros((32, 64))), {"batch_size": 8}))
    assert found.flops_per_row > 4 * 64 * 64


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "variables", "model"])
def test_a_stateful_model_for_batches_of_one_size_is_planned_for_this_size(strategy):
    """Its layers refuse to be built for another number of rows; steps of another size fail."""
    model = keras.Sequential([keras.Input(batch_shape=(8, 5, 3)), keras.layers.LSTM(4, stateful=True)])
    model.compile("sgd", "mse")
    call = TrainingCall.of_fit(model, (np.zeros((32, 5, 3)), np.zeros((32, 4))), {"batch_size": 8, "shuffle": False})
    assert survey(call).flops_per_row > 0
    found = compile_target(call, parse_target("cpu:1"), strategy, [8], is_search=True)
    assert not found.failure
    assert found.step_of(8).memory.weights
    other = compile_target(call, parse_target("cpu:1"), strategy, [4], is_search=False)
    assert "batch size of the input" in other.failure


def meshed(*units, embedding=False):
    layers = [keras.layers.Dense(count) for count in units]
    first = [keras.Input((1,)), keras.layers.Embedding(4096, 66), keras.layers.Flatten()]
    model = keras.Sequential([*(first if embedding else [keras.Input((66,))]), *layers, keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    return TrainingCall.of_fit(model, (np.zeros((64, 1 if embedding else 66)), np.zeros((64, 10))), {"batch_size": 64})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "options"),
    [((256, 66, 256), {}), ((66, 66, 66, 256), {}), ((66, 256, 66), {}), ((66, 66, 256), {"embedding": True})],
)
@pytest.mark.parametrize("devices", [4, 8])
def test_a_mesh_shares_out_operations_as_far_as_layers_are_sharded(monkeypatch, units, options, devices):
    """Planned operations of a device are those of its program, with layers that the mesh divides, and others of 66 units."""
    programs, measured = [], StepCompiler._measured
    monkeypatch.setattr(
        StepCompiler, "_measured", lambda self, rows, program, s: programs.append(program) or measured(self, rows, program, s)
    )  # fmt: skip
    call, target = meshed(*units, **options), parse_target(f"cpu:{devices}")
    step = StepCompiler(call, target, "model").compile(64)
    assert 1 / 4 < step.share < 1
    found = survey(call)
    operations = (64 / (devices // 4) * found.flops_per_row + found.flops_per_step) * step.share
    assert operations == pytest.approx(programs[0].cost_analysis()["flops"], rel=0.2)


def test_a_mesh_is_not_planned_if_it_shards_no_layer():
    options = {"batches": [64], "is_search": False}
    found = compile_target(meshed(66, 66), parse_target("cpu:4"), "model", **options)
    assert not found.steps
    assert found.failure.startswith("no layer is sharded over the 4 devices of the second axis, ")
    assert "Fix: " in found.failure
    assert any("is whole on each device: no axis that 4 divides" in note for note in found.notes)
    assert compile_target(meshed(66, 66), parse_target("cpu:4"), "model:2", **options).steps


@pytest.mark.parametrize(
    ("rows", "batch", "last"), [(100, 32, 4), (96, 32, None), (20, 32, 20), (None, 32, 31), (None, 1, None)]
)
def test_last_batch_is_what_is_left_of_an_epoch(rows, batch, last):
    assert last_batch(rows, batch) == last


# --- the largest batch ---------------------------------------------------------------------------------------------------------


def compiled(rows, needed, usable, is_tpu=False):
    memory = Memory(0, 0, 0, 0, needed, 0, 0)
    return CompiledStep(rows, None if is_tpu and needed > usable else memory, needed)


@settings(deadline=None)
@given(
    st.integers(0, 900), st.integers(1, 100), st.integers(0, 30), st.sampled_from([1, 2, 8]), st.booleans(), st.integers(1, 40)
)  # fmt: skip
def test_largest_batch_is_found_within_a_tenth(fixed, slope, bend, devices, is_tpu, first):
    """For memory that grows with the rows, also faster than a line, and for compilers that refuse what does not fit."""
    usable, tried = 10_000, []

    def needed(rows):
        return fixed + slope * rows + bend * rows * rows // 1000

    def step(rows):
        tried.append(rows)
        return compiled(rows, needed(rows), usable, is_tpu)

    fits, fails = largest_batch([step(devices), step(devices * first)], step, usable, devices)
    assert len(tried) <= MAX_COMPILED + 2
    rows = np.arange(devices, 10_001, devices)
    truth = rows[fixed + slope * rows + bend * rows * rows // 1000 <= usable].max(initial=0)
    assert fits <= truth
    assert fails is None or fails > truth
    close = fits and needed(fits) * CLOSE_ENOUGH >= usable
    assert (
        close or (fails is not None and fails <= max(CLOSE_ENOUGH * fits, fits + devices)) or len(tried) >= MAX_COMPILED
    )


def test_largest_batch_is_bisected_where_memory_is_no_line():
    """XLA recomputes to save memory in steps that do not fit, so that they all need about as much."""

    def step(rows):
        return compiled(rows, 18_000 + rows if rows <= 5_000 else 28_610 + rows // 1_000, 28_600)

    fits, fails = largest_batch([step(2), step(64)], step, 28_600, 2)
    assert 4_000 < fits <= 5_000 < fails < 6_000


def test_largest_batch_ends_at_a_failure_of_the_compiler():
    known = [compiled(1, 10, 100), compiled(2, 12, 100)]
    assert largest_batch(known, lambda rows: CompiledStep(rows, None, None, failure="no"), 100, 1) == (2, None)


def test_largest_batch_is_zero_if_one_row_does_not_fit():
    assert largest_batch([compiled(1, 200, 100)], None, 100, 1) == (0, 1)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.2G of 15.75G hbm.", 17.2 * 2**30),
        ("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (298.5M) exceeds available HBM (15.75G).", 298.5 * 2**20),
        ("RESOURCE_EXHAUSTED: no room", None),
    ],
)  # fmt: skip
def test_the_compilers_refusal_says_how_much_is_needed(monkeypatch, message, needed):
    _, call = planned("adam")
    compiler = StepCompiler(call, parse_target("cpu:1"), "replicated")
    monkeypatch.setattr(
        estimate_module, "repeat_row", lambda row, rows: (_ for _ in ()).throw(RuntimeError(message)), raising=True
    )
    found = compiler.compile(8)
    assert (found.memory, found.failure) == (None, "")
    assert found.needed == (needed and pytest.approx(needed, abs=2))
    assert not found.fits(None)


# --- failures ------------------------------------------------------------------------------------------------------------------


class Picky(keras.layers.Layer):
    """Fails for batches of more than five rows on a replica."""

    def call(self, inputs):
        if isinstance(inputs.shape[0], int) and inputs.shape[0] > 5:
            raise ValueError("these are too many rows")
        return inputs


def test_a_step_that_cannot_be_compiled_names_the_line_of_the_user():
    model = keras.Sequential([keras.Input((3,)), Picky(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    call = TrainingCall.of_fit(model, (np.zeros((4, 3)), np.zeros((4, 1))), {})
    found = StepCompiler(call, parse_target("cpu:2"), "replicated").compile(64)
    assert found.memory is None
    assert "these are too many rows" in found.failure
    assert f"{__file__}:" in found.failure


class Lowered:
    """A program for which XLA finds no tiles, unless cuBLAS multiplies; or one that fails for another reason."""

    def __init__(self, reason):
        self.reason = reason

    def compile(self, compiler_options=None):
        if compiler_options is None or "tiles" in self.reason:
            raise jax.errors.JaxRuntimeError(self.reason)
        return compiler_options


def test_products_for_which_xla_has_no_tiles_are_compiled_for_cublas():
    found = estimate_module._compile(Lowered("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot"))
    assert found == {"xla_gpu_enable_triton_gemm": False}
    with pytest.raises(jax.errors.JaxRuntimeError, match="no tiles"):
        estimate_module._compile(Lowered("no tiles"))


def test_describe_failure_is_one_line():
    assert describe_failure(KeyError("x")) == "KeyError: 'x'"
    assert describe_failure(RuntimeError("\n  first\nsecond")) == "RuntimeError: first"
    assert describe_failure(OptionError("all\nof it")) == "all\nof it"


@pytest.mark.parametrize("given_names", ["nothing", "", [], ["replicated", "nothing"], 3, [["replicated"]], None])
def test_check_strategies_refuses_unknown_names(given_names):
    with pytest.raises(
        OptionError,
        match='strategy: expected "auto" or some of replicated, optimizer, variables, recompute, model, model-recompute, model:8',
    ):
        check_strategies(given_names)


def test_check_strategies_keeps_the_order_and_drops_repetitions():
    assert check_strategies("auto") == tuple(STRATEGIES)
    assert check_strategies("variables,replicated,variables") == ("variables", "replicated")


def test_needed_of_a_step_is_the_sum_of_its_memory():
    memory = Memory(1, 2, 4, 64, 8, 16, 32)
    assert memory.total == 63  # Gradients are among the temporaries.
    assert dataclasses.replace(memory, temporaries=0).total == 55
