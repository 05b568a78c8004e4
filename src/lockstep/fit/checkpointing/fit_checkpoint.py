"""One call of ``fit`` that is backed up: what it keeps, when, and how it takes up an earlier one.

Keras's loop runs as ever. Steps that an earlier process has done are skipped: the step function does nothing, and callbacks do not
hear of them. What was kept is restored where training begins, and once more where the epoch begins that was broken off, because Keras
resets metrics there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import CheckpointError, InputError
from lockstep._version import used_versions
from lockstep.checkpoint.async_writer import BackgroundWriter
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.iterator_state import IteratorState, capture_random_state, restore_random_state
from lockstep.data.keras_adapter import Hook, KerasInput
from lockstep.doctor.fit_call import FitCall
from lockstep.doctor.learning_rate_check import FitRecord, about_changed_batch, fitted, rate_of
from lockstep.doctor.settings import is_on
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.callback_state import packed_attributes, unpacked_attributes
from lockstep.fit.checkpointing.model_state import ModelVariables
from lockstep.fit.checkpointing.preemption import Preemption, leave
from lockstep.fit.checkpointing.resume_message import ResumePosition, about_other_versions

__all__ = ["FitCheckpoint", "Found"]

Found = tuple[int, Mapping[str, np.ndarray], Mapping[str, Any]]  # number of steps, arrays and facts of a checkpoint
_CHANGED_BY_VALIDATION = ("non_trainable", "metrics")


@dataclass(frozen=True)
class _Moment:
    """What is kept besides the variables and the callbacks: where training stands.

    Args:
        epoch: the one that is begun, or begins next.
        done: number of its steps that are done.
        is_epoch_over: whether these were all.
        position: in the data.
        hooks: what the data's own code has done.
        random: state of the global generators.
        values: of variables that have others by the time of writing.
    """

    epoch: int
    done: int
    is_epoch_over: bool
    position: IteratorState | None
    hooks: list[Hook]
    random: dict[str, Any]
    values: dict[str, Any]


class FitCheckpoint:
    """Restores and keeps the state of one call of ``fit``.

    Args:
        backup: what was asked for.
        model: a compiled model.
        data: its input.
        setup: what must be the same in a run that goes on.
        found: the checkpoint to go on from, or None.
        store: takes checkpoints; None on workers that do not write.
        preemption: says when all processes stop.
        announce: takes a line for the user.
    """

    def __init__(
        self,
        backup: BackupAndRestore,
        model: keras.Model,
        data: KerasInput,
        setup: dict[str, Any],
        found: Found | None,
        store: CheckpointStore | None,
        preemption: Preemption,
        announce: Callable[[str], None],
    ) -> None:
        self._backup, self._model, self._data, self._setup = backup, model, data, setup
        self._preemption, self._announce = preemption, announce
        self._writer = BackgroundWriter(store, announce=announce) if store else None
        self.callbacks: list[keras.callbacks.Callback] = []
        self._begun_with: list[dict[str, Any]] = []  # the attributes of the others
        self._variables, self._versions = ModelVariables(model), used_versions()
        self.step, self._arrays, self._facts = found or (0, {}, {})
        self.epoch: int = self._facts.get("epoch", 0)
        self.done: int = self._facts.get("batch", 0)  # steps of that epoch
        self.epochs: int = 0  # that this fit asks for, those of the earlier run included
        # Whether a callback has ended the earlier run.
        self.is_stopped = bool(self._facts.get("stop_training")) and not self.done
        self._epoch_now, self._done_now, self._epochs_done = self.epoch, 0, self.epoch
        self._before_validation: _Moment | None = None
        self._started = 0  # steps of the call that Keras tells of next; an epoch's last has fewer
        self._is_skipping = self._is_too_far = False  # whether the step that Keras is at was done by an earlier process
        self._trained: FitRecord | None = None  # how the earlier run was
        self._logs = jax.tree.map(lambda number: self._arrays[f"logs/{number}"], self._facts.get("logs", {}))
        # Gives the newest values of all variables, where they are in other processes.
        self.settle: Callable[[], Any] = lambda: None
        self.may_save: Callable[[], bool] = lambda: True  # whether a checkpoint that is due is wanted
        given = self._facts.get("position")
        self._position = IteratorState(**given) if given else None
        if found:
            self._refuse_other_setup()
            self._refuse_replay()
        data.track_position(self._position, is_expecting=found is not None)

    @property
    def is_finished(self) -> bool:
        """Whether the earlier run came to its end."""
        return bool(self._facts.get("is_finished"))

    @property
    def _others(self) -> list[keras.callbacks.Callback]:
        """The callbacks that are not ours."""
        return [callback for callback in self.callbacks if callback is not self._backup]

    # What the loop asks.

    def skips(self, epoch: int, step: int) -> bool:
        """Whether an earlier process has done this step."""
        self._is_skipping = epoch == self.epoch and (step < self.done or self._facts.get("is_epoch_over", False))
        self._is_too_far = self._is_skipping and step >= self.done
        return self._is_skipping

    def skipped(self) -> dict[str, Any] | None:
        """What the last step of the earlier process gave, where the step that comes is skipped; Keras may want it for the epoch.

        Raises:
            StopIteration: the epoch has fewer steps than Keras expects.
        """
        if self._is_too_far:
            raise StopIteration
        return self._logs if self._is_skipping else None

    def stepped(self, state: Any) -> None:
        """A step was started that will leave ``state``."""
        self._variables.state = state
        self._started += 1

    def train_begins(self) -> None:
        """All callbacks have begun."""
        self._begun_with = [packed_attributes(callback, "", None) for callback in self._others]
        if self._facts:
            self._data.set_state(self._position, self.done, self._facts["hooks"])
            self._restore()
            given = {"callbacks": self._others}  # The rate of learning is that of the checkpoint now.
            program = FitCall(self._model, None, arguments=given, rows_read=self._facts.get("rows"))
            self._trained = fitted(program, rate_of(program))
            place = ResumePosition(self.step, self.epoch, self.done, self.epochs, self.is_stopped)
            self._announce(place.told(self._backup.directory))
            changed = about_other_versions(self._facts.get("versions", self._versions), self._versions)
            if changed:
                self._announce(changed)

    def epoch_begins(self, epoch: int) -> None:
        """All callbacks have heard of it."""
        self._epoch_now, self._done_now = epoch, self.done if epoch == self.epoch else 0
        if self._done_now:  # Keras has reset the metrics, and callbacks have begun the epoch anew.
            self._restore()

    def batch_ended(self, done: int, logs: Any) -> None:
        """A step has ended, the ``done``-th of its epoch."""
        self._logs = logs or {}
        self._tell_of_batch()
        before, self.step, self._done_now, self._started = self.step, self.step + self._started, done, 0
        is_last = self._preemption.is_now()
        if is_last or self._backup.frequency.is_due(before, self.step):
            self.save(self._now(self._epoch_now, done, is_epoch_over=False))
        if is_last:
            self._leave()

    def validation_begins(self) -> None:
        """Nothing of it has changed anything yet."""
        self._before_validation = self._now(self._epoch_now, self._done_now, True, _CHANGED_BY_VALIDATION)

    def validation_goes_on(self) -> bool:
        """Whether it does after one of its steps; if not, all processes leave where it ends."""
        return not self._preemption.is_now()

    def validation_ended(self, is_whole: bool) -> None:
        """Its variables are those of the model again."""
        if not is_whole and self._before_validation:
            self.save(self._before_validation)
            self._leave()
        self._before_validation = None

    def epoch_ended(self, epoch: int) -> None:
        """An epoch, with its validation and callbacks, has ended."""
        self._variables.state, self._epochs_done = None, epoch + 1
        self.save(self._now(epoch + 1, 0, is_epoch_over=True))

    def train_ended(self) -> None:
        """Training has come to its end, and was not broken off."""
        self._variables.state = None
        self.save(self._now(self._epochs_done, 0, is_epoch_over=True), is_finished=True)
        if self._preemption.is_at_end():
            self._leave()

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

    def save(self, moment: _Moment, is_finished: bool = False) -> None:
        """Have a checkpoint written of a moment, and of the variables and callbacks as they are now."""
        if not self.may_save():
            return
        newest = self.settle()
        if newest is not None:
            self._variables.state = newest
        self._backup.frequency.saved()
        if self._writer is None:
            return
        arrays: dict[str, np.ndarray] = {}
        attributes = [
            [type(callback).__name__, packed_attributes(callback, f"callback {number}", arrays, begun_with)]
            for number, (callback, begun_with) in enumerate(zip(self._others, self._begun_with, strict=True))
        ]
        logs, structure = jax.tree.flatten(self._logs)  # A metric may have several results, in a dict.
        facts = {
            "epoch": moment.epoch,
            "batch": moment.done,
            "is_epoch_over": moment.is_epoch_over,
            "is_finished": is_finished,
            "stop_training": bool(self._model.stop_training),
            "rows": self._data.rows,
            "position": moment.position.to_json() if moment.position else None,
            "hooks": moment.hooks,
            "random": moment.random,
            "callbacks": attributes,
            "logs": jax.tree.unflatten(structure, range(len(logs))),
            "setup": self._setup,
            "replicas": self._setup["replicas"],
            "versions": self._versions,
            "variables": {name: variable.path for name, variable in self._variables.named().items()},
        }
        copies = self._variables.copies() | moment.values | {f"logs/{n}": value for n, value in enumerate(logs)}

        def snapshot() -> Snapshot:
            return Snapshot(arrays | {name: np.asarray(copy) for name, copy in copies.items()}, facts)

        self._write(self._writer, snapshot)

    def _now(self, epoch: int, done: int, is_epoch_over: bool, kinds: Iterable[str] = ()) -> _Moment:
        """This moment, with the values of some kinds of variables."""
        position, random = self._data.get_state(is_epoch_over), capture_random_state()
        values = self._variables.copies(*kinds) if kinds else {}
        return _Moment(epoch, done, is_epoch_over and done > 0, position, list(self._data.epoch_hooks), random, values)

    def _leave(self) -> None:
        leave(self._preemption, self.step, self._backup.directory, self._writer, self._announce)

    def _write(self, writer: BackgroundWriter, make: Callable[[], Snapshot]) -> None:
        try:
            writer.submit(self.step, make)
            if not self._backup.async_:
                writer.wait()
        except CheckpointError as error:
            self._announce(f"no checkpoint at step {self.step}: {error}")

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

    def _tell_of_batch(self) -> None:
        """Once, when the first step is done."""
        then, self._trained = self._trained, None
        if then and self._data.rows and is_on():
            now = replace(then, rows=self._data.rows)
            for finding in about_changed_batch(now, then, "fit", "the run that goes on"):
                self._announce(f"Model {self._model.name!r}: {finding.line}.")

    def _refuse_replay(self) -> None:
        position = self._position
        if position and not self._backup.replay and not self._data.can_seek:
            raise InputError(
                f"The {self._data.name} stands at batch {position.batches}, and its place can be found only by reading it again from its "
                "beginning: say BackupAndRestore(replay=True), or use arrays, a keras.utils.PyDataset or a function step -> batch."
            )

    def _restore(self) -> None:
        where = f"{self._backup.directory}: the checkpoint of step {self.step}"
        self._variables.set(self._arrays, self._facts["variables"], where)
        entries: list[Any] = list(self._facts["callbacks"])
        # Of several of one class, in their order; others may have come or gone.
        for callback, begun_with in zip(self._others, self._begun_with, strict=True):
            own = next((entry for entry in entries if entry[0] == type(callback).__name__), None)
            if own:
                entries.remove(own)
                unpacked_attributes(callback, own[1], self._arrays, begun_with)
        self._model.stop_training = self.is_stopped or (self._facts["stop_training"] and self.done > 0)
        if self._position is None:  # Else it belongs to the pass, which restores it.
            restore_random_state(self._facts["random"])
