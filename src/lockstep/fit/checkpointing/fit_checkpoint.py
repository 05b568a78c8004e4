"""Checkpoints during ``fit``: the train position, when to save, and how another process resumes.

Keras's loop runs as always. Steps that an earlier process has done are skipped: the step function returns at once, and callbacks are not
called. The state is restored when training begins, and once more when the epoch of the checkpoint begins, because Keras resets
the metrics there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from lockstep._errors import CheckpointError, InputError
from lockstep._keras import trainer
from lockstep._keras.callback_state import file_to_empty, monitored, wait_for_callbacks
from lockstep._version import used_versions
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.checkpoint.serialization import Loaded, Snapshot, open_stored
from lockstep.checkpoint.store import CheckpointStore, ShardedSnapshot, ShardedStore, shared_token
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.process_group import ProcessGroup
from lockstep.data.random_state import capture_random_state, random_state_kept, restore_random_state
from lockstep.data.resumable_iterator import InputState
from lockstep.doctor.base import FitCall, doctor_enabled
from lockstep.doctor.data_checks import FitRecord, check_changed_batch, fit_record, learning_rate_of
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.callback_attributes import (
    FirstAttributes,
    first_attributes,
    numbered_logs,
    packed_attributes,
    packed_logs,
    unpacked_attributes,
)
from lockstep.fit.checkpointing.metadata_check import check_metadata
from lockstep.fit.checkpointing.model_state import ModelVariables
from lockstep.fit.checkpointing.preemption import Preemption, exit_after_checkpoint
from lockstep.fit.fit_hooks import FitContext

Found = tuple[int, Mapping[str, np.ndarray], Mapping[str, Any]]  # step, arrays and metadata of a checkpoint


class TrainPosition(NamedTuple):
    """A point between two training steps.

    Args:
        step: number of steps of the run before it.
        epoch: the epoch that runs, or comes next; from 0.
        batch: number of steps of that epoch before it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class ResumedRun:
    """The checkpoint of an earlier run, and the epochs to train now; without a checkpoint, the beginning of a new run.

    Args:
        position: position of the checkpoint.
        arrays: arrays of the checkpoint, by name.
        metadata: metadata of the checkpoint; empty for a new run.
        epochs: number of epochs that ``fit`` trains in all, those of the earlier run included.
        extends: number of epochs of a finished run that this one extends.
        is_stopped: whether a callback stopped the earlier run at the end of an epoch, so that nothing is left to train.
    """

    position: TrainPosition = field(default_factory=TrainPosition)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 0
    extends: int = 0
    is_stopped: bool = False

    @classmethod
    def from_checkpoint(cls, found: Found | None) -> "ResumedRun":
        """The run whose checkpoint was found; a new run if there is none."""
        if found is None:
            return cls()
        step, arrays, metadata = found
        position = TrainPosition(step, metadata.get("epoch", 0), metadata.get("batch", 0))
        is_stopped = bool(metadata.get("stop_training")) and not position.batch
        return cls(position, arrays, metadata, extends=metadata.get("extends", 0), is_stopped=is_stopped)

    def for_epochs(self, epochs: int, extend: bool) -> "ResumedRun":
        """Return the run with the epochs of a call of ``fit``; ``extend``: they come after those of a finished run, also if this one resumes
        such an extension.
        """
        if not extend:
            return replace(self, epochs=epochs, extends=0)
        if not self.metadata.get("is_finished"):
            return replace(self, epochs=self.extends + epochs)
        return replace(self, epochs=self.position.epoch + epochs, extends=self.position.epoch, is_stopped=False)

    @property
    def is_new(self) -> bool:
        """Whether there was no checkpoint."""
        return not self.metadata

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train."""
        return self.is_stopped or self.position.epoch >= self.epochs

    @property
    def data(self) -> InputState | None:
        """The state of the input; None for a new run."""
        return None if self.is_new else InputState.from_json(self.metadata)

    @property
    def validation(self) -> InputState | None:
        """The state of the validation input; None for a new run. Earlier versions have kept none."""
        return None if self.is_new else InputState.from_json(self.metadata.get("validation") or {"hooks": []})

    @property
    def logs(self) -> Any:
        """The logs of the last step."""
        return jax.tree.map(lambda number: self.arrays[f"logs/{number}"], numbered_logs(self.metadata.get("logs", {})))

    def has_done(self, epoch: int, batch: int) -> bool:
        """Whether the earlier run has trained this batch of this epoch, or has found the end of the epoch before it."""
        is_over: bool = self.metadata.get("is_epoch_over", False)
        return epoch == self.position.epoch and (batch < self.position.batch or is_over)

    def has_ended_before(self, epoch: int, batch: int) -> bool:
        """Whether the earlier run has found the end of the epoch before this batch."""
        return self.has_done(epoch, batch) and batch >= self.position.batch


def on_all_processes(loaded: Loaded | None, directory: Path, group: ProcessGroup) -> Found | None:
    """Return the chief's checkpoint, or None if it has none, on every process; all call this, the others with None.

    If all have the chief's directory, each reads the arrays from there, one at a time, when they are asked for. Otherwise the chief reads
    all of them and sends them.
    """
    named = group.all_gather("the newest checkpoint", [loaded.path.name, loaded.sha256] if loaded else None)[0]
    if named is None:
        return None
    own = loaded or _stored_here(directory, *named)
    is_shared = all(group.all_gather("whether all see the newest checkpoint", own is not None))
    found = own if is_shared else loaded
    content = (found.step, found.arrays, found.metadata) if found else None
    return content if is_shared else group.broadcast_from_chief(content)


def _stored_here(directory: Path, name: str, sha256: str) -> Loaded | None:
    """Return the checkpoint of this name, if it is here and is the one with that manifest, which the chief has checked."""
    try:
        loaded = open_stored(directory / name)
    except CheckpointError:
        return None
    return loaded if loaded.sha256 == sha256 else None


def resume_message(resumed: ResumedRun, directory: Path, steps: int | None = None) -> str:
    """Return the line about the resume position, which with ``steps_per_execution`` may be beyond the ``steps`` of an epoch, or why nothing is
    left to train.

    Example:
        >>> resume_message(ResumedRun(TrainPosition(step=56, epoch=3, batch=8), epochs=5), Path("run"))
        'resumes from run at step 56: epoch 4, after 8 of its steps'
    """
    position = resumed.position
    done = position.batch if steps is None else min(position.batch, steps)
    where = f"step {position.step}: epoch {position.epoch + 1}, after {done} of its steps"
    has = f"{directory} has {position.epoch} of {resumed.epochs} epochs, {position.step} steps"
    if resumed.is_stopped:
        return f"{has}, and a callback has ended it: nothing is left to train. To train more, use BackupAndRestore(extend=True); to start over, take another directory."
    if resumed.is_over:
        is_beyond = (position.epoch, position.batch) > (resumed.epochs, 0)
        beyond = f" The model is beyond these epochs: it has the weights of {where}." if is_beyond else ""
        return f"{has}: nothing is left to train.{beyond} To train more, give fit more epochs; to start over, take another directory."
    return f"resumes from {directory} at {where}"


def changed_versions_message(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return a line about packages that have changed since a checkpoint was written; None if none has.

    Example:
        >>> changed_versions_message({"jax": "0.10.0"}, {"jax": "0.10.2"})
        'results may differ in single bits from here on, as other versions compute them: jax 0.10.0 then, 0.10.2 now'
    """
    changed = [f"{name} {then.get(name)} then, {new} now" for name, new in now.items() if then.get(name) != new]
    if not changed:
        return None
    return f"results may differ in single bits from here on, as other versions compute them: {'; '.join(changed)}"


_PARTS_SECONDS = 3600.0  # for all workers to write their shards, after which the job fails
_CHANGED_BY_VALIDATION = ("non_trainable", "metrics")
# Of a callback: the name of its class with its attributes, what it monitors and what it has not replaced, and its arrays.
_Packed = tuple[list[Any], dict[str, np.ndarray]]


@dataclass(frozen=True)
class _SavePoint:
    """What a checkpoint holds besides variables and callbacks.

    Args:
        position: in the training.
        is_epoch_over: whether all steps of the epoch are done, though it has not ended.
        data: state of the input.
        validation: state of the validation input, if there is one.
        random: states of the global generators.
        values: values of variables that will have other values when the checkpoint is written.
        callbacks: the state of some callbacks, which may be another one then, by their number.
    """

    position: TrainPosition
    is_epoch_over: bool
    data: InputState
    validation: InputState | None
    random: dict[str, Any]
    values: dict[str, Any]
    callbacks: dict[int, _Packed] = field(default_factory=dict)


def _hears_validation(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback may change its state during a validation."""
    methods = (name for name in vars(keras.callbacks.Callback) if name.startswith("on_test_"))
    return any(getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) for name in methods)


class FitCheckpoint(StepHook):
    """Restores and saves the state of one call of ``fit``.

    Args:
        backup: the callback with the options.
        context: the call, of a model whose steps are compiled.
        resumed: the run to resume; a new run if there is no checkpoint.
        store: takes checkpoints; None on workers.
        preemption: finds the step after which all processes stop.

    Attributes:
        callbacks: Keras's list of all callbacks of the call.
        resumed: see above.
        is_validation_cut: whether a preemption cuts the running validation short, so that its metrics are those of some batches only.
    """

    def __init__(
        self,
        backup: BackupAndRestore,
        context: FitContext,
        resumed: ResumedRun,
        store: CheckpointStore | None,
        preemption: Preemption,
    ) -> None:
        self._backup, self._store, self._preemption = backup, store, preemption
        self._model, self._functions, self._data = context.model, context.functions, context.data
        self._process_group, self._log = context.process_group, context.log
        self._setup = context.setup | {"steps of an epoch": self._data.steps}
        validation = context.arguments.get("validation_data")
        self._validation = validation if isinstance(validation, KerasInput) else None  # Else its state is unknown.
        self._writer = AsyncWriter(store, log=self._log) if store else None
        self._writes_shards = False
        self._variables, self._versions = ModelVariables(self._model), used_versions()
        self.callbacks = keras.callbacks.CallbackList()
        # Of the other callbacks, when training began, without those that the run has changed before.
        self._first_attributes: list[FirstAttributes] = []
        # Of the checkpoint, with the paths of objects in them, by the number of the callback.
        self._resumed_attributes: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
        self._emptied_files: list[str] = []
        self.resumed, self._position, self._logs = resumed, resumed.position, resumed.logs
        self._current: tuple[int, int] | None = None  # epoch and batch of the step that Keras is at
        self._unreported_steps = 0  # steps that were started since a batch ended; with steps_per_execution several
        self._before_validation: _SavePoint | None = None
        self.is_validation_cut = False
        self._rate = _learning_rate(self._model)  # that the program has given
        self._rows: int | None = resumed.metadata.get("rows")  # of a batch that does not end a pass
        self._earlier_fit: FitRecord | None = None  # how the earlier run was trained, until it was compared
        if not resumed.is_new:
            self._check_setup()
            self._check_replay()
        if self._validation:
            self._validation.track_state(resumed.validation)
        self._data.track_state(resumed.data)

    @property
    def _other_callbacks(self) -> list[keras.callbacks.Callback]:
        return [callback for callback in self.callbacks.callbacks if callback is not self._backup]

    # Steps.

    def replayed_logs(self) -> Any:
        """See :class:`StepHook`; Keras may want the logs of the last step for the epoch."""
        if self._current is None or not self.resumed.has_done(*self._current):
            return None
        if self.resumed.has_ended_before(*self._current):
            raise StopIteration
        return self._logs

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        if kind == "train":
            self._variables.state = state
            self._unreported_steps += 1

    # Keras's loop.

    def train_will_begin(self) -> None:
        """Note the files of earlier runs that ``on_train_begin`` of callbacks empties."""
        names = filter(None, map(file_to_empty, self._other_callbacks))
        self._emptied_files = [name for name in names if Path(name).is_file() and Path(name).stat().st_size]

    def train_begins(self) -> None:
        """Restore the state, after ``on_train_begin`` of all callbacks."""
        value_of = self._variables.lookup()
        self._first_attributes = [
            first_attributes(callback, f"callback {number}", value_of)
            for number, callback in enumerate(self._other_callbacks)
        ]
        if self._variables.are_spread():
            self._share_writing()
        resumed = self.resumed
        if resumed.data is None:
            return
        if resumed.is_over:
            self._data.leave_as(resumed.data)
            if self._validation and resumed.validation:
                self._validation.leave_as(resumed.validation)
            restore_random_state(resumed.metadata["random"])
        else:
            self._resume_validation()
            self._data.set_state(resumed.data, resumed.position.batch)
        self._match_callbacks()
        self._restore()
        given = {"callbacks": self._other_callbacks}  # The learning rate is that of the checkpoint now.
        call = FitCall(self._model, None, arguments=given, rows_read=resumed.metadata.get("rows"))
        self._earlier_fit = fit_record(call, learning_rate_of(call))
        self._log(resume_message(resumed, self._backup.directory, self._data.steps))
        self._report_unused_rate()
        self._report_emptied_files()
        changed = changed_versions_message(resumed.metadata.get("versions", self._versions), self._versions)
        if changed:
            self._log(changed)

    def epoch_begins(self, epoch: int) -> None:
        """Restore the state of an epoch that is resumed, after ``on_epoch_begin`` of all callbacks."""
        batch = self.resumed.position.batch if epoch == self.resumed.position.epoch else 0
        self._position = self._position._replace(epoch=epoch, batch=batch)
        if batch:  # Keras has reset the metrics, and callbacks have begun the epoch anew.
            self._restore()
        self.resumed = replace(self.resumed, arrays={})  # They are as large as the model.

    def batch_begins(self, epoch: int, batch: int) -> bool:
        """Note the step that Keras is at; return whether there is one that an earlier process has not done."""
        self._current = (epoch, batch)
        # Of a pass that was resumed in its middle, Keras finds the end only in the step.
        is_over = self._data.is_mid_pass and self._data.is_at_end
        return not self.resumed.has_done(epoch, batch) and not is_over

    def batch_ended(self, batch: int, logs: Any) -> None:
        """Save if it is time to; ``batch`` steps of the epoch are done."""
        self._logs = logs or {}
        self._report_changed_batch()
        before = self._position
        self._position = before._replace(step=before.step + self._unreported_steps, batch=batch)
        self._unreported_steps = 0
        is_last = self._preemption.end_step()
        is_due = self._preemption.is_save_due or self._backup.frequency.is_due_by_steps(
            before.step, self._position.step
        )
        if is_last or is_due:
            self.save(self._save_point(self._position, is_epoch_over=False))
        if is_last:
            self._exit()

    def validation_begins(self) -> None:
        """Keep the state before a validation, for a preemption during it."""
        self._functions.validation_begins()
        point = self._before_reset(self._save_point(self._position, True, _CHANGED_BY_VALIDATION))
        self._before_validation = replace(point, callbacks=self._packed(self._changed_by_validation()))

    def _changed_by_validation(self) -> list[int]:
        """Return the numbers of the callbacks that hear a validation, or share objects with one that does."""
        objects = [{*map(id, first.objects.values())} for first in self._first_attributes]
        hearing = {number for number, callback in enumerate(self._other_callbacks) if _hears_validation(callback)}
        shared = set[int]().union(*(objects[number] for number in hearing))
        return [number for number, own in enumerate(objects) if number in hearing or own & shared]

    def validation_step_ended(self) -> None:
        """Note if all processes stop now, so that a preemption cuts the validation short."""
        self.is_validation_cut = self.is_validation_cut or self._preemption.end_step()

    def validation_ended(self) -> None:
        """End the process after a validation that a preemption cut short; its variables are those of the model again."""
        if self.is_validation_cut and self._before_validation:
            self.save(self._before_validation)
            self._exit()
        self._before_validation = None

    def epoch_ended(self, epoch: int) -> None:
        """Save at the end of an epoch, after its validation and callbacks."""
        self._variables.state = None
        self._position = TrainPosition(self._position.step, epoch + 1)
        self.save(self._save_point(self._position, is_epoch_over=True))

    def train_ended(self) -> None:
        """Save at the end of the training, unless an exception ended it; what is within an epoch that was not to be trained is kept."""
        self._variables.state = None
        resumed = self.resumed
        if resumed.data is None or self._position != resumed.position:
            self.save(self._save_point(self._position._replace(batch=0), is_epoch_over=True), is_finished=True)
        elif not self._position.batch and not resumed.metadata["is_finished"]:
            random = resumed.metadata["random"]
            point = _SavePoint(resumed.position, False, resumed.data, resumed.validation, random, values={})
            self.save(point, is_finished=True)
        if self._preemption.end_training():
            self._exit()

    def close(self) -> None:
        """Wait for checkpoints that are being written."""
        if self._writer:
            self._writer.close()

    def newest(self, names: Iterable[str]) -> tuple[int, dict[str, np.ndarray]] | None:
        """Return the step and some arrays of the newest good checkpoint; all processes call this."""
        loaded = None
        if self._writer and self._store:
            with self._process_group.saving():
                self._writer.wait()
                loaded = self._store.newest(self._check, keep_stored=True)
        found = on_all_processes(loaded, self._backup.directory, self._process_group)
        if found is None:
            return None
        arrays = {name: found[1][name] for name in names}
        self._wait_until_all_have_read()
        return found[0], arrays

    def _check(self, loaded: Loaded) -> None:
        """Raise CheckpointError for a checkpoint that was not written by this run."""
        check_metadata(loaded, self._other_callbacks)
        self._variables.check(loaded.arrays, loaded.metadata["variables"], str(loaded.path))

    # Saving.

    def save(self, point: _SavePoint, is_finished: bool = False) -> None:
        """Have a checkpoint written of a save point, and of the variables and callbacks as they are now."""
        if not self._functions.allows_checkpoint():
            return
        newest = self._functions.newest_state()
        if newest is not None:
            self._variables.state = newest
        self._backup.frequency.saved()
        copies = self._copies() | point.values
        if self._writer is None:
            return
        shards = {name: copies.pop(name) for name in list(copies) if isinstance(copies[name], list)}
        metadata, arrays = self._metadata(point, is_finished) if self._store else ({}, {})

        def snapshot() -> Snapshot | ShardedSnapshot:
            if self._store is None:
                return ShardedSnapshot(shards)
            whole = Snapshot({name: np.asarray(array) for name, array in (arrays | copies).items()}, metadata)
            return ShardedSnapshot(shards, whole) if self._writes_shards else whole

        self._write(self._writer, snapshot)

    def _metadata(self, point: _SavePoint, is_finished: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the metadata of a checkpoint, and the arrays of callbacks and logs; those of logs may still be computed."""
        numbers = range(len(self._first_attributes))
        by_number = self._packed(number for number in numbers if number not in point.callbacks) | point.callbacks
        packed = [by_number[number] for number in numbers]
        arrays = {name: array for _, own in packed for name, array in own.items()}
        named_logs, logs = packed_logs(self._logs)
        metadata = {  # These names are those on disk.
            "epoch": point.position.epoch,
            "batch": point.position.batch,
            "is_epoch_over": point.is_epoch_over,
            "is_finished": is_finished,
            "extends": self.resumed.extends,
            "stop_training": bool(self._model.stop_training),
            "rows": self._rows or self._data.rows,
            "rate": self._rate,
            **point.data.to_json(),
            "validation": point.validation.to_json() if point.validation else None,
            "random": point.random,
            "callbacks": [attributes for attributes, _ in packed],
            "logs": named_logs,
            "setup": self._setup,
            "steps_per_execution": self._model.steps_per_execution,
            "replicas": self._setup["replicas"],
            "versions": self._versions,
            "variables": {name: variable.path for name, variable in self._variables.named().items()},
        }
        return metadata, arrays | {f"logs/{n}": value for n, value in enumerate(logs)}

    def _packed(self, numbers: Iterable[int]) -> dict[int, _Packed]:
        wait_for_callbacks(self.callbacks)
        value_of, found = self._variables.lookup(), dict[int, _Packed]()
        for number in numbers:
            callback, arrays = self._other_callbacks[number], dict[str, np.ndarray]()
            first = self._first_attributes[number]
            attributes, paths = packed_attributes(callback, f"callback {number}", arrays, first, value_of)
            found[number] = [type(callback).__name__, attributes, monitored(callback), paths], arrays
        return found

    def _save_point(self, position: TrainPosition, is_epoch_over: bool, kinds: Iterable[str] = ()) -> _SavePoint:
        """The state now, with the values of some kinds of variables."""
        data, random = self._data.get_state(is_epoch_over), capture_random_state()
        validation = self._validation.state_between_calls() if self._validation else None
        values = self._copies(*kinds) if kinds else {}
        is_over = is_epoch_over and position.batch > 0
        return _SavePoint(position, is_over, data, validation, random, values)

    def _before_reset(self, point: _SavePoint) -> _SavePoint:
        """Return the save point before Keras's reset of the validation data, whose hook is run again when a validation begins again."""
        random = self._validation.random_before_reset() if self._validation else None
        if random is None or point.validation is None:
            return point
        iterator = point.data.iterator and replace(point.data.iterator, after=random)
        validation = replace(point.validation, hooks=point.validation.hooks[:-1])
        return replace(point, data=replace(point.data, iterator=iterator), validation=validation, random=random)

    def _copies(self, *kinds: str) -> dict[str, Any]:
        return self._variables.copies(*kinds, wanted=self._store is not None, in_shards=self._writes_shards)

    def _share_writing(self) -> None:
        """Have each worker write its shards, if all have the chief's directory; else the chief gathers and writes all."""
        directory, group = self._backup.directory, self._process_group
        token = shared_token(directory, is_chief=self._store is not None, gather=group.all_gather)
        if token is None:
            self._log(
                f"{directory}: not all workers see the directory of worker 0, which gathers sharded variables and writes them alone"
            )
            return
        gather = partial(group.all_gather, channel="checkpoints", timeout_seconds=_PARTS_SECONDS)
        store = ShardedStore(self._store or CheckpointStore(directory, log=self._log), group.process, token, gather)
        self._writer = AsyncWriter(store, timeout_seconds=_PARTS_SECONDS, log=self._log)
        self._writes_shards = True

    def _exit(self) -> None:
        step = self._position.step
        exit_after_checkpoint(self._preemption, step, self._backup.directory, self._writer, self._log)

    def _write(self, writer: AsyncWriter, make: Callable[[], Any]) -> None:
        step = self._position.step
        if writer.is_full or not self._backup.async_:
            self._functions.pause()  # The other workers wait for this one.
        try:
            writer.submit(step, make)
            if not self._backup.async_:
                writer.wait()
        except CheckpointError as error:
            self._log(f"no checkpoint at step {step}: {error}")

    # Resuming.

    def _check_setup(self) -> None:
        batch, joined = self.resumed.position.batch, self._model.steps_per_execution
        before = self.resumed.metadata.get("steps_per_execution", joined)
        if joined != before and batch % joined:
            raise CheckpointError(
                f"{self._checkpoint_name} is after {batch} steps of an epoch, in which steps_per_execution was {before}; with {joined} "
                f"training cannot continue there. Fix: compile with steps_per_execution={before} until the epoch has ended."
            )
        then = self.resumed.metadata["setup"]
        changed = [name for name in self._setup if then.get(name) != self._setup[name]]
        if changed and not self._backup.allow_changes:
            lines = "; ".join(f"{name}: {then.get(name)} then, {self._setup[name]} now" for name in changed)
            raise CheckpointError(
                f"{self._checkpoint_name} is from a run with another set-up, and resuming it would give other numbers than either: "
                f"{lines}. Fix: make the set-up the same, use BackupAndRestore(allow_changes=True), or take another directory."
            )

    def _check_replay(self) -> None:
        position = self.resumed.data and self.resumed.data.iterator
        if position and not self._backup.replay and not self._data.source.can_seek:
            raise InputError(
                f"The {self._data.source.name} stands at batch {position.batches}, and its position can be restored only by reading it again from its "
                "beginning. Fix: use BackupAndRestore(replay=True), arrays, a keras.utils.PyDataset or a function step -> batch."
            )

    def _resume_validation(self) -> None:
        """Resume the validation input, without a change of the random state; errors cost no more than the metrics of validations."""
        if self._validation and self.resumed.validation:
            with random_state_kept():  # A pass of the training input may have begun with it.
                try:
                    self._validation.set_state(self.resumed.validation, steps=0)
                except InputError as error:
                    self._log(f"the metrics of validations may not be those of an uninterrupted run: {error}")

    def _report_unused_rate(self) -> None:
        """Log if the program has another learning rate than before, as that of the checkpoint is restored."""
        then, now, restored = self.resumed.metadata.get("rate"), self._rate, _learning_rate(self._model)
        if None not in (then, now, restored) and now not in (then, restored):
            self._log(
                f"the learning rate of the program was {then:g} and is {now:g}, which is not used: training continues with {restored:g}, that of "
                "the checkpoint. Fix: set it with keras.callbacks.LearningRateScheduler, or start over with another directory"
            )
        self._rate = now if then is None else then

    def _report_emptied_files(self) -> None:
        """Log which files have lost what the earlier run wrote to them; there is nothing within the first epoch."""
        for name in self._emptied_files if self.resumed.position.epoch else ():
            self._log(
                f"CSVLogger has emptied {name}: the rows of the epochs before are lost. Fix: CSVLogger({name!r}, append=True)"
            )

    def _report_changed_batch(self) -> None:
        """Log, after the first step, if the batch has changed and the learning rate has not."""
        if self._data.is_at_end:  # The last batch may be a smaller one.
            return
        self._rows = self._data.rows
        then, self._earlier_fit = self._earlier_fit, None
        if then and self._data.rows and doctor_enabled():
            now = replace(then, rows=self._data.rows)
            for finding in check_changed_batch(now, then, "fit", "the resumed run"):
                self._log(f"Model {self._model.name!r}: {finding.line}.")

    @property
    def _checkpoint_name(self) -> str:
        return f"{self._backup.directory}: the checkpoint of step {self.resumed.position.step}"

    def _restore(self) -> None:
        arrays, metadata = self.resumed.arrays, self.resumed.metadata
        self._variables.set(arrays, metadata["variables"], self._checkpoint_name)
        for number, (attributes, paths) in self._resumed_attributes.items():
            unpacked_attributes(
                self._other_callbacks[number], attributes, arrays, self._first_attributes[number], paths
            )
        self._model.stop_training = self.resumed.is_stopped or (
            metadata["stop_training"] and self.resumed.position.batch > 0
        )
        self._wait_until_all_have_read()
        if metadata["position"] is None:  # Else the random state is that of the pass.
            restore_random_state(metadata["random"])

    def _match_callbacks(self) -> None:
        """Find the attributes of each callback. Several of one class are matched in their order; others may have been added or removed."""
        entries: list[Any] = list(self.resumed.metadata["callbacks"])
        for number, callback in enumerate(self._other_callbacks):
            name, now = type(callback).__name__, monitored(callback)
            entry = next((entry for entry in entries if entry[0] == name), None)
            if entry is None:
                continue
            entries.remove(entry)
            defaults: list[Any] = [now, {}]  # of what earlier versions have not written
            _, attributes, then, paths = entry + defaults[len(entry) - 2 :]
            if then != now:
                self._log(f"{name} starts over, as its state is about another metric: {then} then, {now} now")
                continue
            self._resumed_attributes[number] = attributes, paths
            for attribute in attributes:  # The run has changed it, even if this call does not.
                self._first_attributes[number].values.pop(attribute, None)

    def _wait_until_all_have_read(self) -> None:
        """Wait for all processes, as the chief replaces a checkpoint when the training ends, and may remove it when it saves."""
        self._process_group.all_gather("whether all have read the checkpoint", None)


def _learning_rate(model: keras.Model) -> float | None:
    """Return the learning rate; None if there are several, or a schedule."""
    rate = trainer.adjustable_learning_rate(model.optimizer) if model.optimizer else None
    return None if rate is None else float(np.asarray(rate))
