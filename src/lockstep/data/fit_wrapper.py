"""Entry of ``fit``, ``evaluate`` and ``predict``: the input is wrapped for the strategy, and hooks run around the call.

The methods are replaced on the model, not on its class: they wrap the input in a :class:`KerasInput` and call Keras's methods.
"""

import functools
import inspect
import itertools
import math
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import jax
import keras
import numpy as np

from lockstep._errors import InputError, OptionError, check_depth, instance_of, real_number, shown, truth, whole_number
from lockstep._keras import graph, trainer
from lockstep._keras.patches import FIT_INPUT, install
from lockstep._keras.trainer import interceptable
from lockstep.data.cache import CachedSource, DeviceSource, FileBatchStore
from lockstep.data.input_options import InputOptions
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.prefetch import are_arrays_read_inline
from lockstep.data.process_group import ProcessGroup
from lockstep.data.sources import InputSource, Pending, check_data, make_source
from lockstep.devices.placement import Placement, count_rows

Report = Callable[[str], None]
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")
_DATA = ("x", "y", "sample_weight")
_STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}


# (model; inputs, targets and weights as given; further arguments by name) -> a function to call with the first batch on the host, or None
ObserveFit = Callable[[keras.Model, tuple[Any, Any, Any], dict[str, Any]], Callable[[Any], None] | None]


class FitWrapper:
    """Replaces fit, evaluate and predict of one strategy's models, and makes their inputs; ``around_call`` makes the context of each call."""

    def __init__(
        self,
        placement: Placement,
        options: InputOptions,
        process_group: ProcessGroup,
        around_call: Callable[[keras.Model, str, dict[str, Any]], AbstractContextManager[None]],
        observe_fit: ObserveFit,
    ) -> None:
        self._placement, self._options, self._process_group = placement, options, process_group
        self._around_call, self._observe_fit = around_call, observe_fit
        # Batches that were read from a generator and not used, for the next call; they are dropped with the generator.
        self._pending: WeakKeyDictionary[Any, Pending] = WeakKeyDictionary()
        # The arguments of evaluate for validation data that were opened, as Keras alone would call it: a user's evaluate gets these.
        self._validations: WeakKeyDictionary[KerasInput, dict[str, Any]] = WeakKeyDictionary()

    def replace_methods(self, model: keras.Model, report: Report) -> None:
        """Replace the methods of a model. Those that its own class defines run as they are, and ``super()`` is replaced in them."""
        for name in _ON_BATCH:
            if not trainer.has_own(model, name):
                install(FIT_INPUT, [(model, name, self._checked_on_batch(model, name))])
        for name in _STEPS:
            method = self._wrap(model, name, report)
            if trainer.has_own(model, name):
                method = self._wrap_own(model, name, method, report)
            install(FIT_INPUT, [(model, name, method)])

    def open_preview(self, model: keras.Model, data: tuple[Any, Any, Any], **options: Any) -> KerasInput:
        """Return the input that ``fit`` would get with these ``options`` (batch_size, shuffle, class_weight and steps_per_epoch), without a
        cache; the caller reads some batches and closes it.
        """
        return self._input(model, lambda _: None, False, *data, **options)

    def _wrap(self, model: keras.Model, name: str, report: Report) -> Callable[..., Any]:
        original = trainer.method_of_keras(name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(model, *args, **kwargs)
            given = call.arguments
            if isinstance(given.get("x"), KerasInput) or trainer.is_nested_evaluation(given.get("kwargs", {})):
                return original(*call.args, **call.kwargs)
            return self._run_call(model, name, call, original, report)

        return interceptable(model, method) if name == "fit" else method

    def _run_call(
        self,
        model: keras.Model,
        name: str,
        call: inspect.BoundArguments,
        original: Callable[..., Any],
        report: Report,
    ) -> Any:
        """Check the arguments of a call and wrap its data; then run Keras's method, with the hooks around it."""
        given = call.arguments
        check_call(name, given)
        if name != "predict":
            _check_targets(model, name, given)
        batch_size = given.get("batch_size")
        with ExitStack() as stack:
            opened = self._open_inputs(model, name, given, report, stack)
            stack.enter_context(self._process_group.surround_call(model, name, given, batch_size))

            def proceed() -> Any:
                with self._around_call(model, name, given), _explained_without_batches(name, opened):
                    return original(*call.args, **call.kwargs)

            return self._process_group.run_call(model, name, given, proceed)

    def _checked_on_batch(self, model: keras.Model, name: str) -> Callable[..., Any]:
        """Return a method for one batch that first checks its data."""
        original, calls = getattr(type(model), name), itertools.count()
        signature = inspect.signature(original)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(model, *args, **kwargs)
            check_call(name, call.arguments)
            batch = [call.arguments.get(part) for part in (*_DATA, "class_weight")]
            self._process_group.compare_batch(name, next(calls), batch)
            with self._around_call(model, name, call.arguments):
                result = original(*call.args, **call.kwargs)
            self._process_group.end_steps()
            return result

        return method

    def _open_inputs(
        self, model: keras.Model, name: str, given: dict[str, Any], report: Report, stack: ExitStack
    ) -> KerasInput:
        """Replace the data in ``given`` by inputs, which ``stack`` closes; return the one for x."""
        make, on_first = functools.partial(self._input, model, report, name == "fit"), None
        if name == "fit":
            _split_validation(given)
            x, y, weight = map(given.get, _DATA)
            on_first = self._observe_fit(model, (x, y, weight), dict(given))
            if given.get("validation_data") is not None:
                self._wrap_validation(given, lambda *data, **rest: stack.enter_context(_closing(make(*data, **rest))))
        data = [given.pop(argument, None) for argument in _DATA]
        options = {argument: given.pop(argument, None) for argument in ("class_weight", "batch_size")}
        options["shuffle"] = given.pop("shuffle", True) if name == "fit" else False
        made = make(*data, steps_per_epoch=given.get(_STEPS[name]), on_first_batch=on_first, **options)
        given["x"] = opened = stack.enter_context(_closing(made))
        return opened

    def _wrap_validation(self, given: dict[str, Any], make: Callable[..., KerasInput]) -> None:
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(given["validation_data"])
        batch_size = given.get("validation_batch_size") or given.get("batch_size")
        given["validation_data"] = opened = make(
            x,
            y,
            sample_weight,
            steps_per_epoch=given.get("validation_steps"),
            path_suffix=".validation",
            argument="validation_data",
            shuffle=False,
            class_weight=None,
            batch_size=batch_size,
        )
        self._validations[opened] = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}

    def _wrap_own(
        self, model: keras.Model, name: str, method: Callable[..., Any], report: Report
    ) -> Callable[..., Any]:
        """Return the method of the model's own class, in which ``super().<name>(…)`` calls ``method``."""
        own = getattr(type(model), name)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(opened := kwargs.get("x"), KerasInput):  # Keras's fit calls it.
                kwargs |= self._validations[opened]
            with trainer.redirect_super(model, name, method) as calls:
                result = own(model, *args, **kwargs)
            if not calls and self._options != InputOptions():
                report(f"{own.__qualname__} does not call super().{name}, so input_options do not apply to it")
            return result

        return trainer.with_super(call, method)

    def _input(
        self,
        model: keras.Model,
        report: Report,
        is_fit: bool,
        *data: Any,
        argument: str = "x",
        path_suffix: str = "",
        on_first_batch: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> KerasInput:
        steps = _limited(options["steps_per_epoch"])  # Of arrays it determines the batch size, if none is given.
        given = options | {"pending": self._pending_of, "steps_per_epoch": steps}
        source = make_source(*data, **given)
        if source.num_batches == 0:
            raise InputError(f"{argument}: the {source.name} has no batches. Fix: give it at least one.")
        name = source.name if argument == "x" else f"{source.name} of {argument}"
        is_compiled = trainer.is_compiled(model)
        if is_fit and self._options.cache:
            source = self._cached(source, data, is_compiled, path_suffix, given, options["steps_per_epoch"])
        if source.is_arrays:
            is_inline = are_arrays_read_inline(
                data, options["shuffle"], options["batch_size"], self._placement.platform
            )
        else:
            is_inline = isinstance(source, DeviceSource)
        return KerasInput(
            source,
            self._placement.place_for_step if is_compiled else (lambda batch: batch),
            0 if is_inline else self._options.prefetch if source.prefetch is None else source.prefetch,
            steps and model.steps_per_execution * math.ceil(steps / model.steps_per_execution),
            report,
            on_first_batch,
            self._process_group.make_batch_check(name, lambda: source.num_batches) if source.is_shared else None,
            argument,
        )

    def _pending_of(self, generator: Any) -> Pending:
        return self._pending.setdefault(generator, deque())

    def _cached(
        self,
        source: InputSource,
        data: tuple[Any, ...],
        is_compiled: bool,
        path_suffix: str,
        given: Any,
        steps: int | None,
    ) -> InputSource:
        """Return ``source`` with the cache of the options; ``steps`` are those of an epoch that the user gave."""
        cache = self._options.cache
        on_devices = cache == "device" and is_compiled
        if source.is_arrays:
            return self._device_source(data, given) if on_devices else source
        if steps is not None:
            raise OptionError(
                f"InputOptions: cache={str(cache)!r} keeps what an epoch has read, and with steps_per_epoch={steps} an epoch may "
                f"end before the {source.name} does. Fix: leave out the steps (validation_steps for validation data), or the cache."
            )
        if on_devices:
            return CachedSource(source, [], self._placement.place_for_step)
        if cache in ("memory", "device"):
            return CachedSource(source, [])
        group = self._process_group
        own = f".{group.process}" if group.processes > 1 else ""  # Workers may share a folder.
        return CachedSource(source, FileBatchStore(f"{cache}{path_suffix}{own}"))

    def _device_source(self, data: tuple[Any, ...], given: dict[str, Any]) -> InputSource:
        """Return a source of arrays on the devices; the order of their rows is that of a source on the host."""
        everything = given | {"shuffle": False, "batch_size": sys.maxsize, "steps_per_epoch": None}
        whole = next(make_source(*data, **everything).batches())
        numbers = np.arange(count_rows(whole))
        return DeviceSource(make_source(numbers, **given | {"class_weight": None}), whole, self._placement)


_COUNTS = ("batch_size", "validation_batch_size", "steps_per_epoch", "steps", "validation_steps")
_EPOCHS = ("epochs", "initial_epoch")
_SWITCHES = ("shuffle", "verbose", "return_dict")


def check_call(name: str, given: dict[str, Any]) -> None:
    """Check the arguments of a call of the model before anything begins, and make the numbers Python's.

    What plain Keras accepts is accepted, except for a 0 or an empty value that Keras takes for None.

    Raises:
        InputError: the data have no rows, or no numbers.
        OptionError: another argument is out of its range.
    """
    for argument in (each for each in (*_COUNTS, *_EPOCHS) if each in given):
        if given[argument] is not None or argument in _EPOCHS:
            number = int(given[argument]) if isinstance(given[argument], bool) else given[argument]  # as in Keras
            given[argument] = whole_number(
                f"{name}: {argument}", number, None if argument in _EPOCHS else 1, maximum=sys.maxsize
            )
    for argument in _SWITCHES:
        truth(f"{name}: {argument}", given.get(argument))
    if given.get("class_weight") is not None:
        instance_of(Mapping, f"{name}: class_weight", given["class_weight"], "a dict from classes to weights")
    _check_callbacks(f"{name}: callbacks", given.get("callbacks"))
    is_batch = name in _ON_BATCH
    check_data(f"{name}: x", given.get("x"), is_arrays=is_batch, may_be_empty=is_batch)
    for argument in ("y", "sample_weight"):
        if given.get(argument) is not None and not (argument == "sample_weight" and _are_without(given[argument])):
            check_data(f"{name}: {argument}", given[argument], is_arrays=True, may_be_empty=is_batch)
    _check_validation(name, given)


def _are_without(weights: Any) -> bool:
    """Return whether a list or tuple says of each of several outputs that it has no weights."""
    return isinstance(weights, (list, tuple)) and len(weights) > 1 and all(one is None for one in weights)


def _check_callbacks(name: str, callbacks: Any) -> None:
    if truth(name, callbacks):
        check_depth(name, callbacks)
        for callback in _as_list(callbacks):
            if not callable(getattr(callback, "set_model", None)):
                raise OptionError(
                    f"{name}: expected keras.callbacks.Callback objects, got {shown(callback)}. Fix: derive its class from Callback."
                )


def callbacks_in(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks among the arguments of a call of ``fit``, which takes one, a list, a tuple, a dict or None."""
    return _as_list(arguments.get("callbacks"))


def _as_list(callbacks: Any) -> list[Any]:
    given = keras.tree.flatten(callbacks) if isinstance(callbacks, dict) else callbacks
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _check_validation(name: str, given: dict[str, Any]) -> None:
    data, split = given.get("validation_data"), given.get("validation_split")
    if data is None and truth(f"{name}: validation_split", split):
        share = real_number(f"{name}: validation_split", split, what="a share of the rows")
        if share >= 1:
            raise OptionError(
                f"{name}: validation_split: expected a share of the rows below 1, got {shown(split)}. Fix: pass a number such as 0.2."
            )
    elif data is None:
        return
    else:
        check_data(f"{name}: validation_data", data)
    frequency = given.get("validation_freq", 1)
    if not isinstance(frequency, (int, list)) or (not isinstance(frequency, list) and frequency == 0):
        raise OptionError(
            f"{name}: validation_freq: expected a number of epochs or a list of epochs, got {shown(frequency)}. Fix: pass an int from 1, or "
            "a list of ints."
        )


def _check_targets(model: keras.Model, name: str, given: Mapping[str, Any]) -> None:
    """Refuse arrays without targets if the model's loss needs them: Keras fails in the first step, or after an epoch of training.

    Raises:
        InputError: targets are missing.
    """
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None]
    is_own = graph.overrides_any(model, "train_step", "test_step", "compute_loss", "stateless_compute_loss")
    if (
        not losses
        or is_own
        or any(isinstance(loss, keras.Loss) and graph.overrides_any(loss, "__call__") for loss in losses)
    ):
        return
    arrays = {"y": (given.get("x"), given.get("y"))}
    if given.get("validation_data") is not None:
        arrays["validation_data"] = trainer.unpack_x_y_sample_weight(given["validation_data"])[:2]
    for argument, (x, y) in arrays.items():
        if y is None and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in keras.tree.flatten(x)):
            pair = "y" if argument == "y" else "(x, y)"
            raise InputError(
                f"{name}: {argument}: the loss of {model.name!r} compares outputs with targets, and there are none. Fix: pass {pair}, or "
                "compile() without a loss."
            )


def _limited(steps: int | None) -> int | None:
    """Return the steps of an epoch as Keras limits them: ``steps`` or KERAS_MAX_STEPS_PER_EPOCH."""
    return min((number for number in (steps, keras.config.max_steps_per_epoch()) if number), default=None)


def _split_validation(given: dict[str, Any]) -> None:
    """Split validation data off the arguments of ``fit``, as ``validation_split`` requests."""
    fraction = given.pop("validation_split", 0.0)
    if fraction and given.get("validation_data") is None:
        data = tuple(given.get(name) for name in _DATA)
        kept, held_out = trainer.train_validation_split(data, validation_split=fraction)
        given.update(zip(_DATA, kept, strict=True), validation_data=held_out)


@contextmanager
def _explained_without_batches(name: str, opened: KerasInput) -> Iterator[None]:
    """Replace the error of Keras's loop, which uses the results of a last step, if there was no batch at all."""
    try:
        yield
    except (StopIteration, UnboundLocalError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        is_of_user = not innermost.f_globals.get("__name__", "").startswith(("keras.", "lockstep."))
        if opened.total_taken or is_of_user:
            raise
        raise InputError(
            f"{name}: x: the {opened.source.name} has no batches. Fix: give it at least one; make one that has ended anew for each call."
        ) from error


@contextmanager
def _closing(opened: KerasInput) -> Iterator[KerasInput]:
    try:
        yield opened
    except BaseException:
        opened.close(failed=True)
        raise
    opened.close()
