"""Places in a training where something can happen, and what can happen there. Nothing here waits for a time: a place is counted."""

import os
import signal
import time
from collections import Counter

import keras

import lockstep._atomic_files as files
import lockstep.checkpoint.serialization as format
from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint
from tests.distributed.jobs.program import tell

DAY = 24 * 3600.0


class Fault:
    """Does ``does`` where the process comes by ``at`` for the ``nth`` time; there is one a process, or none (``at`` None).

    Args:
        at: one of the places below.
        nth: from 1 on.
        does: one of ``ACTS``.
    """

    def __init__(self, at=None, nth=1, does="die"):
        self.at, self.nth, self.does = at, nth, does
        self.times = Counter()

    def come_by(self, place):
        self.times[place] += 1
        if place == self.at and self.times[place] == self.nth:
            tell(happens=place)
            ACTS[self.does]()

    def install(self):
        """Take the place of the functions that read and write, and of what hears that a step was started."""
        write_arrays, rename, delete = format.write_arrays, os.rename, files._delete
        read_array = format.read_array
        step_ended = FitCheckpoint.on_step_end

        def started(run, model, kind, state, logs):
            step_ended(run, model, kind, state, logs)
            if kind == "train":
                self.come_by("a step runs")

        def written(file, arrays):
            def half_way():
                file.flush()
                self.come_by("the arrays are written")

            return write_arrays(file, HalfWritten(arrays, half_way))

        def renamed(source, target):
            is_new = files.WRITTEN in str(source)
            self.come_by("before it has its name" if is_new else "before an old one goes")
            rename(source, target)
            if is_new:
                self.come_by("between rename and cleanup")

        def deleted(path):
            self.come_by("an old one is deleted")
            delete(path)

        def read(*given):
            self.come_by("an array is read")
            return read_array(*given)

        FitCheckpoint.on_step_end, format.read_array = started, read
        format.write_arrays, files._delete, os.rename = written, deleted, renamed


class HalfWritten(dict):
    """Arrays by name; ``come_by`` is called when half of them were taken."""

    def __init__(self, arrays, come_by):
        super().__init__(arrays)
        self.come_by = come_by

    def items(self):
        for number, item in enumerate(super().items()):
            if number == len(self) // 2:
                self.come_by()
            yield item


class Places(keras.callbacks.Callback):
    """The places that callbacks see."""

    def __init__(self, fault):
        super().__init__()
        self.come_by = fault.come_by

    def on_train_begin(self, logs=None):
        self.come_by("training begins")

    def on_train_batch_begin(self, batch, logs=None):
        self.come_by("a step begins")

    def on_train_batch_end(self, batch, logs=None):
        self.come_by("a step has ended")

    def on_test_batch_end(self, batch, logs=None):
        self.come_by("validation")

    def on_epoch_end(self, epoch, logs=None):
        self.come_by("an epoch ends")

    def on_train_end(self, logs=None):
        self.come_by("training ends")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    """Until somebody has it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    raise ValueError("the labels of this batch are missing")


def set_the_clock_back():
    now = time.time
    time.time = lambda: now() - DAY


ACTS = {"die": die, "stop": stop, "fail": fail, "set the clock back": set_the_clock_back}
