"""Law 1 for programs after Keras's examples: the numbers of plain Keras on one device, and no fallback without a line."""

import functools
import logging

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.doctor.base import FitCall
from lockstep.doctor.check_lists import call_findings
from tests.laws.compare import assert_close
from tests.laws.naive import naive_fit

from .every import PROGRAMS
from .kit import ROWS, Noise
from .page import PAGE, text

# By area, and what is each time another kind of thing: an own step, several inputs, masks, a fallback. Those that compile
# longest, of vision and audio, are in the nightly set, as their layers are in tests/laws/cases.py and tests/execution/rowwise.
IN_THE_SUITE = {
    *(
        "spatial_transformer",
        "knowledge_distillation",
        "ner_transformers",
        "text_classification_with_switch_transformer",
    ),
    *("timeseries_traffic_forecasting", "wgan_gp", "gat_node_classification", "wide_deep_cross_networks"),
    "collaborative_filtering_for_movielens",
}
TOPOLOGIES = [(3, 2, False), (2, 1, False), (3, 1, False), (2, 2, False), (3, 2, True)]


def model_of(program, noise, strategy=None):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    if strategy is None:
        return program.build(noise)
    with strategy.scope():
        return program.build(noise)


def results_of(model, program, folder):
    """What a training leaves: logs, variables, and unless the program makes no predictions its evaluation and predictions."""
    data = program.data(np.random.default_rng(8))
    options = {"batch_size": 7, "verbose": 0}
    found = {
        f"history {k}": np.asarray(v) for k, v in model.fit(**data, epochs=3, shuffle=False, **options).history.items()
    }
    found |= {
        f"{n} {v.path}": np.asarray(v.value) for n, v in enumerate([*model.variables, *model.optimizer.variables])
    }
    if program.fit_only:
        return found
    found |= {f"evaluate {k}": np.asarray(v) for k, v in model.evaluate(**data, return_dict=True, **options).items()}
    predictions = keras.tree.flatten(model.predict(data["x"], **options))
    model.save_weights(folder / "kept.weights.h5")
    for variable in model.trainable_variables:
        variable.assign(0 * variable.value)
    model.load_weights(folder / "kept.weights.h5")
    again = keras.tree.flatten(model.predict(data["x"], **options))
    for one, other in zip(predictions, again, strict=True):
        np.testing.assert_array_equal(one, other)
    return found | {f"predictions {number}": each for number, each in enumerate(predictions)}


def is_of_keras_alone(model):
    """Whether Keras can make the model again without classes of the program."""
    parts = [model, model.loss, *model._flatten_layers()]
    return all(type(part).__module__.startswith(("keras.", "builtins")) for part in parts)


def assert_saved_as_a_whole(model, program, predictions, folder):
    """A model that was trained by replicas is one for plain Keras, too: its variables to the bit, its predictions nearly."""
    model.save(folder / "kept.keras")
    again = keras.models.load_model(folder / "kept.keras")
    for one, other in zip(
        [*model.weights, *model.optimizer.variables], [*again.weights, *again.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(np.asarray(other.value), np.asarray(one.value), one.path)
    data = program.data(np.random.default_rng(8))
    for number, found in enumerate(keras.tree.flatten(again.predict(data["x"], batch_size=7, verbose=0))):
        assert_close(found, predictions[f"predictions {number}"], program.relative, f"predictions {number}")


@functools.cache
def plain(program, folder):
    return results_of(model_of(program, Noise()), program, folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


def cases():
    for program in PROGRAMS:
        for topology in TOPOLOGIES:
            in_suite = program.name in IN_THE_SUITE and topology == TOPOLOGIES[0]
            name = "{}-R{}P{}{}".format(program.name, *topology[:2], "-deterministic" * topology[2])
            marks = [pytest.mark.xdist_group(program.name), pytest.mark.slow if in_suite else pytest.mark.nightly]
            yield pytest.param(program, *topology, id=name, marks=marks)


@pytest.mark.parametrize(("program", "replicas", "devices", "deterministic"), list(cases()))
def test_a_program_has_the_numbers_of_plain_keras(program, replicas, devices, deterministic, folder, tmp_path, caplog):
    expected = plain(program, folder)
    strategy = lockstep.MirroredStrategy(
        [f"cpu:{number}" for number in range(devices)], replicas=replicas, deterministic=deterministic
    )
    with caplog.at_level(logging.INFO, logger="lockstep"):
        model = model_of(program, Noise(), strategy)
        found = results_of(model, program, tmp_path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        own = program.relative_of_momenta if name.endswith("_momentum") else None
        assert_close(found[name], value, own or program.relative, name)
    lines = [record.getMessage() for record in caplog.records if "global batch" in record.getMessage()]
    reasons = (
        [program.global_batch, "with deterministic=True only the model itself"]
        if deterministic
        else [program.global_batch]
    )
    if program.global_batch and (devices > 1 or deterministic):
        assert lines
    assert all(any(reason and reason in line for reason in reasons) for line in lines), lines
    if is_of_keras_alone(model):
        assert_saved_as_a_whole(model, program, found, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("program", [pytest.param(program, id=program.name) for program in PROGRAMS])
def test_the_doctor_has_no_finding_in_a_program(program):
    model = model_of(program, Noise(rate=0.3, by_batch=True), lockstep.MirroredStrategy(["cpu:0"]))
    data = program.data(np.random.default_rng(8))
    call = FitCall(model, data["x"], data.get("y"), data.get("sample_weight"), {"batch_size": ROWS})
    assert call_findings(call) == []


# A normalization comes before an activation with a kink at 0. On a replica with one row it is 0 but for a rounding, whose sign the
# gradient of the activation reads: no replica has one row.
KINKED = {"movielens_recommendations_transformers", "wide_deep_cross_networks"}


def noisy():
    for program in PROGRAMS:
        if program.has_noise:
            mark = pytest.mark.slow if program.name == "wide_deep_cross_networks" else pytest.mark.nightly
            yield pytest.param(program, marks=[mark, pytest.mark.xdist_group(program.name)])


@pytest.mark.parametrize("program", list(noisy()), ids=str)
def test_with_dropout_and_batch_normalization_it_does_what_the_written_out_loop_does(program):
    noise, data = Noise(0.3, by_batch=True), program.data(np.random.default_rng(8))
    rows, size = (16, 8) if program.name in KINKED else (ROWS, 7)
    x, y = jax.tree.map(lambda array: array[:rows], (data["x"], data["y"]))
    expected = model_of(program, noise)
    naive_fit(expected, x, y, batch_size=size, replicas=3, epochs=2)
    model = model_of(program, noise, lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3))
    model.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0)
    for ours, theirs in zip(model.variables, expected.variables, strict=True):
        value = np.asarray(theirs.value)
        # A bias before a batch normalization has a gradient of nothing but rounding.
        is_rounding = ours.path.endswith("/bias") and np.abs(value).max() < 2e-7
        assert_close(np.asarray(ours.value), value, 3e-5 if is_rounding else 1e-5, ours.path)


def test_the_page_says_what_the_programs_say():
    assert PAGE.read_text() == text()


def test_programs_of_the_suite_are_there():
    names = [program.name for program in PROGRAMS]
    assert set(names) >= IN_THE_SUITE
    assert len(set(names)) == len(names) >= 40
