"""States of the global random generators, and of the orders in which tf.data and torch shuffle, as values of JSON."""

import base64
import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lockstep._keras import trainer
from lockstep._logging import log_info

_TWISTER_WORDS = 624  # of the state of a Mersenne twister
_SAME = "="  # stands for the text of the state before; no text in a state is this one
_MAX_PASSES = 1_000_000  # that a resumed run begins and drops


def encode_bytes(data: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(data).decode()


def decode_torch_state(kept: str) -> Any:
    """Return the state of a generator of torch, from the text of its bytes."""
    return sys.modules["torch"].from_numpy(np.frombuffer(base64.b64decode(kept), "uint8").copy())


def capture_random_state() -> dict[str, Any]:
    """Return the state of the global generators: ``random``, ``numpy.random`` and, if it is loaded, torch; as values of JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    found: dict[str, Any] = {
        "random": [version, encode_bytes(np.asarray(numbers[:-1], "uint32").tobytes()), gauss, numbers[-1]],
        "numpy": [
            kind,
            encode_bytes(np.asarray(keys, "uint32").tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if "torch" in sys.modules:
        found["torch"] = encode_bytes(sys.modules["torch"].get_rng_state().numpy().tobytes())
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the state that :func:`capture_random_state` returned; torch's only if it is loaded."""
    _set_random_state(state, random, np.random, sys.modules.get("torch"))


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Undo what the code inside changes in the global generators."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def without_repetitions(states: Iterable[Any]) -> list[Any]:
    """Return states with ``"="`` for each text that is that of the state before, as thousands may be in one checkpoint.

    Example:
        >>> without_repetitions([{"numpy": ["words", 7]}, {"numpy": ["words", 9]}])
        [{'numpy': ['words', 7]}, {'numpy': ['=', 9]}]
    """
    all_states = list(states)
    return [
        _merged(state, last, lambda new, old: _SAME if isinstance(new, str) and new == old else new)
        for state, last in zip(all_states, [None, *all_states], strict=False)
    ]


def with_repetitions(states: Iterable[Any]) -> Iterator[Any]:
    """Return what :func:`without_repetitions` was given."""
    last = None
    for state in states:
        last = _merged(state, last, lambda new, old: old if new == _SAME else new)
        yield last


def _merged(new: Any, old: Any, merge: Callable[[Any, Any], Any]) -> Any:
    """Return a value of JSON whose leaves are ``merge`` of those of two values."""
    if isinstance(new, dict):
        return {
            name: _merged(value, old.get(name) if isinstance(old, dict) else None, merge) for name, value in new.items()
        }
    if isinstance(new, list):
        others = old if isinstance(old, list) and len(old) == len(new) else [None] * len(new)
        return [_merged(value, other, merge) for value, other in zip(new, others, strict=True)]
    return merge(new, old)


def check_random_state(state: Any) -> None:
    """Raise ValueError if this is no result of :func:`capture_random_state`. No generator changes."""
    try:
        gauss, (position, has_gauss, cached) = state["random"][2], state["numpy"][2:]
        if not (gauss is None or type(gauss) is float) or type(cached) is not float or has_gauss not in (0, 1):
            raise ValueError("a normal number")
        if type(position) is not int or not 0 <= position <= _TWISTER_WORDS:  # NumPy would read beyond its memory.
            raise ValueError("a position")
        torch = sys.modules.get("torch")
        generator = torch.Generator() if torch else None
        _set_random_state(state, random.Random(), np.random.RandomState(0), generator)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no state of random generators: {error}") from None


def _set_random_state(state: dict[str, Any], python: Any, numpy: Any, torch: Any) -> None:
    """Set the states of generators, each given as its object or its module."""
    version, words, gauss, *index = state["random"]
    # Earlier versions have written a list, with the index at its end.
    numbers = words if isinstance(words, list) else np.frombuffer(base64.b64decode(words), "uint32").tolist() + index
    kind, keys, position, has_gauss, cached = state["numpy"]
    python.setstate((version, tuple(numbers), gauss))
    numpy.set_state((kind, np.frombuffer(base64.b64decode(keys), "uint32"), position, has_gauss, cached))
    if "torch" in state and torch is not None:
        (getattr(torch, "set_rng_state", None) or torch.set_state)(decode_torch_state(state["torch"]))


# By data set of tf.data: for each pass that this process has begun over it, how often its next batch was requested. Each pass may have
# another order, though its shuffling has a seed.
_passes: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
_BEGIN_INPUT_LATE = ("_ShuffleDataset", "_RepeatDataset", "_ConcatenateDataset", "CacheDataset")


def _begins_shuffling_late(dataset: Any, is_late: bool = False) -> bool:
    """Return whether a pass of a data set of tf.data draws an order when batches are read, and not when it begins."""
    kind = type(dataset).__name__
    if is_late and kind == "_ShuffleDataset":
        return True
    is_late = is_late or kind in _BEGIN_INPUT_LATE
    inputs: list[Any] = getattr(dataset, "_inputs", list)()  # A data set of tf.distribute has none.
    return any(_begins_shuffling_late(each, is_late) for each in inputs)


def without_added_prefetch(data: Any) -> Any:
    """Return a data set of tf.data that shuffles late without the prefetching that TensorFlow adds to it; others as they are.

    By the time a pass ends, its thread has drawn the next order or has not: the order of a whole run would vary, too.
    """
    if not trainer.is_tf_dataset(data) or not _begins_shuffling_late(data):
        return data
    options = sys.modules["tensorflow"].data.Options()
    options.experimental_optimization.inject_prefetch = False
    return data.with_options(options)


class ShuffledData:
    """Order of the passes over a data set of another package, which may shuffle itself: ``tf.data`` and torch."""

    def __init__(self, data: Any, name: str) -> None:
        self._data, self._name = data, name

    def noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Note that a pass begins; return its batches, and note how far they are read."""
        if self._has_persistent_workers:
            _passes.setdefault(self._data, [0])
        if not trainer.is_tf_dataset(self._data):
            return batches
        passes = _passes.setdefault(self._data, [])
        passes.append(0)
        return self._counted(batches, passes, len(passes) - 1)

    def _counted(self, batches: Iterator[Any], passes: list[int], number: int) -> Iterator[Any]:
        end = object()
        while True:
            passes[number] += 1
            batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def state(self) -> dict[str, Any] | None:
        """See :meth:`lockstep.data.sources.InputSource.order_state`."""
        if trainer.is_tf_dataset(self._data):
            passes = _passes.get(self._data, [])
            return {"passes": list(passes) if _begins_shuffling_late(self._data) else len(passes)}
        states = [encode_bytes(generator.get_state().numpy().tobytes()) for generator in self._torch_generators]
        if self._has_persistent_workers:
            return {"torch": states, "has_workers": self._data in _passes}
        return {"torch": states} if states else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """See :meth:`lockstep.data.sources.InputSource.restore_order`."""
        state = state or {}
        if trainer.is_tf_dataset(self._data) and "passes" in state:
            kept, begun = state["passes"], _passes.get(self._data, [])
            # A pass that begins draws the next order, and reads nothing; but of shuffling below other shuffling, repetition or a cache.
            reads = kept if isinstance(kept, list) else [0] * kept
            missing = len(reads) - len(begun)
            data = without_added_prefetch(self._data)
            for wanted in reads[len(begun) :] if missing > 0 else ():
                for _ in itertools.islice(self.noted(iter(data)), wanted):
                    pass
            if missing < 0:
                log_info(
                    f"{self._name}: {-missing} passes more than before have begun, so its order may be another one."
                )
        if state.get("has_workers") and self._data not in _passes:
            # The pass that starts the workers draws a seed for them besides the order.
            with sys.modules["torch"].random.fork_rng(devices=[]):
                self.noted(iter(self._data))
            log_info(
                f"{self._name}: its workers are new, so numbers that they have drawn from their own generators may be other ones: augmentation, "
                "for example. Fix: persistent_workers=False"
            )
        for generator, kept in zip(self._torch_generators, state.get("torch", ()), strict=False):
            generator.set_state(decode_torch_state(kept))

    @property
    def _has_persistent_workers(self) -> bool:
        """Whether it is a ``DataLoader`` of torch whose workers stay from pass to pass."""
        torch = sys.modules.get("torch")
        return (
            torch is not None and isinstance(self._data, torch.utils.data.DataLoader) and self._data.persistent_workers
        )

    @property
    def _torch_generators(self) -> list[Any]:
        """The generators of a ``DataLoader`` of torch that are not the global one."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self._data, torch.utils.data.DataLoader):
            return []
        owners = self._data, self._data.sampler, getattr(self._data.batch_sampler, "sampler", None)
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def check_order_state(state: Any) -> None:
    """Raise ValueError if this is no result of :meth:`lockstep.data.sources.InputSource.order_state`. No generator changes."""
    if type(state) is not dict or set(state) not in ({"passes"}, {"torch"}, {"torch", "has_workers"}):
        raise ValueError("no state of an order")
    if type(state.get("has_workers", False)) is not bool:
        raise ValueError("no state of an order")
    if "passes" in state:
        passes = state["passes"]
        if type(passes) is int and 0 <= passes <= _MAX_PASSES:
            return
        if type(passes) is list and len(passes) <= _MAX_PASSES and all(type(n) is int and n >= 0 for n in passes):
            return
    torch = sys.modules.get("torch")
    try:
        for kept in state["torch"]:
            base64.b64decode(kept)
            if torch:
                torch.Generator().set_state(decode_torch_state(kept))
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no state of an order: {error}") from None
