"""Hooks around fit and its steps: their order, and a hook that a third party adds with one class."""

import contextlib

import keras
import pytest

import lockstep
from lockstep.callbacks import BackupAndRestore, NanGuard, ThroughputMonitor
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.fit_hooks import FitHook, entered

from .monitoring.runs import STEPS, built, fit


class Recorder(keras.callbacks.Callback, StepHook):
    """A third party's hook: records the calls that it gets in one call of fit."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.calls, self.fails_at = [], fails_at
        self.hooks = lambda: ()

    @contextlib.contextmanager
    def around_fit(self, context):
        self.calls.append("fit begins")
        with context.functions.hooked(self):
            self.hooks = lambda: context.functions.hooks
            yield
        self.calls.append("fit ends")

    def on_train_begin(self, logs=None):
        self.seen = [type(hook).__name__ for hook in self.hooks()]

    def on_fetch(self):
        self.calls.append("fetch")

    def on_step_start(self, model, kind, batch):
        self.calls.append(f"{kind} {batch[0].shape[0]}")

    def on_pause(self):
        self.calls.append("pause")

    def on_step_end(self, model, kind, state, logs):
        self.calls.append("started")
        if len(self.calls) == self.fails_at:
            raise ValueError("the third party fails")


def test_a_callback_with_around_fit_hears_of_each_step():
    recorder = Recorder()
    assert isinstance(recorder, FitHook)
    fit(built(), recorder, epochs=1)
    step = ["fetch", "train 8", "started"]
    assert recorder.calls == ["fit begins", *(STEPS * step), "fit ends"]


def test_step_hooks_have_the_order_of_the_fit_hooks(tmp_path):
    recorder = Recorder()
    fit(built(), NanGuard(), BackupAndRestore(tmp_path), recorder, ThroughputMonitor())
    assert recorder.seen == ["StepTimer", "FlopCounter", "Recorder", "FitCheckpoint", "StepGuard"]


@pytest.mark.parametrize(("is_async", "pauses"), [(True, []), (False, ["pause", "pause"])])
def test_hooks_hear_of_a_checkpoint_that_steps_wait_for(is_async, pauses, tmp_path):
    recorder = Recorder()
    fit(built(), BackupAndRestore(tmp_path, async_=is_async), recorder, epochs=1)
    assert [call for call in recorder.calls if call == "pause"] == pauses


def test_a_hook_ends_with_its_call_of_fit():
    model = built()
    before = model._lockstep_functions.hooks
    with pytest.raises(ValueError, match="the third party fails"):
        fit(model, Recorder(fails_at=4), ThroughputMonitor())
    assert model._lockstep_functions.hooks is before


def test_an_argument_is_refused_before_a_hook_has_an_effect(tmp_path):
    recorder = Recorder()
    with pytest.raises(lockstep.OptionError, match="expected one NanGuard, got 2"):
        fit(built(), NanGuard(), NanGuard(), BackupAndRestore(tmp_path / "run"), recorder)
    assert not recorder.calls
    assert not (tmp_path / "run").exists()


def test_the_first_hook_is_the_outermost():
    events = []

    class Hook:
        def __init__(self, name):
            self.name = name

        def around_fit(self, context):
            events.append(f"asked {self.name}")
            return self.opened()

        @contextlib.contextmanager
        def opened(self):
            events.append(f"in {self.name}")
            yield
            events.append(f"out {self.name}")

    with entered([Hook("a"), Hook("b")], None):
        pass
    assert events == ["asked a", "asked b", "in a", "in b", "out b", "out a"]


def test_the_last_step_hook_replaces_the_step():
    class Constant(StepHook):
        def __init__(self, loss):
            self.loss = loss

        def replaced_step(self, gated_step):
            return lambda state, batch: ({"loss": self.loss}, state)

    functions, given = built()._lockstep_functions, ("weights", "counts", "moments", "sums")
    with functions.hooked(Constant(1.0), StepHook(), Constant(2.0)):
        logs, state = functions.make("train")(given, iter([None]))
    assert (logs, state) == ({"loss": 2.0}, given)
