"""Checkpoints for a custom training loop: a tree of arrays and the number of steps that made it."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lockstep._array_encoding import DTYPES
from lockstep._errors import CheckpointError, OptionError, shown, whole_number
from lockstep._version import used_versions
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.checkpoint.serialization import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.process_group import ProcessGroup
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.devices.placement import Placement
from lockstep.fit.checkpointing.backup_and_restore import SaveFrequency
from lockstep.fit.checkpointing.metadata_check import check_fields
from lockstep.fit.checkpointing.model_state import copies_of
from lockstep.fit.checkpointing.preemption import Preemption, exit_after_checkpoint


class Checkpoint:
    """The checkpoints of a custom training loop; ``strategy.checkpoint`` makes it. A context manager: its exit waits until all are written.

    Args:
        directory: directory of the checkpoints; one for each run.
        frequency: when to save.
        keep: number of the newest checkpoints that are kept.
        placement: the devices.
        process_group: all processes; the first writes.
        log: takes a line for the user.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        frequency: SaveFrequency,
        keep: int,
        placement: Placement,
        process_group: ProcessGroup,
        log: Callable[[str], None],
    ) -> None:
        self._placement, self._process_group, self._log = placement, process_group, log
        self._store = CheckpointStore(directory, keep, log=log)
        self._frequency, self._step, self._versions = frequency, 0, used_versions()
        self._preemption = Preemption(process_group, frequency.is_due_by_time)
        self._writer = AsyncWriter(self._store, log=log) if process_group.process == 0 else None
        if self._writer:
            self._store.lock()

    def __enter__(self) -> "Checkpoint":
        self._preemption.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        finally:
            self._preemption.__exit__(kind, error, traceback)

    def restore(self, state: Any) -> tuple[Any, int]:
        """Return the state to begin with, and the number of steps that are done.

        The global states of ``random`` and ``numpy.random`` are restored, too.

        Args:
            state: a tree of arrays: the first state of the loop without a checkpoint.

        Returns:
            The tree of the newest good checkpoint, on the strategy's devices; ``state`` and 0 if there is no checkpoint. Numbers of Python and
            arrays of NumPy with 64 bits, which JAX would narrow, stay on the host.

        Raises:
            CheckpointError: no checkpoint is good, or it has another tree, shape or dtype.
            OptionError: the state holds something that cannot be stored, such as text.
        """
        names, structure = _named(state)
        with self._process_group.saving():
            loaded = self._store.newest(lambda found: check_fields(found, ["random"])) if self._writer else None
        found = self._process_group.broadcast_from_chief(
            (loaded.step, loaded.arrays, loaded.metadata) if loaded else None
        )
        if found is None:
            return state, 0
        step, arrays, metadata = found
        differ = [name for name, leaf in names.items() if name not in arrays or _differs(arrays[name], leaf)]
        if differ or len(names) != len(arrays):
            raise CheckpointError(
                f"{self._store.directory}: the checkpoint of step {step} is of another state: {f'state{differ[0]}' if differ else 'it has'} "
                f"{'is absent, or of another shape or dtype' if differ else f'{len(arrays)} arrays, and here are {len(names)}'}. Fix: make the state as "
                "it was, or take another directory."
            )
        restore_random_state(metadata["random"])
        before, replicas = metadata.get("replicas"), self._placement.replicas
        if before != replicas:
            self._log(
                f"the loop that is resumed had {before} replicas and now has {replicas}: what each replica draws or normalizes for itself "
                f"differs. Fix: replicas={before}, if that matters"
            )
        self._step = step
        self._log(f"resumes from {self._store.directory} at step {step}")
        leaves = [self._like(leaf, arrays[name]) for leaf, name in zip(jax.tree.leaves(state), names, strict=True)]
        return jax.tree.unflatten(structure, leaves), step

    def save(self, step: int, state: Any) -> None:
        """Report that a step is done. If ``save_freq`` says so, a checkpoint is written while the loop continues.

        A checkpoint that cannot be written is logged, and older ones are kept. If any process of the job got SIGTERM or SIGUSR1, the
        last checkpoint is written and all processes exit; so all processes call this after the same steps.

        Args:
            step: number of steps that are done.
            state: a tree of arrays, each of which every device has. It may be donated to the next step.

        Raises:
            SystemExit: with code 75, after a preemption.
            OptionError: ``step`` is no whole number of at least 0, or less than before, or the state that is saved holds something that
                cannot be stored.
        """
        before, self._step = self._step, max(self._step, whole_number("step", step, minimum=0))
        if step < before:
            raise OptionError(
                f"checkpoint: save: step: expected at least {before}, the step of the save or restore before, got {step}; a loop resumes "
                "from the checkpoint with the largest step. Fix: count the steps of all epochs, from the one that restore returns."
            )
        is_last = self._preemption.end_step()
        if is_last or self._preemption.is_save_due or self._frequency.is_due_by_steps(before, step):
            self._write(step, state)
        if is_last:
            exit_after_checkpoint(self._preemption, step, self._store.directory, self._writer, self._log)

    def _write(self, step: int, state: Any) -> None:
        self._frequency.saved()
        names, _ = _named(state)
        placed = [leaf for leaf in names.values() if isinstance(leaf, jax.Array)]
        found = iter(copies_of(placed, wanted=self._writer is not None))
        if self._writer is None:
            return
        # Numbers of the host stay as they are: JAX would narrow those of 64 bits.
        copies = [next(found) if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in names.values()]
        metadata = {"random": capture_random_state(), "replicas": self._placement.replicas, "versions": self._versions}
        try:
            with self._process_group.saving():
                self._writer.submit(
                    step, lambda: Snapshot(dict(zip(names, map(np.asarray, copies), strict=True)), metadata)
                )
        except CheckpointError as error:
            self._log(f"no checkpoint at step {step}: {error}")

    def _like(self, leaf: Any, new: np.ndarray) -> Any:
        """Return a restored array on the devices; a number of Python, and what JAX would narrow, is on the host again."""
        if not isinstance(leaf, jax.Array) and new.dtype != jax.dtypes.canonicalize_dtype(new.dtype):
            return new if isinstance(leaf, np.ndarray) else new[()] if isinstance(leaf, np.generic) else new.item()
        placed = self._placement.put(new)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else placed

    def close(self) -> None:
        """Wait for checkpoints that are being written."""
        if self._writer:
            with self._process_group.saving():
                self._writer.close()
            self._store.close()


def _named(state: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves by name, random keys as their integers, and the structure.

    Raises:
        OptionError: a leaf is neither an array nor a number of a dtype that checkpoints have.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    for name, leaf in named.items():
        if not _is_key(leaf) and (leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)).dtype.name not in DTYPES:
            raise OptionError(
                f"checkpoint: state{name} cannot be stored: expected an array or a number of at most 64 bits, got {shown(leaf)}. Fix: "
                "keep it out of the state."
            )
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in named.items()}, structure


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _differs(array: np.ndarray, leaf: Any) -> bool:
    """Return whether a stored array is not of the shape and dtype of a leaf, or of the dtype that JAX gives it."""
    dtype = np.asarray(leaf).dtype if not isinstance(leaf, jax.Array) else leaf.dtype
    is_number = isinstance(leaf, (bool, int, float, complex))
    return array.shape != np.shape(leaf) or (
        not is_number and array.dtype not in (dtype, jax.dtypes.canonicalize_dtype(dtype))
    )
