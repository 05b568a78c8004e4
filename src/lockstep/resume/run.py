"""One call of ``fit`` that is backed up: what it keeps, when, and how it takes up an earlier one.

Keras's loop runs as ever. Steps that an earlier process has done are skipped: the step function does nothing, and callbacks do not
hear of them. What was kept is restored where training begins, and once more where the epoch begins that was broken off, because Keras
resets metrics there.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from lockstep import _keras
from lockstep._errors import CheckpointError, InputError
from lockstep.checkpoint.background import BackgroundWriter
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.inputs import Input
from lockstep.data.position import Position
from lockstep.data.random_state import captured_random_state, restore_random_state
from lockstep.resume.backup import BackupAndRestore
from lockstep.resume.checkpoint import copies_of
from lockstep.resume.values import packed_attributes, unpacked_attributes

__all__ = ["BackedUpFit", "Found"]

Found = tuple[int, Mapping[str, np.ndarray], Mapping[str, Any]]  # number of steps, arrays and facts of a checkpoint
_KINDS = ("trainable", "non_trainable", "optimizer", "metrics")


class BackedUpFit:
    """Restores and keeps the state of one call of ``fit``.

    Args:
        backup: what was asked for.
        model: a compiled model.
        data: its input.
        setup: what must be the same in a run that goes on.
        found: the checkpoint to go on from, or None.
        store: takes checkpoints; None on workers that do not write.
        announce: takes a line for the user.
        clock: gives seconds, and is not set back.
    """

    def __init__(
        self,
        backup: BackupAndRestore,
        model: keras.Model,
        data: Input,
        setup: dict[str, Any],
        found: Found | None,
        store: CheckpointStore | None,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backup, self._model, self._data, self._setup = backup, model, data, setup
        self._announce, self._clock = announce, clock
        self._writer = BackgroundWriter(store, announce=announce) if store else None
        self.callbacks: list[keras.callbacks.Callback] = []
        self._state: Any = None  # what the last step gave
        self.step, self._arrays, self._facts = found or (0, {}, {})
        self.epoch: int = self._facts.get("epoch", 0)
        self.done: int = self._facts.get("batch", 0)  # steps of that epoch
        self._saved_at, self._epoch_now, self._epochs_done = clock(), self.epoch, self.epoch
        self.may_save: Callable[[], bool] = lambda: True  # whether a checkpoint that is due is wanted
        self.is_skipping = False  # whether the step that Keras is at was done by an earlier process
        given = self._facts.get("position")
        self._position = Position(**given) if given else None
        if found:
            self._refuse_other_setup()
            self._refuse_replay()
        data.keep_position(self._position, is_expecting=found is not None)

    @property
    def is_finished(self) -> bool:
        """Whether the earlier run came to its end."""
        return bool(self._facts.get("is_finished"))

    # What the loop asks.

    def skips(self, epoch: int, step: int) -> bool:
        """Whether an earlier process has done this step."""
        self.is_skipping = epoch == self.epoch and step < self.done
        return self.is_skipping

    def stepped(self, state: Any) -> None:
        """A step was started that will leave ``state``."""
        self._state = state

    def train_begins(self) -> None:
        """All callbacks have begun."""
        if self._facts:
            self._data.go_on_from(self._position, self.done, self._facts["hooks"])
            self._restore()
            at = f"step {self.step}: epoch {self.epoch + 1}, after {self.done} of its steps"
            self._announce(f"goes on from {self._backup.directory} at {at}")

    def epoch_begins(self, epoch: int) -> None:
        """All callbacks have heard of it."""
        self._epoch_now = epoch
        if epoch == self.epoch and self.done:  # Keras has reset the metrics, and callbacks have begun the epoch anew.
            self._restore()

    def batch_ended(self, done: int) -> None:
        """A step has ended, the ``done``-th of its epoch."""
        before, self.step = self.step, self.step + self._model.steps_per_execution
        steps, seconds = self._backup.save_steps, self._backup.save_seconds
        if (steps and self.step // steps > before // steps) or (seconds and self._clock() - self._saved_at >= seconds):
            self.save(self._epoch_now, done, self._data.where(is_epoch_over=False))

    def epoch_ended(self, epoch: int) -> None:
        """An epoch, with its validation and callbacks, has ended."""
        self._state, self._epochs_done = None, epoch + 1
        self.save(epoch + 1, 0, self._data.where(is_epoch_over=True))

    def train_ended(self) -> None:
        """Training has come to its end, and was not broken off."""
        self._state = None
        self.save(self._epochs_done, 0, self._data.where(is_epoch_over=True), is_finished=True)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer:
            self._writer.close()

    def newest(self) -> Found | None:
        """The newest good checkpoint of the directory; None on workers that do not write."""
        if self._writer is None:
            return None
        self._writer.wait()
        loaded = self._writer.store.newest()
        return (loaded.step, loaded.snapshot.arrays, loaded.snapshot.facts) if loaded else None

    # Keeping.

    def save(self, epoch: int, done: int, position: Position | None, is_finished: bool = False) -> None:
        """Have a checkpoint written of how things are now."""
        if not self.may_save():
            return
        self._saved_at = self._clock()
        if self._writer is None:
            return
        arrays: dict[str, np.ndarray] = {}
        attributes = [
            [type(callback).__name__, packed_attributes(callback, f"callback {number}", arrays)]
            for number, callback in enumerate(self.callbacks)
        ]
        facts = {
            "epoch": epoch,
            "batch": done,
            "is_finished": is_finished,
            "stop_training": bool(self._model.stop_training),
            "position": position.as_facts() if position else None,
            "hooks": list(self._data.hooks),
            "random": captured_random_state(),
            "callbacks": attributes,
            "setup": self._setup,
            "variables": {name: variable.path for name, variable in _variables(self._model).items()},
        }
        values = self._values()
        copies = copies_of(list(values.values()))  # Here, because the next step takes the memory of this one's state.

        def snapshot() -> Snapshot:
            return Snapshot(arrays | dict(zip(values, map(np.asarray, copies), strict=True)), facts)

        self._write(self._writer, snapshot)

    def _write(self, writer: BackgroundWriter, make: Callable[[], Snapshot]) -> None:
        try:
            writer.submit(self.step, make)
            if not self._backup.async_:
                writer.wait()
        except CheckpointError as error:
            self._announce(f"no checkpoint at step {self.step}: {error}")

    def _values(self) -> dict[str, Any]:
        """The variables' values by name, also in the middle of an epoch, where Keras's variables do not have them."""
        variables = _variables(self._model)
        if self._state is None or _keras.is_synced(self._model):
            return {name: variable.value for name, variable in variables.items()}
        return dict(zip(variables, (array for part in self._state for array in part), strict=True))

    # Taking up.

    def _refuse_other_setup(self) -> None:
        then = self._facts["setup"]
        changed = [name for name in self._setup if then.get(name) != self._setup[name]]
        if changed and not self._backup.allow_changes:
            lines = "; ".join(f"{name}: {then.get(name)} then, {self._setup[name]} now" for name in changed)
            raise CheckpointError(
                f"{self._backup.directory}: the checkpoint of step {self.step} is from a run with another set-up, and going on would "
                f"give other numbers than either: {lines}. Make it the same, say BackupAndRestore(allow_changes=True), or take another directory."
            )

    def _refuse_replay(self) -> None:
        position = self._position
        if position and not self._backup.replay and not self._data.can_seek:
            raise InputError(
                f"The {self._data.name} stands at batch {position.batches}, and its place can be found only by reading it again from its "
                "beginning: say BackupAndRestore(replay=True), or use arrays, a keras.utils.PyDataset or a function step -> batch."
            )

    def _restore(self) -> None:
        variables = _variables(self._model)
        for name, variable in variables.items():
            kept = self._arrays.get(name)
            if kept is None or kept.shape != tuple(variable.shape):
                found = "nothing" if kept is None else f"{self._facts['variables'][name]} of shape {kept.shape}"
                raise CheckpointError(
                    f"{self._backup.directory}: the checkpoint of step {self.step} is of another model: for {variable.path} of shape "
                    f"{tuple(variable.shape)} it has {found}. Build the model as it was, or take another directory."
                )
        for name, variable in variables.items():
            variable.assign(self._arrays[name])
        entries: list[Any] = list(self._facts["callbacks"])
        for callback in self.callbacks:  # Of several of one class, in their order; others may have come or gone.
            own = next((entry for entry in entries if entry[0] == type(callback).__name__), None)
            if own:
                entries.remove(own)
                unpacked_attributes(callback, own[1], self._arrays)
        self._model.stop_training = self._facts["stop_training"]
        if self._position is None:  # Else it belongs to the pass, which restores it.
            restore_random_state(self._facts["random"])


def _variables(model: keras.Model) -> dict[str, keras.Variable]:
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    groups = zip(_KINDS, kinds, strict=True)
    return {f"{kind}/{number}": x for kind, group in groups for number, x in enumerate(group)}
