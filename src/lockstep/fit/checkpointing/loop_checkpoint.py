"""Checkpoints for a loop of one's own: a tree of arrays and the number of steps that made it."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lockstep._errors import CheckpointError
from lockstep._version import used_versions
from lockstep.checkpoint.async_writer import BackgroundWriter
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.device_placement import Placement
from lockstep.data.fit_entry import ProcessGroup
from lockstep.data.iterator_state import capture_random_state, restore_random_state
from lockstep.fit.checkpointing.model_state import copies_of
from lockstep.fit.checkpointing.preemption import Preemption, leave
from lockstep.fit.checkpointing.save_schedule import SaveFrequency

__all__ = ["Checkpoint"]


class Checkpoint:
    """The checkpoints of a loop; ``strategy.checkpoint`` makes it. A context manager: at its end all is written.

    Args:
        directory: where they are; one for each run.
        frequency: of what is written.
        keep: how many stay.
        placement: the devices.
        process_group: the processes; the first one writes.
        announce: takes a line for the user.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        frequency: SaveFrequency,
        keep: int,
        placement: Placement,
        process_group: ProcessGroup,
        announce: Callable[[str], None],
    ) -> None:
        self._placement, self._process_group, self._announce = placement, process_group, announce
        self._store = CheckpointStore(directory, keep, announce=announce)
        self._frequency, self._step, self._versions = frequency, 0, used_versions()
        self._preemption = Preemption(process_group)
        self._writer = BackgroundWriter(self._store, announce=announce) if process_group.process == 0 else None
        if self._writer:
            self._store.lock()

    def __enter__(self) -> "Checkpoint":
        self._preemption.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._preemption.__exit__(*error)

    def restore(self, state: Any) -> tuple[Any, int]:
        """The state to begin with, and the number of steps that are done.

        The global states of ``random`` and ``numpy.random`` are those of the checkpoint, too.

        Args:
            state: a tree of arrays as the loop begins without a checkpoint.

        Returns:
            The tree, on the strategy's devices, out of the newest good checkpoint; as given, with 0, where there is none.

        Raises:
            CheckpointError: none is good, or it is of another tree.
        """
        loaded = self._store.newest() if self._writer else None
        found = self._process_group.broadcast_from_chief(
            (loaded.step, loaded.snapshot.arrays, loaded.snapshot.facts) if loaded else None
        )
        if found is None:
            return state, 0
        step, arrays, facts = found
        names, structure = _named(state)
        differ = [name for name, leaf in names.items() if name not in arrays or arrays[name].shape != np.shape(leaf)]
        if differ or len(names) != len(arrays):
            raise CheckpointError(
                f"{self._store.directory}: the checkpoint of step {step} is of another state: {differ[0] if differ else 'it has'} "
                f"{'is absent or of another shape' if differ else f'{len(arrays)} arrays, and here are {len(names)}'}. Make the state as it "
                "was, or take another directory."
            )
        restore_random_state(facts["random"])
        self._step = step
        self._announce(f"goes on from {self._store.directory} at step {step}")
        placed = self._placement.put([arrays[name] for name in names])
        leaves = [_like(leaf, new) for leaf, new in zip(jax.tree.leaves(state), placed, strict=True)]
        return jax.tree.unflatten(structure, leaves), step

    def save(self, step: int, state: Any) -> None:
        """Say that a step is done; where ``save_freq`` says so a checkpoint is written while the loop goes on.

        What cannot be written is told in a line, and older ones stay. Where this process, or another of the job, was asked to stop by
        SIGTERM or SIGUSR1, all write their last checkpoint and end: to be called after the same steps in all processes.

        Args:
            step: number of steps that are done.
            state: a tree of arrays, each of which every device has. It may be given away to the next step.

        Raises:
            SystemExit: the process was asked to stop; with code 75.
        """
        before, self._step = self._step, step
        is_last = self._preemption.is_now()
        if is_last or self._frequency.is_due(before, step):
            self._write(step, state)
        if is_last:
            leave(self._preemption, step, self._store.directory, self._writer, self._announce)

    def _write(self, step: int, state: Any) -> None:
        self._frequency.saved()
        if self._writer is None:
            return
        names, _ = _named(state)
        copies = copies_of(list(names.values()))
        facts = {"random": capture_random_state(), "replicas": self._placement.replicas, "versions": self._versions}
        try:
            self._writer.submit(step, lambda: Snapshot(dict(zip(names, map(np.asarray, copies), strict=True)), facts))
        except CheckpointError as error:
            self._announce(f"no checkpoint at step {step}: {error}")

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer:
            self._writer.close()
            self._store.close()


def _named(state: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by name, keys of random numbers as the integers that they are made of; and the structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in named.items()}, structure


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, new: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else new
