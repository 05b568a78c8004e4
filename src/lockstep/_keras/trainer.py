"""Keras's trainer and data adapters: what ``fit`` calls (``make_train_function``), what it reads, and how Lockstep replaces it.

Undocumented parts, as of Keras 3.15: ``make_*_function`` and the attributes ``train_function``, ``test_function`` and
``predict_function``; ``_symbolic_build``, and what it calls to build a model from shapes; ``_jax_state``, the values that
``jax_state_sync`` writes back into variables, and ``_jax_state_synced``, which says whether that is done; ``stateless_call``, looked up
on the instance; the count of an optimizer,
``_iterations``; the seed of all; the adapters and their functions, the form that ``PyDatasetAdapter`` gives to a batch, and the
generator that puts batches on the default device; the names of global attributes, each thread of which has its own; the function that
finds a device by its name. :func:`check_keras` refuses a Keras without these methods.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.jax import distribution_lib as backend_devices
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays as can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import train_validation_split as train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import get_jax_iterator as get_jax_iterator
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight as unpack_x_y_sample_weight
from keras.src.utils.rng_utils import get_random_seed as get_random_seed

from lockstep._errors import BackendError, ModelError, OptionError, shown, summary_of
from lockstep._keras.patches import (
    CLAIM_MODELS,
    END_SAVE_FUNCTIONS,
    END_SAVES,
    INTERCEPT_FIT,
    LOCAL_DEVICES,
    MODEL_CALLS,
    OPTIMIZER_VARIABLES,
    SHARD_VARIABLES,
    STATE_SYNC,
    STEP_FUNCTIONS,
    SYNCHRONIZED_ARGUMENT,
    Patch,
    install,
    patched,
    value_in_context,
)
from lockstep._keras.variable_placement import VariableSharder, lay_out_uninitialized, lay_out_value, stored_values

FUNCTIONS = ("train", "test", "predict")
# Attribute of a function that replaces a method of a model's own class: what ``super()`` calls in that method.
_OF_SUPER = "of_super"
_STRATEGY = "_lockstep_owner"
DEFAULT_BATCH_SIZE = 32  # of fit, evaluate and predict
STATE_KINDS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def check_keras() -> None:
    """Refuse a Keras that is not on JAX, or whose trainer lacks one of the methods above.

    Raises:
        BackendError: it is so.
    """
    if keras.backend.backend() != "jax":
        raise BackendError(
            f"Lockstep needs Keras on JAX, but Keras runs on {keras.backend.backend()}. Fix: set "
            'os.environ["KERAS_BACKEND"] = "jax" before the first import of keras.'
        )
    others = ["_get_jax_state", "jax_state_sync", "stateless_call", "_flatten_layers", "_symbolic_build"]
    wanted = [f"make_{name}_function" for name in FUNCTIONS] + others
    if missing := [name for name in wanted if not hasattr(keras.Model, name)]:
        raise BackendError(
            f"Keras {keras.__version__} has no Model.{missing[0]}; this version of Lockstep knows Keras 3.15. Fix: install "
            "keras>=3.15,<3.16, or a newer Lockstep."
        )


# --- while a scope is open ---------------------------------------------------------------------------------------

Claim = Callable[[keras.Model], None]  # attaches a strategy to a model, or raises if it belongs to another one


class _SharedPatches:
    """Patches of Keras's classes that threads share: the first context makes them, and the last one takes them back."""

    def __init__(self) -> None:
        self._lock, self._count, self._patches = threading.Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def open(self, patch_classes: Callable[[contextlib.ExitStack], None]) -> Iterator[None]:
        with self._lock:
            if self._count == 0:
                with contextlib.ExitStack() as patches:
                    patch_classes(patches)
                    self._patches = patches.pop_all()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._patches.close()


class _CallPatches(_SharedPatches):
    """Patches of the methods of models.

    Attributes:
        current: returns what claims the models of the calling thread; None without a scope.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Callable[[], Claim | None] = lambda: None


_claims, _calls = _SharedPatches(), _CallPatches()


@contextlib.contextmanager
def claim_models(
    current: Callable[[], Claim | None], current_sharder: Callable[[], VariableSharder | None] = lambda: None
) -> Iterator[None]:
    """Claim each model that is made, compiled or used, and shard each variable that is made while such a context is open.

    Keras's classes are restored when the last context closes, also after an exception.

    Args:
        current: returns what claims the models of the calling thread, or None if that thread has no scope open: it then
            uses plain Keras.
        current_sharder: returns where new variables of the calling thread are laid, or None.
    """
    _calls.current = current
    with _claims.open(lambda patches: _patch_classes(patches, current, current_sharder)), _calls.open(_patch_calls):
        yield


def _patch_classes(
    patches: contextlib.ExitStack,
    current: Callable[[], Claim | None],
    current_sharder: Callable[[], VariableSharder | None],
) -> None:
    trainer, base = _owner_of("make_train_function"), _owner_of("compile")
    changed = [(trainer, "__init__"), (base, "compile"), *((trainer, f"make_{name}_function") for name in FUNCTIONS)]
    claiming = [(owner, name, _claiming(vars(owner)[name], name, current)) for owner, name in changed]
    patches.enter_context(patched(CLAIM_MODELS, claiming))
    owner = _owner_of("_initialize", keras.Variable)
    lays = {"_initialize": lay_out_value, "_initialize_with_initializer": lay_out_uninitialized}
    laying_out = [(owner, name, _laying_out(vars(owner)[name], lay, current_sharder)) for name, lay in lays.items()]
    patches.enter_context(patched(SHARD_VARIABLES, laying_out))
    (add,) = OPTIMIZER_VARIABLES.attributes
    optimizer = _owner_of(add, keras.Optimizer)
    patches.enter_context(patched(OPTIMIZER_VARIABLES, [(optimizer, add, _marking_optimizer(vars(optimizer)[add]))]))
    normalization = keras.layers.BatchNormalization
    construct = _accept_synchronized(vars(normalization)["__init__"], current)
    patches.enter_context(patched(SYNCHRONIZED_ARGUMENT, [(normalization, "__init__", construct)]))


_in_optimizer = ContextVar("_in_optimizer", default=False)


def is_in_optimizer() -> bool:
    """Return whether an optimizer makes a variable for one of the model's."""
    return _in_optimizer.get()


def _marking_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        with value_in_context(_in_optimizer, True):
            return original(*args, **kwargs)

    return method


def _claiming(original: Callable[..., Any], name: str, current: Callable[[], Claim | None]) -> Callable[..., Any]:
    """Return ``original`` with a claim of its model before the call; after it if it is the constructor."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        claim = current()
        if claim is None:
            return original(self, *args, **kwargs)
        if name == "__init__":
            original(self, *args, **kwargs)
        claim(self)
        if name == "__init__":
            return None
        own = self.__dict__.get(name)  # what the claim has put in place of ``original``
        return own(*args, **kwargs) if own else original(self, *args, **kwargs)

    return method


def _laying_out(
    original: Callable[..., None],
    lay: Callable[[keras.Variable, Any, VariableSharder], None],
    current: Callable[[], VariableSharder | None],
) -> Callable[..., None]:
    """Return a variable's ``original`` which gives it a layout first, by ``lay``; Keras lays all later values over the devices by it."""

    @functools.wraps(original)
    def initialize(self: Any, value: Any) -> None:
        sharder = current()
        if sharder is not None:
            lay(self, value, sharder)
        original(self, value)

    return initialize


def _accept_synchronized(original: Callable[..., None], current: Callable[[], Claim | None]) -> Callable[..., None]:
    """Return BatchNormalization's constructor with ``synchronized=True`` allowed in a scope."""

    @functools.wraps(original)
    def construct(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        if synchronized and current() is not None:
            original(self, *args, **kwargs)
            self.synchronized = True
        else:
            original(self, *args, synchronized=synchronized, **kwargs)

    construct.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras reads the names there.
    return construct


# --- a model that has a strategy ---------------------------------------------------------------------------------


def attach_strategy(
    model: keras.Model,
    strategy: Any,
    check: Callable[[], None],
    make: Callable[[str], Callable[..., Any]],
    build_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Make ``model`` run a strategy's functions from now on.

    Keras builds its functions in ``make_train_function`` and so on; these are replaced on the instance, so that the
    class and every other model stay as they are. ``compile`` drops the functions, and the next ``fit`` builds them again.

    Args:
        model: a model without a strategy.
        strategy: what :func:`strategy_of` returns for the model from now on.
        check: is called whenever Keras asks for a function, and may refuse the call.
        make: builds the function of a kind: "train", "test" or "predict".
        build_context: is open while Keras builds the model's variables.

    Raises:
        ModelError: the model's class makes a function of its own, which would be lost.
    """
    for name in FUNCTIONS:
        maker = _owner_of(f"make_{name}_function", type(model))
        if maker not in keras.Model.__mro__:
            raise ModelError(
                f"{maker.__name__} makes its own {name} function, and so does a strategy. Fix: override {name}_step instead of "
                f"make_{name}_function, or train the model outside of a strategy."
            )
    makers = [
        (f"make_{name}_function", functools.partial(_make_function, model, name, check, make)) for name in FUNCTIONS
    ]
    builder = ("_symbolic_build", functools.partial(_build, model, build_context))
    reader = ("_get_jax_state", functools.partial(_get_state, model))
    install(STEP_FUNCTIONS, [(model, name, value) for name, value in (*makers, builder, reader)])
    for name in FUNCTIONS:
        setattr(model, f"{name}_function", None)
    model.__dict__[_STRATEGY] = strategy


def strategy_of(model: keras.Model) -> Any:
    """Return the strategy that is attached to ``model``, or None."""
    return model.__dict__.get(_STRATEGY)


def _build(
    model: keras.Model, context: Callable[[], contextlib.AbstractContextManager[Any]], *args: Any, **kwargs: Any
) -> None:
    with context():
        type(model)._symbolic_build(model, *args, **kwargs)


def _get_state(model: keras.Model, **wanted: bool) -> Any:
    with stored_values():
        return type(model)._get_jax_state(model, **wanted)


def _make_function(
    model: keras.Model,
    name: str,
    check: Callable[[], None],
    make: Callable[[str], Callable[..., Any]],
    force: bool = False,
) -> Any:
    attribute = f"{name}_function"
    check()
    if getattr(model, attribute) is None or force:
        setattr(model, attribute, make(name))
    return getattr(model, attribute)


# --- the state of a running fit ----------------------------------------------------------------------------------


def training_state(model: keras.Model, batch: Any) -> tuple[list[Any], ...]:
    """Build a compiled model for ``batch`` and return the values of all variables that a training step reads.

    Returns:
        Trainable, non-trainable, optimizer's and metrics' values; the model keeps them too.
    """
    model._symbolic_build(data_batch=batch)
    with stored_values():
        return tuple([variable.value for variable in kind] for kind in variables_of(model))


def variables_of(model: keras.Model) -> list[list[keras.Variable]]:
    """The variables in the order of a training step's state."""
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    return [list(kind) for kind in kinds]


def build_for_inputs(model: keras.Model, x: Any) -> None:
    """Build a model without its optimizer and metrics, as ``fit`` does; ``x`` is a tree of arrays ``(rows, …)`` or of their shapes and types."""

    def described(array: Any) -> keras.KerasTensor:
        return keras.KerasTensor(tuple(array.shape), keras.backend.standardize_dtype(array.dtype))

    if not all(layer.built for layer in model._flatten_layers()):
        compute_output_spec(model, keras.tree.map_structure(described, x), training=False)


def is_synced(model: keras.Model) -> bool:
    """Return whether the variables have the newest values during ``fit``; within an epoch only after a callback read them."""
    return model._jax_state_synced


@contextlib.contextmanager
def refresh_before_sync(model: keras.Model, fetch: Callable[[], Any]) -> Iterator[None]:
    """Fetch the newest values each time that Keras, or a callback by ``self.model``, writes its state into the variables.

    ``fetch`` returns the values of a training step's state, or None if Keras has the newest.
    """
    original = model.jax_state_sync

    def jax_state_sync() -> None:
        state = vars(model).get("_jax_state") or {}
        is_training = "optimizer_variables" in state  # and no evaluation within fit
        if is_training and not model._jax_state_synced:
            newest = fetch()
            if newest is not None:
                model._jax_state = dict(zip(STATE_KINDS, newest, strict=True))
        original()

    with patched(STATE_SYNC, [(model, "jax_state_sync", jax_state_sync)]):
        yield


def set_state(model: keras.Model, names: tuple[str, ...], state: Any) -> None:
    """Give a model the state after a step, as Keras does next; its tracking of the values is left to it. See :func:`write_back_values`."""
    vars(model)["_jax_state"] = dict(zip(names, state, strict=True))


def end_state(model: keras.Model) -> None:
    """Write the state of a call that an exception has ended into the variables: ``evaluate`` and ``predict`` of Keras do not."""
    model.jax_state_sync()
    model._jax_state = None


def write_back_values(model: keras.Model, names: tuple[str, ...], state: Any) -> None:
    """Write values back into a model's variables after a step failed: Keras takes them out before and would lose them.

    Args:
        model: the model.
        names: kind of each part of ``state``, for example ``("trainable_variables", "non_trainable_variables")``.
        state: for each kind the values, in the order of the model's variables.
    """
    set_state(model, names, state)
    model._jax_state_synced = False
    end_state(model)


def names_without_decay(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[tuple[str, keras.Variable]]
) -> list[str]:
    """Return the names of the variables that were passed to ``exclude_from_weight_decay``; they are not in the optimizer's configuration."""
    return [name for name, variable in variables if not optimizer._use_weight_decay(variable)]


def learning_rate_on_host(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the learning rate; a schedule gets the count of steps from the host, as this process may be the only one that asks.

    A program on arrays of several processes must be started by all of them.
    """
    schedule = optimizer._learning_rate
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return schedule(np.asarray(keras.ops.convert_to_numpy(optimizer._iterations)))
    return optimizer.learning_rate


def optimizer_maker(optimizer: keras.optimizers.Optimizer) -> Callable[[], keras.optimizers.Optimizer]:
    """Return a function that makes an optimizer of the present configuration, with the same schedule of the learning rate.

    Raises:
        OptionError: Keras cannot make one; the function may raise it, too.
    """
    with _explained(optimizer):
        config = optimizer.get_config()  # Not while a program is traced: it reads values.
    if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = optimizer._learning_rate  # Its class need not be registered.

    def make() -> keras.optimizers.Optimizer:
        with _explained(optimizer):
            return type(optimizer).from_config(dict(config))

    return make


@contextlib.contextmanager
def _explained(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OptionError(
            f"{type(optimizer).__name__}: each server needs an optimizer of its own, and Keras cannot make one from the configuration: "
            f"{shown(summary_of(error))}. Fix: give the class a get_config with all arguments of its constructor, and register classes "
            "and functions in it with keras.saving.register_keras_serializable."
        ) from error


def keep_learning_rates(optimizer: Any, restored: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """Return values of the variables of an optimizer, which may have others inside: ``restored``, but the learning rates of ``now``."""
    rates = {id(each._learning_rate) for each in nested_optimizers(inner_optimizer(optimizer))}
    values = zip(optimizer.variables, restored, now, strict=True)
    return [new if id(variable) in rates else old for variable, old, new in values]


def steps_done(optimizer: Any) -> int:
    """Return the number of training steps that an optimizer has seen.

    With gradient accumulation the public ``iterations`` leaves out the steps since the last update.
    """
    return int(np.asarray(keras.ops.convert_to_numpy(inner_optimizer(optimizer)._iterations)))


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that makes the updates: that inside a ``LossScaleOptimizer``."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def batches_per_update(optimizer: Any) -> int:
    """Return the number of batches whose gradients make one update."""
    return inner_optimizer(optimizer).gradient_accumulation_steps or 1


def nested_optimizers(optimizer: Any) -> list[Any]:
    """Return an optimizer and, of a ``MultiOptimizer``, those inside it."""
    inside = optimizer.optimizers if isinstance(optimizer, keras.optimizers.MultiOptimizer) else []
    return [optimizer, *inside]


def adjustable_learning_rate(optimizer: Any) -> keras.Variable | None:
    """Return the variable with the learning rate; None if there are several rates, or a schedule."""
    inner = inner_optimizer(optimizer)
    is_one = not isinstance(inner, keras.optimizers.MultiOptimizer) and isinstance(inner.learning_rate, keras.Variable)
    return inner.learning_rate if is_one else None


def is_compiled(model: keras.Model) -> bool:
    """Return whether the steps of a model are compiled."""
    return model.jit_compile and not model.run_eagerly


Fit = Callable[..., Any]
FitInterceptor = Callable[[keras.Model, Fit, tuple[Any, ...], dict[str, Any]], Any]

_interceptors: list[FitInterceptor] = []  # of the process, as any thread may call fit; the last one is in effect
_in_interceptor: ContextVar[bool] = ContextVar("in_interceptor", default=False)


@contextlib.contextmanager
def intercept_fit(interceptor: FitInterceptor) -> Iterator[None]:
    """Call ``interceptor(model, fit, args, kwargs)`` in place of each ``fit`` in any thread, with or without a strategy, while this is open.

    ``fit(*args, **kwargs)`` is the call that the script made. Calls of ``fit`` that the interceptor makes are not intercepted.
    """
    owner = _owner_of("fit")
    original = vars(owner)["fit"]

    @functools.wraps(original)
    def fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return interceptable(model, functools.partial(original, model))(*args, **kwargs)

    _interceptors.append(interceptor)
    try:
        with value_in_context(_in_interceptor, False), patched(INTERCEPT_FIT, [(owner, "fit", fit)]):
            yield
    finally:
        _interceptors.remove(interceptor)


@contextlib.contextmanager
def observe_saves(observe: Callable[[keras.Model], None]) -> Iterator[None]:
    """Call ``observe`` with each model that is about to be saved or exported while this is open; what it raises prevents that."""
    names = END_SAVE_FUNCTIONS.attributes
    functions = [(module, name) for module in (keras.models, keras.saving) for name in names if hasattr(module, name)]
    with observe_calls(END_SAVES, observe), _observe(END_SAVE_FUNCTIONS, functions, observe):
        yield


def observe_calls(patch: Patch, observe: Callable[[keras.Model], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``observe`` with the model before each call of the methods of a patch while this is open; what it raises ends the call."""
    return _observe(patch, [(_owner_of(name), name) for name in patch.attributes], observe)


def _observe(
    patch: Patch, attributes: Iterable[tuple[Any, str]], observe: Callable[[keras.Model], None]
) -> contextlib.AbstractContextManager[None]:
    def observing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            observe(model)
            return original(model, *args, **kwargs)

        return method

    return patched(patch, [(owner, name, observing(vars(owner)[name])) for owner, name in attributes])


def interceptable(model: keras.Model, fit: Fit) -> Fit:
    """Return ``fit`` of a model with its calls going to the current interceptor, if there is one."""

    @functools.wraps(fit)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _interceptors or _in_interceptor.get():
            return fit(*args, **kwargs)
        with value_in_context(_in_interceptor, True):
            return _interceptors[-1](model, fit, args, kwargs)

    return call


# --- methods of a model's own class -------------------------------------------------------------------------------

_redirect: ContextVar[tuple[keras.Model, str, Callable[..., Any]] | None] = ContextVar("redirect", default=None)


def method_of_keras(name: str) -> Callable[..., Any]:
    """Return Keras's method of this name, without those of a model's own class."""
    return vars(_owner_of(name))[name]


def has_own(model: keras.Model, name: str) -> bool:
    """Return whether a method is one of the model's own class, and not Keras's."""
    return _owner_of(name, type(model)) not in keras.Model.__mro__


@contextlib.contextmanager
def redirect_super(model: keras.Model, name: str, method: Callable[..., Any]) -> Iterator[list[None]]:
    """While open, let ``super().<name>(…)`` in a method of the model's own class call ``method``, without the model, in this thread.

    Yields:
        A list with an entry for each such call.
    """
    calls: list[None] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    with _calls.open(_patch_calls), value_in_context(_redirect, (model, name, counted)):
        yield calls


def with_super(call: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, which replaces a method of a model's own class, with what ``super()`` calls in that method.

    The first call in a scope of a model that was compiled before is known only there.
    """
    setattr(call, _OF_SUPER, method)
    return call


def _patch_calls(patches: contextlib.ExitStack) -> None:
    owners = [(_owner_of(name), name) for name in MODEL_CALLS.attributes]
    intercepting = [(owner, name, _intercepting(vars(owner)[name], name)) for owner, name in owners]
    patches.enter_context(patched(MODEL_CALLS, intercepting))


def _intercepting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``original``, or what is to be called in its place: in a method of a model's own class, or in the first call in a scope."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        redirect = _redirect.get()
        if redirect is not None and redirect[0] is self and redirect[1] == name:
            with value_in_context(_redirect, None):  # What it calls is Keras's.
                return redirect[2](*args, **kwargs)
        claim = _calls.current()
        if claim is None or strategy_of(self) is not None:
            return original(self, *args, **kwargs)
        claim(self)
        own = self.__dict__.get(name)
        return original(self, *args, **kwargs) if own is None else vars(own).get(_OF_SUPER, own)(*args, **kwargs)

    return method


_OF_THREAD = ("global_seed_generator", "dtype_policy")


def thread_state() -> dict[str, Any]:
    """Return what Keras knows in this thread only and users have set or used: the generator of seeds and the policy of dtypes."""
    return {name: global_state.get_global_attribute(name) for name in _OF_THREAD}


def thread_state_since(before: dict[str, Any]) -> dict[str, Any]:
    """Return the part of :func:`thread_state` that was set since it was ``before``."""
    return {name: value for name, value in thread_state().items() if value is not before[name]}


def set_thread_state(state: dict[str, Any]) -> None:
    """Have this thread use what another thread had in :func:`thread_state`, or a part of it."""
    for name, value in state.items():
        global_state.set_global_attribute(name, value)


def is_nested_evaluation(arguments: dict[str, Any]) -> bool:
    """Return whether these are the arguments with which ``fit`` calls ``evaluate``, whose input it has opened before."""
    return bool(arguments.get("_use_cached_eval_dataset"))


def _owner_of(name: str, kind: type = keras.Model) -> type:
    return next(cls for cls in kind.__mro__ if name in vars(cls))


adapter_of = data_adapters.get_data_adapter  # x, y, sample_weight, batch_size, … as given to ``fit``
is_tf_dataset = data_adapters.is_tf_dataset
standardize_batch = data_adapters.PyDatasetAdapter._standardize_batch  # what a PyDataset returned, as a tuple


def may_reuse_memory(adapter: DataAdapter) -> bool:
    """Return whether a batch may lie in memory into which the next one is written: not of arrays, nor of tf.data."""
    return not isinstance(adapter, (data_adapters.ArrayDataAdapter, data_adapters.TFDatasetAdapter))


def is_array_adapter(adapter: DataAdapter) -> bool:
    """Return whether an input is arrays in memory."""
    return isinstance(adapter, data_adapters.ArrayDataAdapter)


# What generators of Keras that copy batches read: the names of the variable in Keras 3.15 and 3.16.
_COPIES = {"_one_batch_ahead_iterator": ("numpy_iterator", "iterator"), "_distributed_iterator": ("raw_iterator",)}


def unwrap_iterator(iterator: Any) -> Any:
    """Return the adapter's iterator inside the one that Keras passes to a step function.

    On accelerators, and from Keras 3.16 on everywhere, Keras wraps it in generators that first copy each batch to the default device.
    """
    while inspect.isgenerator(iterator) and (names := _COPIES.get(iterator.gi_code.co_name)):
        values = inspect.getgeneratorlocals(iterator)
        iterator = next(values[name] for name in names if name in values)
    return iterator


@functools.cache
def name_local_devices() -> None:
    """Have names such as "cpu:0" mean devices of this process, as in ``keras.device`` and in the data pipelines of Keras."""
    original = backend_devices._to_backend_device

    def to_device(name: Any) -> jax.Device:
        platform, _, number = str(name).partition(":")
        if isinstance(name, jax.Device) or not (number or "0").isdigit():
            return original(name)
        local = jax.local_devices(backend=platform)
        return local[int(number or 0)] if int(number or 0) < len(local) else original(name)

    install(LOCAL_DEVICES, [(backend_devices, "_to_backend_device", to_device)])
