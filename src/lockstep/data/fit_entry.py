"""``fit``, ``evaluate`` and ``predict`` of a model get their input through a strategy.

The methods are shadowed on the model itself: what was given as input is wrapped in an :class:`KerasInput`, and Keras's method
does the rest. No class is changed.
"""

import functools
import inspect
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from lockstep._errors import OptionError, whole_number
from lockstep._keras import adapters
from lockstep._keras.fit_interception import interceptable
from lockstep._keras.patches import FIT_INPUT, install
from lockstep.data.cache import CachedSource, DeviceSource, FileBatchStore, MemoryBatchStore
from lockstep.data.device_placement import Placement, count_rows
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.pass_iterator import BatchCheck, BatchGather
from lockstep.data.sources import AdapterSource, InputSource, Pending, make_source
from lockstep.data.wait_meter import FitObserver
from lockstep.distributed.control.failure_detector import WorkerStatus

__all__ = ["InputFactory", "InputOptions", "ProcessGroup"]

Report = Callable[[str], None]
_STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}


@dataclass(frozen=True)
class InputOptions:
    """How batches reach the devices; the place of ``tf.distribute.InputOptions``, and of ``prefetch`` and ``cache`` of tf.data.

    Args:
        prefetch: number of batches that wait on the devices ahead of the step. A thread of its own reads and places
            them, but for arrays on CPU devices, which are there already. 0: each batch is read when its step is due.
        cache: what becomes of the batches of ``fit`` after the first epoch. None: they are read anew. ``"memory"``: they
            are kept on the host. ``"device"``: they are kept on the devices; arrays lie there as a whole, on each
            device, and are shuffled there, in the order that they would have on the host. A path: they are kept in that
            file. What is kept lasts as long as the call of ``fit``.

    Raises:
        OptionError: one of them is out of its range.

    Example:
        >>> import lockstep
        >>> options = lockstep.InputOptions(prefetch=4, cache="memory")
        >>> strategy = lockstep.MirroredStrategy(input_options=options)
    """

    prefetch: int = 2
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefetch", whole_number("InputOptions: prefetch", self.prefetch, least=0))
        cache = self.cache
        if cache is not None and (not isinstance(cache, (str, os.PathLike)) or not os.fspath(cache)):
            raise OptionError(f'InputOptions: cache: expected None, "memory", "device" or a path, got {cache!r}.')


class ProcessGroup:
    """What surrounds a call and the batches of its input; this one does nothing. Processes that train together do more.

    Attributes:
        processes: their number.
        process: the number of this one.
    """

    processes, process = 1, 0

    def surround_call(
        self, model: keras.Model, call: str, arguments: dict[str, Any], batch_size: int | None
    ) -> AbstractContextManager[None]:
        """Is open during ``call`` ("fit", "evaluate" or "predict"); may change its arguments. The input is made by then."""
        return nullcontext()

    def run_call(self, model: keras.Model, call: str, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        """What the call gives: ``proceed()`` is Keras's own, with the arguments as they are then."""
        return proceed()

    def make_batch_check(self, name: str, has_known_length: bool) -> Callable[[], BatchCheck] | None:
        """Gives, for each pass over an input, what looks at the batches, in the thread that reads them."""
        return None

    def broadcast_from_chief(self, found: Any) -> Any:
        """What the chief has found, on every process."""
        return found

    def all_gather(self, topic: str, value: Any) -> list[Any]:
        """The values of all processes, each of which calls this for that topic."""
        return [value]

    def worker_statuses(self) -> list[WorkerStatus]:
        """What the chief has last heard of all processes; nothing on the others, and where there is one process."""
        return []

    def make_batch_gather(self, name: str) -> Callable[[], BatchGather] | None:
        """Gives, for each pass over an input, what brings values of all processes together; None where there is one process."""
        return None


class InputFactory:
    """Makes the inputs of one strategy's models.

    Args:
        placement: devices and number of replicas.
        options: what the user has chosen.
        process_group: what surrounds the calls.
        around_fit: what surrounds a call of fit besides, given the model and the arguments.
        observer: is shown each call of fit.
    """

    def __init__(
        self,
        placement: Placement,
        options: InputOptions,
        process_group: ProcessGroup,
        around_fit: Callable[[keras.Model, dict[str, Any]], AbstractContextManager[None]],
        observer: FitObserver,
    ) -> None:
        self._placement, self._options, self._process_group = placement, options, process_group
        self._around_fit, self._observer = around_fit, observer
        # What was read from a generator and not used waits here for the next call; with the generator it goes away.
        self._pending: WeakKeyDictionary[Any, Pending] = WeakKeyDictionary()

    def install(self, model: keras.Model, report: Report) -> list[str]:
        """Shadow the methods of a model, but for those that its own class defines: these get what they are given.

        Args:
            model: a Keras model.
            report: is given a sentence where something could be done better.

        Returns:
            What is to be told when the model is used.
        """
        notes = []
        for name in _STEPS:
            owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
            if owner in keras.Model.__mro__:
                install(FIT_INPUT, [(model, name, self._shadow(model, name, report))])
            elif self._options != InputOptions():
                notes.append(f"{owner.__name__} has its own {name}, to which input_options do not apply")
        return notes

    def open_preview(self, model: keras.Model, data: tuple[Any, Any, Any], **options: Any) -> KerasInput:
        """The input that ``fit`` would get, without a cache, for somebody who reads some batches and closes it.

        Args:
            model: whose fit.
            data: inputs, targets and weights, as fit takes them.
            **options: batch_size, shuffle, class_weight and steps_per_epoch, as fit takes them.
        """
        return self._input(model, lambda _: None, False, *data, **options)

    def _shadow(self, model: keras.Model, name: str, report: Report) -> Callable[..., Any]:
        original = getattr(type(model), name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(model, *args, **kwargs)
            given = call.arguments
            if given.get("x") is None or isinstance(given["x"], KerasInput):
                return original(*call.args, **call.kwargs)
            with ExitStack() as stack:
                make = functools.partial(self._input, model, report, name == "fit")
                if name == "fit":
                    _hold_out(given)
                if name == "fit" and "evaluate" in vars(model):  # An evaluate of its own gets what was given.
                    _replace_validation(given, lambda *data, **rest: stack.enter_context(_closing(make(*data, **rest))))
                data = [given.pop(argument, None) for argument in ("x", "y", "sample_weight")]
                options = {argument: given.pop(argument, None) for argument in ("class_weight", "batch_size")}
                options["shuffle"] = given.pop("shuffle", True) if name == "fit" else False
                look = self._observer.called(model, tuple(data), given | options) if name == "fit" else None
                made = make(*data, steps_per_epoch=given.get(_STEPS[name]), look=look, **options)
                given["x"] = stack.enter_context(_closing(made))
                stack.enter_context(self._process_group.surround_call(model, name, given, options["batch_size"]))

                def proceed() -> Any:
                    with self._around_fit(model, given) if name == "fit" else nullcontext():
                        return original(*call.args, **call.kwargs)

                return self._process_group.run_call(model, name, given, proceed)

        return interceptable(model, method) if name == "fit" else method

    def _input(
        self,
        model: keras.Model,
        report: Report,
        is_fit: bool,
        *data: Any,
        path_ending: str = "",
        look: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> KerasInput:
        given = options | {"pending": self._pending_of}
        source = make_source(*data, **given)
        is_compiled = model.jit_compile and not model.run_eagerly
        if is_fit and self._options.cache:
            source = self._kept(source, data, is_compiled, path_ending, given)
        return KerasInput(
            source,
            self._placement.place_for_step if is_compiled else (lambda batch: batch),
            self._depth(source, options["shuffle"]),
            _batches_of_an_epoch(options["steps_per_epoch"], model.steps_per_execution),
            report,
            look,
            self._process_group.make_batch_check(source.name, source.num_batches is not None)
            if source.is_shared
            else None,
        )

    def _pending_of(self, generator: Any) -> Pending:
        return self._pending.setdefault(generator, deque())

    def _depth(self, source: InputSource, shuffle: bool | str) -> int:
        """Number of batches to place ahead."""
        if isinstance(source, AdapterSource) and source.is_arrays:
            # On a CPU the rows are there already, and a thread only takes time from the step. And Keras draws the order
            # within a batch from NumPy's global generator, which must not happen at the same time as anything else.
            on_the_spot = shuffle == "batch" or self._placement.platform == "cpu"
        else:
            on_the_spot = isinstance(source, DeviceSource)
        return 0 if on_the_spot else self._options.prefetch

    def _kept(
        self, source: InputSource, data: tuple[Any, ...], is_compiled: bool, path_ending: str, given: Any
    ) -> InputSource:
        """``source`` with the cache that was asked for."""
        cache, steps = self._options.cache, given["steps_per_epoch"]
        on_devices = cache == "device" and is_compiled
        if isinstance(source, AdapterSource) and source.is_arrays:
            return self._on_devices(data, given) if on_devices else source
        if steps is not None:
            raise OptionError(
                f"InputOptions: cache={str(cache)!r} keeps what an epoch has read, and with steps_per_epoch={steps} an epoch may "
                f"end before the {source.name} does. Leave out the steps (validation_steps for validation data), or the cache."
            )
        if on_devices:
            return CachedSource(source, MemoryBatchStore(), self._placement.place)
        return CachedSource(
            source, MemoryBatchStore() if cache in ("memory", "device") else FileBatchStore(f"{cache}{path_ending}")
        )

    def _on_devices(self, data: tuple[Any, ...], given: dict[str, Any]) -> InputSource:
        """Arrays on the devices; the same code as always says in which order their rows come."""
        everything = given | {"shuffle": False, "batch_size": sys.maxsize, "steps_per_epoch": None}
        whole = next(make_source(*data, **everything).batches())
        numbers = np.arange(count_rows(whole))
        return DeviceSource(make_source(numbers, **given | {"class_weight": None}), whole, self._placement)


def _batches_of_an_epoch(steps: int | None, process_group: int) -> int | None:
    """How many Keras takes: as many as are given, or its own limit for trials (KERAS_MAX_STEPS_PER_EPOCH), in whole calls of ``process_group`` steps."""
    given = [number for number in (steps, keras.config.max_steps_per_epoch()) if number]
    return process_group * math.ceil(min(given) / process_group) if given else steps


def _hold_out(given: dict[str, Any]) -> None:
    """What ``validation_split`` asks for."""
    fraction = given.pop("validation_split", 0.0)
    if fraction and given.get("validation_data") is None:
        data = tuple(given.get(name) for name in ("x", "y", "sample_weight"))
        kept, held_out = adapters.train_validation_split(data, validation_split=fraction)
        given.update(zip(("x", "y", "sample_weight"), kept, strict=True), validation_data=held_out)


def _replace_validation(given: dict[str, Any], make: Callable[..., KerasInput]) -> None:
    if given.get("validation_data") is None:
        return
    data = adapters.unpack_x_y_sample_weight(given["validation_data"])
    given["validation_data"] = make(
        *data,
        steps_per_epoch=given.get("validation_steps"),
        path_ending=".validation",
        shuffle=False,
        class_weight=None,
        batch_size=given.get("validation_batch_size") or given.get("batch_size"),
    )


@contextmanager
def _closing(opened: KerasInput) -> Iterator[KerasInput]:
    try:
        yield opened
    except BaseException:
        opened.close(failed=True)
        raise
    opened.close()
