"""Law 5: import changes nothing, a scope restores what it changed, strategies coexist, a model keeps its strategy."""

import contextlib
import contextvars
import functools
import gc
import logging
import subprocess
import sys
import threading
import weakref

import jax
import keras
import numpy as np
import pytest

import lockstep

from .compare import Central, Topology, assert_close, state_of

X = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
Y = X[:, :1]


def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])


def compiled(model=None):
    model = model or network()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def fitted(model, **options):
    model.fit(X, Y, **({"batch_size": 4, "shuffle": False, "verbose": 0} | options))
    return state_of(model)


def assert_trained_like_one_device(model):
    ours, plain = fitted(model), fitted(compiled())
    for (name, value), theirs in zip(ours.items(), plain.values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


def devices_of(model):
    return len(model.trainable_variables[0].value.sharding.device_set)


@pytest.mark.slow
def test_import_changes_nothing_and_starts_nothing():
    program = """
import logging, os, signal, sys, threading
def state():
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return dict(os.environ), list(sys.meta_path), list(logging.root.handlers), threading.active_count(), sys.excepthook, signals
before = state()
import lockstep
assert state() == before
assert "keras" not in sys.modules and "jax" not in sys.modules
import jax, keras  # which set environment variables of their own
before = state()
lockstep.MirroredStrategy, lockstep.config, lockstep.datasets
assert state() == before
assert not logging.getLogger("lockstep").handlers
jax.config.update("jax_num_cpu_devices", 2)  # raises where JAX has started
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_without_a_backend_for_keras_the_error_says_what_to_set():
    program = """
import importlib, os, sys
os.environ.pop("KERAS_BACKEND", None)
sys.modules["tensorflow"] = None
import lockstep

def is_refused(use, name):
    try:
        use(name)
    except lockstep.BackendError as error:
        assert "Fix: set os.environ[\\"KERAS_BACKEND\\"]" in str(error)
        return True
    return False

names = [name for name in dir(lockstep) if not name.startswith("_")]
refused = {name for name in names if is_refused(lambda name: getattr(lockstep, name), name)}
assert refused >= {"MirroredStrategy", "callbacks", "config", "datasets", "experimental"}, refused
for name in ("callbacks", "config", "datasets", "experimental"):
    assert is_refused(importlib.import_module, f"lockstep.{name}"), name
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_model_remembers_its_strategy_outside_of_the_scope_and_after_compile():
    strategy = Topology(2, 2).strategy()
    with strategy.scope():
        model = compiled()
    assert_trained_like_one_device(model)
    assert devices_of(model) == 2
    compiled(model)
    fitted(model)
    assert devices_of(model) == 2


@pytest.mark.slow
def test_fit_inside_the_scope_works_too():
    with Topology(3, 2).strategy().scope():
        assert_trained_like_one_device(compiled())


@pytest.mark.slow
def test_built_in_the_scope_and_compiled_outside():
    with Topology(2, 2).strategy().scope():
        model = network()
    assert_trained_like_one_device(compiled(model))
    assert devices_of(model) == 2


@pytest.mark.slow
def test_built_outside_and_compiled_in_the_scope():
    model = network()
    with Topology(2, 2).strategy().scope():
        compiled(model)
    assert_trained_like_one_device(model)
    assert devices_of(model) == 2


@pytest.mark.slow
def test_built_and_compiled_outside_and_used_in_the_scope():
    model = compiled()
    with Topology(2, 2).strategy().scope():
        trained = fitted(model)
    for (name, value), theirs in zip(trained.items(), fitted(compiled()).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)
    assert devices_of(model) == 2


class OwnFit(keras.Sequential):
    """Waits in its fit, for a test of threads."""

    def fit(self, *args, between=lambda: None, **options):
        between()
        return super().fit(*args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [keras.Sequential, OwnFit])
def test_the_first_fit_in_the_scope_has_the_hooks_of_the_strategy(kind, tmp_path):
    model = compiled(kind(network().layers))
    with Topology(2, 2).strategy().scope():
        fitted(model, callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path / "run")])
    assert list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"])
def test_the_first_call_in_the_scope_is_checked(name):
    model = compiled()
    with Topology(2, 2).strategy().scope(), pytest.raises(lockstep.InputError, match=f"{name}: x"):
        getattr(model, name)(np.array([["text"]], object))


@pytest.mark.parametrize("opens_first", ["scope", "fit"])
def test_a_scope_and_an_own_fit_of_two_threads_end_in_any_order(opens_first, tmp_path):
    before = [vars(cls) for cls in keras.Model.__mro__]
    before = [dict(each) for each in before]
    strategy, (is_in_fit, goes_on) = Topology(2, 2).strategy(), (threading.Event(), threading.Event())
    with strategy.scope():
        model = compiled(OwnFit(network().layers))
    path = tmp_path / "run"

    def between():
        is_in_fit.set()
        assert goes_on.wait(60)

    def fit():
        fitted(model, between=between, callbacks=[lockstep.callbacks.BackupAndRestore(path)])

    thread = threading.Thread(target=fit)
    scope = contextlib.ExitStack()
    if opens_first == "scope":
        scope.enter_context(strategy.scope())
    thread.start()
    assert is_in_fit.wait(60)
    if opens_first == "scope":
        scope.close()
    else:
        scope.enter_context(strategy.scope())
    goes_on.set()
    thread.join(60)
    scope.close()
    assert list(path.iterdir())
    assert before == [dict(vars(cls)) for cls in keras.Model.__mro__]


def test_a_model_that_was_trained_before_goes_on_under_a_strategy():
    plain, ours = compiled(), compiled()
    fitted(plain)
    fitted(ours)
    with Topology(2, 2).strategy().scope():
        fitted(ours)
    fitted(plain)
    for (name, value), theirs in zip(state_of(ours).items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


def test_outside_of_every_scope_keras_is_as_it_was():
    with Topology(2, 2).strategy().scope():
        pass
    model = compiled()
    fitted(model)
    assert devices_of(model) == 1


@pytest.mark.slow
def test_four_strategies_in_one_process():
    topologies = [Topology(1, 1), Topology(2, 2), Topology(4, 3), Central(3, 3, home="cpu:4")]
    strategies = [topology.strategy() for topology in topologies]
    models = []
    for strategy in strategies:
        with strategy.scope():
            models.append(compiled())
    for model in reversed(models):
        assert_trained_like_one_device(model)
    assert [devices_of(model) for model in models] == [1, 2, 3, 1]


@pytest.mark.slow
def test_scopes_of_one_strategy_may_be_nested():
    strategy = Topology(2, 2).strategy()
    with strategy.scope() as outer, strategy.scope() as inner:
        assert outer is inner is strategy
        model = compiled()
    assert_trained_like_one_device(model)


def test_scopes_of_two_strategies_cannot_be_nested():
    first, second = Topology(2, 2).strategy(), Topology(3, 2).strategy()
    with (
        first.scope(),
        pytest.raises(lockstep.ScopeError, match=r"Strategies cannot be mixed: the scope of .*replicas=2.*replicas=3"),
        second.scope(),
    ):
        pass


@pytest.mark.slow
def test_a_model_of_one_strategy_cannot_be_used_in_the_scope_of_another():
    with Topology(2, 2).strategy().scope():
        model = compiled()
    with Topology(3, 2).strategy().scope(), pytest.raises(lockstep.ScopeError, match="use it outside that scope"):
        fitted(model)
    assert_trained_like_one_device(model)


def test_compiling_a_model_of_one_strategy_in_the_scope_of_another_is_refused():
    with Topology(2, 2).strategy().scope():
        model = compiled()
    with Topology(3, 2).strategy().scope(), pytest.raises(lockstep.ScopeError, match="use it outside that scope"):
        compiled(model)


@pytest.mark.slow
def test_scopes_may_close_in_any_order():
    strategy = Topology(2, 2).strategy()
    first, second = strategy.scope(), strategy.scope()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    average = jax.jit(lambda losses: lockstep.compute_average_loss(losses))
    losses = np.full(3, 2.0)
    assert float(average(losses)) == 2.0
    with strategy.scope():
        assert float(average(losses)) == 1.0  # It is traced anew here.
    with Topology(3, 3).strategy().scope():
        model = compiled()
    fitted(model)
    assert devices_of(model) == 3


def test_a_scope_in_a_thread_that_has_the_context_of_a_scope_is_one_for_compiled_functions():
    strategy, found = Topology(2, 2).strategy(), []
    average = jax.jit(lambda losses: lockstep.compute_average_loss(losses))
    assert float(average(np.full(3, 2.0))) == 2.0

    def in_scope():
        with strategy.scope():
            found.append(float(average(np.full(3, 2.0))))

    with strategy.scope():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(in_scope,))
        thread.start()
        thread.join()
    assert found == [1.0]


@pytest.mark.slow
def test_a_step_may_call_a_model_of_another_strategy():
    """A teacher in a host callback: the lock for starting a step must be reentrant."""
    with Topology(1, 1).strategy().scope():
        teacher = compiled()

    class Student(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            shape = jax.ShapeDtypeStruct(y_pred.shape, y_pred.dtype)
            target = jax.pure_callback(lambda value: teacher.predict_on_batch(np.asarray(value)), shape, x)
            return keras.ops.mean((y_pred - target) ** 2)

    with Topology(2, 1).strategy().scope():
        student = Student([keras.Input((4,)), keras.layers.Dense(1)])
        student.compile("sgd")
    assert np.isfinite(student.fit(X, Y, verbose=0).history["loss"]).all()


def test_an_exception_in_a_scope_closes_it():
    strategy = Topology(2, 2).strategy()
    with pytest.raises(ZeroDivisionError), strategy.scope():
        1 / 0  # noqa: B018
    model = compiled()
    fitted(model)
    assert devices_of(model) == 1


def test_a_keras_distribution_is_refused():
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        with pytest.raises(lockstep.ScopeError, match=r"set_distribution\(None\)"), Topology(2, 2).strategy().scope():
            pass
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch"])
def test_a_keras_distribution_that_is_set_later_is_refused(method, is_inside):
    strategy = Topology(2, 2).strategy()
    with strategy.scope():
        model = compiled()
    model.fit(X, Y, verbose=0)
    weights = model.get_weights()
    given = (X[:8],) if method == "predict" else (X[:8], Y[:8])
    with strategy.scope() if is_inside else contextlib.nullcontext():
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
        try:
            with pytest.raises(lockstep.ScopeError, match=r"set_distribution\(None\)"):
                getattr(model, method)(*given)
        finally:
            keras.distribution.set_distribution(None)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    fitted(model)


@pytest.mark.slow
def test_clear_session_breaks_nothing():
    strategy = Topology(2, 2).strategy()
    keras.backend.clear_session()
    with strategy.scope():
        keras.backend.clear_session()
        model = compiled()
    keras.backend.clear_session()
    assert_trained_like_one_device(model)
    assert devices_of(model) == 2


@pytest.mark.slow
def test_an_unreferenced_model_is_freed():
    strategy = Topology(2, 1).strategy()

    def trained():
        with strategy.scope():
            model = compiled()
        fitted(model)
        return weakref.ref(model)

    found = trained()
    gc.collect()
    assert found() is None


def test_another_thread_does_not_see_the_scope():
    made = []
    with Topology(2, 2).strategy().scope():
        thread = threading.Thread(target=lambda: made.append(compiled()))
        thread.start()
        thread.join(timeout=60)
    fitted(made[0])
    assert devices_of(made[0]) == 1


@pytest.mark.slow
def test_two_threads_train_at_the_same_time():
    def work(replicas, results):
        with Topology(replicas, 2).strategy().scope():
            model = network()
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        model.set_weights(start)
        results[replicas] = fitted(model, epochs=5)

    start, results = network().get_weights(), {}
    threads = [threading.Thread(target=work, args=(replicas, results), daemon=True) for replicas in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results.keys() == {2, 3}, "a thread did not end"
    expected = fitted(compiled(), epochs=5)
    for found in results.values():
        for (name, value), theirs in zip(found.items(), expected.values(), strict=True):
            assert_close(value, theirs, 2e-5, name)  # 15 steps, at 1e-6 a step, and Adam's first ones magnify


@pytest.mark.slow
def test_threads_that_trace_replicas_at_the_same_time_leave_models_as_they_were():
    strategy = Topology(2, 2).strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    (batch,) = strategy.experimental_distribute_dataset([X[:4]])
    values = [
        [variable.value for variable in kind] for kind in (model.trainable_variables, model.non_trainable_variables)
    ]

    def normalized(rows, enter=lambda: None):
        outputs, _ = model.stateless_call(*values, rows, training=True)
        enter()
        return outputs

    def run(enter, found):
        found.append(strategy.gather(strategy.run(functools.partial(normalized, enter=enter), args=(batch,)), axis=0))

    def first_enters():
        entered.set()
        both.wait(0.5)  # In vain, unless both are traced at once.

    def second_enters():
        both.set()
        threads[0].join(0.5)  # Then the first one leaves first.

    entered, both, expected, found = threading.Event(), threading.Event(), [], []
    run(lambda: None, expected)
    threads = [
        threading.Thread(target=run, args=(enter, found), daemon=True) for enter in (first_enters, second_enters)
    ]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    on_one_device = normalized(X[:4])  # By a thread that traces no replica.
    for thread in threads:
        thread.join(60)
    assert "stateless_call" not in vars(model)
    np.testing.assert_array_equal(on_one_device, normalized(X[:4]))
    np.testing.assert_array_equal(found, 2 * expected)


def test_the_strategy_tells_once_what_it_does(caplog):
    with caplog.at_level(logging.INFO, logger="lockstep"):
        strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], lockstep.ReductionToOneDevice, replicas=3)
        with strategy.scope():
            compiled()
    messages = [record.getMessage() for record in caplog.records if record.name == "lockstep"]
    assert messages == [
        "MirroredStrategy: 3 replicas on 2 devices (cpu:0, cpu:1); gradients: reduce to cpu:0, then broadcast to cpu:0, cpu:1"
    ]


def test_the_line_shows_without_any_set_up_and_can_be_switched_off(python):
    show = "import lockstep; lockstep.MirroredStrategy(replicas=2)"
    level = "import logging; logging.getLogger('lockstep').setLevel('{}'); "
    done = [
        python(code=code, timeout=120) for code in (show, level.format("INFO") + show, level.format("WARNING") + show)
    ]
    assert [one.returncode for one in done] == [0, 0, 0], done
    *shown, hidden = (one.stderr for one in done)
    for said in shown:
        assert "lockstep: MirroredStrategy: 2 replicas on 1 device (cpu:0)" in said
    assert "lockstep" not in hidden


def test_a_model_that_runs_on_the_global_batch_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="lockstep"), Topology(2, 2).strategy().scope():
        layers = [keras.layers.BatchNormalization(synchronized=True, name="shared"), keras.layers.Dense(1)]
        model = compiled(keras.Sequential([keras.Input((4,)), *layers], name="net"))
        fitted(model)
        fitted(model)
    messages = [record.getMessage() for record in caplog.records if "global batch" in record.getMessage()]
    assert messages == [
        "Model 'net': it runs on the global batch, and XLA divides the work: "
        "layer 'shared' normalizes over all replicas (synchronized=True)."
    ]
