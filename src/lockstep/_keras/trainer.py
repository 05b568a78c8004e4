"""The seam: the only file that touches what Keras does not document.

What is used, all seen in Keras 3.15: the trainer's ``make_*_function`` methods and what they leave in ``train_function``,
``test_function`` and ``predict_function``; ``_jax_state``, out of which ``jax_state_sync`` writes values back into
variables; ``stateless_call``, looked up on the instance; the masks that Keras hangs on tensors; ``_flatten_layers``; the
names of seed generators' variables and the seed of all; the data adapters, and the generator that puts batches on the
default device. :func:`check_keras` refuses a Keras where they are missing.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from lockstep._errors import BackendError, ModelError

try:
    import keras
    from keras.src.backend import get_keras_mask, set_keras_mask
    from keras.src.trainers import data_adapters
    from keras.src.trainers.data_adapters.array_slicing import train_validation_split
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.data_adapters.data_adapter_utils import get_jax_iterator, unpack_x_y_sample_weight
    from keras.src.utils.rng_utils import get_random_seed
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "tensorflow":
        raise
    raise BackendError(
        "Keras starts with the TensorFlow backend unless it is told otherwise. Lockstep needs JAX: set "
        'os.environ["KERAS_BACKEND"] = "jax" (or export KERAS_BACKEND=jax) before the first import of keras or lockstep.'
    ) from None  # Where in Keras that was seen helps nobody.

__all__ = [
    "DataAdapter",
    "adapter_of",
    "attach_strategy",
    "check_keras",
    "claim_models",
    "clear_synchronized",
    "get_jax_iterator",
    "get_keras_mask",
    "get_random_seed",
    "global_batch_reason",
    "is_array_adapter",
    "is_seed",
    "is_synced",
    "is_tf_dataset",
    "lacks_aggregation",
    "set_keras_mask",
    "standardize_batch",
    "strategy_of",
    "train_validation_split",
    "training_state",
    "unpack_x_y_sample_weight",
    "unwrap_iterator",
    "write_back_values",
]

FUNCTIONS = ("train", "test", "predict")
_OWNER = "_lockstep_owner"


def check_keras() -> None:
    """Refuse a Keras that is not on JAX, or whose trainer has another shape than the one described above."""
    if keras.backend.backend() != "jax":
        raise BackendError(
            f"Lockstep needs Keras on JAX, but Keras runs on {keras.backend.backend()}. Set "
            'os.environ["KERAS_BACKEND"] = "jax" before the first import of keras.'
        )
    others = ["jax_state_sync", "stateless_call", "_flatten_layers", "_symbolic_build"]
    wanted = [f"make_{name}_function" for name in FUNCTIONS] + others
    if missing := [name for name in wanted if not hasattr(keras.Model, name)]:
        raise BackendError(
            f"Keras {keras.__version__} has no Model.{missing[0]}; this version of Lockstep knows Keras 3.15. Install "
            "keras>=3.15,<3.16, or a newer Lockstep."
        )


# --- while a scope is open ---------------------------------------------------------------------------------------

Claim = Callable[[keras.Model], None]  # makes a model its own, or raises where it belongs to another

_install_lock = threading.Lock()
_installed: dict[str, int] = {"count": 0}
_originals: list[tuple[type, str, Any]] = []


@contextlib.contextmanager
def claim_models(current: Callable[[], Claim | None]) -> Iterator[None]:
    """Hand over each model that is made, compiled or used while this context, or another one, is open.

    ``current()`` says who claims the models of the calling thread, or None where no scope is open: other threads see
    the plain Keras. What was changed is restored when the last context closes, after an exception too.
    """
    with _install_lock:
        _installed["count"] += 1
        if _installed["count"] == 1:
            _originals[:] = _install(current)
    try:
        yield
    finally:
        with _install_lock:
            _installed["count"] -= 1
            if _installed["count"] == 0:
                for owner, name, original in _originals:
                    setattr(owner, name, original)
                _originals.clear()


def _install(current: Callable[[], Claim | None]) -> list[tuple[type, str, Any]]:
    trainer = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))
    base = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    changed = [(trainer, "__init__"), (base, "compile"), *((trainer, f"make_{name}_function") for name in FUNCTIONS)]
    originals = [(owner, name, vars(owner)[name]) for owner, name in changed]
    for owner, name, original in originals:
        setattr(owner, name, _claiming(original, name, current))
    normalization = keras.layers.BatchNormalization
    originals.append((normalization, "__init__", vars(normalization)["__init__"]))
    normalization.__init__ = _accepting_synchronized(normalization.__init__, current)
    return originals


def _claiming(original: Callable[..., Any], name: str, current: Callable[[], Claim | None]) -> Callable[..., Any]:
    """``original``, whose model is claimed first; a constructor must have run before."""

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


def _accepting_synchronized(original: Callable[..., None], current: Callable[[], Claim | None]) -> Callable[..., None]:
    """The constructor of BatchNormalization, which takes ``synchronized=True`` in a scope, where it has a meaning."""

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
    owner: Any,
    make: Callable[[str], Callable[..., Any]],
    around_build: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Have ``model`` run functions that ``make("train" | "test" | "predict")`` builds, and be built within a context, from now on and everywhere.

    Keras builds its functions in ``make_train_function`` and so on; these are shadowed on the instance, so that the
    class and every other model stay as they are. ``compile`` drops the functions, and the next ``fit`` builds anew.

    Raises:
        ModelError: the model's class makes a function of its own, which would be lost.
    """
    for name in FUNCTIONS:
        maker = next(cls for cls in type(model).__mro__ if f"make_{name}_function" in vars(cls))
        if maker not in keras.Model.__mro__:
            raise ModelError(
                f"{maker.__name__} makes its own {name} function, and so does a strategy. Override {name}_step instead of "
                f"make_{name}_function, or train the model outside of a strategy."
            )
    for name in FUNCTIONS:
        model.__dict__[f"make_{name}_function"] = functools.partial(_make_function, model, name, make)
        setattr(model, f"{name}_function", None)
    model.__dict__["_symbolic_build"] = functools.partial(_build, model, around_build)
    model.__dict__[_OWNER] = owner


def strategy_of(model: keras.Model) -> Any:
    """The owner that ``model`` was adopted by, or None."""
    return model.__dict__.get(_OWNER)


def _build(
    model: keras.Model, around: Callable[[], contextlib.AbstractContextManager[Any]], *given: Any, **named: Any
) -> None:
    with around():
        type(model)._symbolic_build(model, *given, **named)


def _make_function(
    model: keras.Model, name: str, make: Callable[[str], Callable[..., Any]], force: bool = False
) -> Any:
    attribute = f"{name}_function"
    function = make(name)  # Also where one is there: this is where a strategy refuses a wrong scope.
    if getattr(model, attribute) is None or force:
        setattr(model, attribute, function)
    return getattr(model, attribute)


def training_state(model: keras.Model, batch: Any) -> tuple[list[Any], ...]:
    """Values of all variables that a training step reads, of a compiled model that is built for ``batch``.

    Returns:
        Trainable, non-trainable, optimizer's and metrics' values; the model keeps them too.
    """
    model._symbolic_build(data_batch=batch)
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    return tuple([variable.value for variable in kind] for kind in kinds)


def is_synced(model: keras.Model) -> bool:
    """Whether the variables have the newest values during ``fit``; within an epoch only where a callback asked for them."""
    return model._jax_state_synced


def write_back_values(model: keras.Model, names: tuple[str, ...], state: Any) -> None:
    """Write values back into a model's variables after a step failed: Keras takes them out before and would lose them.

    Args:
        model: the model.
        names: kind of each part of ``state``, for example ``("trainable_variables", "non_trainable_variables")``.
        state: for each kind the values, in the order of the model's variables.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)):
        return  # The step had begun to run and owned them; nothing is left to be kept.
    model._jax_state = dict(zip(names, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()
    model._jax_state = None


# --- inputs --------------------------------------------------------------------------------------------------------

adapter_of = data_adapters.get_data_adapter  # x, y, sample_weight, batch_size, … as given to ``fit``
is_tf_dataset = data_adapters.is_tf_dataset


def is_array_adapter(adapter: DataAdapter) -> bool:
    """Whether an input is arrays that lie in memory as a whole."""
    return isinstance(adapter, data_adapters.ArrayDataAdapter)


standardize_batch = data_adapters.PyDatasetAdapter._standardize_batch  # what a PyDataset returned, as a tuple


def unwrap_iterator(iterator: Any) -> Any:
    """The adapter's iterator inside the one that Keras hands over.

    On accelerators Keras wraps it in a generator that first copies each batch to the default device.
    """
    if inspect.isgenerator(iterator) and iterator.gi_code.co_name == "_one_batch_ahead_iterator":
        return inspect.getgeneratorlocals(iterator).get("numpy_iterator", iterator)
    return iterator


# --- small facts about layers, variables and tensors ---------------------------------------------------------------


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a ``keras.random.SeedGenerator``."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def global_batch_reason(model: keras.Model) -> str | None:
    """Why a model must see the global batch at once, or None: replicas of their own would change what it means."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            return f"layer {layer.name!r} normalizes over all replicas (synchronized=True)"
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            return f"layer {layer.name!r} keeps a state for each row of the batch (stateful=True)"
    for variable in model.trainable_variables:
        if variable.overwrite_with_gradient:  # What comes back is a new value, the scale of float8, and no gradient.
            return f"variable {variable.path!r} takes its gradient as its new value (float8)"
    return None


def lacks_aggregation(model: keras.Model, variable: keras.Variable) -> bool:
    """Whether a variable of somebody's own layer leaves open how the values of replicas meet.

    Keras's own layers leave it open too; of those that change in a forward pass the mean by rows is right.
    """
    if variable.aggregation in ("mean", "sum", "only_first_replica") or is_seed(variable):
        return False
    owners = [
        layer for layer in model._flatten_layers() if any(variable is own for own in layer._non_trainable_variables)
    ]
    return any(not type(owner).__module__.startswith("keras.") for owner in owners)


def unsynchronized_normalizations(model: keras.Model) -> list[str]:
    """Names of the BatchNormalization layers that normalize each replica's rows on their own."""
    layers = model._flatten_layers()
    return [x.name for x in layers if isinstance(x, keras.layers.BatchNormalization) and not x.synchronized]


@contextlib.contextmanager
def clear_synchronized(model: keras.Model) -> Iterator[None]:
    """Let synchronized layers run on JAX for the length of a trace in which they see the global batch anyway."""
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization) and x.synchronized]
    for layer in layers:
        layer.synchronized = False
    try:
        yield
    finally:
        for layer in layers:
            layer.synchronized = True
