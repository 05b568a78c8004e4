"""Table of all attributes of Keras that Lockstep replaces, with the files that do it, and the helper that replaces and restores them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Patch:
    """One entry of the table.

    Args:
        target: the kind of object whose attributes are replaced: a class (for all models) or instances.
        attributes: names of the attributes that may be replaced.
        lifetime: how long the replacements stay.
        reason: why Lockstep replaces them.
        public_api: documented API of Keras that would replace the patch.
        used_by: files of the package that replace them.
    """

    target: str
    attributes: tuple[str, ...]
    lifetime: str
    reason: str
    public_api: str
    used_by: tuple[str, ...]


CLAIM_MODELS = Patch(
    target="class Model",
    attributes=("__init__", "compile", "make_train_function", "make_test_function", "make_predict_function"),
    lifetime="while a strategy's scope is open in any thread",
    reason="a strategy attaches itself to each model that is made, compiled or used in its scope",
    public_api="a hook that Keras calls for each new model, as it does for tf.distribute on TensorFlow",
    used_by=("_keras/trainer.py",),
)
SHARD_VARIABLES = Patch(
    target="class Variable",
    attributes=("_initialize", "_initialize_with_initializer"),
    lifetime="while a strategy's scope is open in any thread",
    reason="a variable is laid over the devices when it gets its first value, before the next variable is made",
    public_api="a layout for each new variable, as a keras.distribution gives it",
    used_by=("_keras/trainer.py",),
)
PLACEHOLDERS = Patch(
    target="class Variable",
    attributes=("_initialize_with_initializer", "_initialize", "_direct_assign"),
    lifetime="while a plan runs a user's script, or calls a function that makes a model",
    reason="a plan needs the shapes of variables, whose values may be larger than the memory of this machine",
    public_api="variables without values, as in a StatelessScope, that a whole script can make and load",
    used_by=("_keras/placeholders.py",),
)
OPTIMIZER_VARIABLES = Patch(
    target="class Optimizer",
    attributes=("add_variable_from_reference",),
    lifetime="while a strategy's scope is open in any thread",
    reason='with shard="optimizer" only the variables of optimizers are laid over the devices when they are made',
    public_api="a layout for each new variable, as a keras.distribution gives it",
    used_by=("_keras/trainer.py",),
)
SYNCHRONIZED_ARGUMENT = Patch(
    target="class BatchNormalization",
    attributes=("__init__",),
    lifetime="while a strategy's scope is open in any thread",
    reason="Keras refuses synchronized=True on JAX, where a strategy can do it",
    public_api="BatchNormalization(synchronized=True) on JAX",
    used_by=("_keras/trainer.py",),
)
STEP_FUNCTIONS = Patch(
    target="model",
    attributes=(
        "make_train_function",
        "make_test_function",
        "make_predict_function",
        "_symbolic_build",
        "_get_jax_state",
    ),
    lifetime="as long as the model",
    reason="the functions that run a step are built by the strategy, variables are built in its context, and a step gets their values as "
    "they are laid over the devices",
    public_api="a trainer that is given to the model; subclassing Model is not enough, as users bring their own classes",
    used_by=("_keras/trainer.py",),
)
FIT_INPUT = Patch(
    target="model",
    attributes=("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    lifetime="as long as the model",
    reason="arguments are checked, and inputs are wrapped in an adapter that places batches on the devices",
    public_api="registration of a data adapter",
    used_by=("data/fit_wrapper.py",),
)
MODEL_CALLS = Patch(
    target="class Model",
    attributes=("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    lifetime="while a strategy's scope is open in any thread, or a method of a model's own class runs, such as those of KerasHub",
    reason="the first call in a scope is that of the strategy, also of a model that was compiled before; and super().fit in a model's own "
    "fit is the method of Keras's class, without the input and the hooks of the strategy",
    public_api="registration of a data adapter",
    used_by=("_keras/trainer.py",),
)
CHIEF_ONLY_FILES = Patch(
    target="model",
    attributes=("save", "save_weights", "export"),
    lifetime="as long as the model",
    reason="of several workers only the chief writes files, also from Keras's own callbacks",
    public_api="a predicate of keras.saving that says whether this process writes",
    used_by=("distributed/worker_process_group.py",),
)
CHIEF_ONLY_PRESETS = Patch(
    target="model of KerasHub",
    attributes=("save_to_preset", "save_task_weights", "save_lora_weights", "export_to_transformers"),
    lifetime="as long as the model",
    reason="they write files, too, besides calling save_weights",
    public_api="a predicate of keras.saving that says whether this process writes",
    used_by=("distributed/worker_process_group.py",),
)
READ_AFTER_CHIEF = Patch(
    target="model",
    attributes=("load_weights",),
    lifetime="as long as the model",
    reason="of several workers the others may read a file before the chief has written it",
    public_api="a hook of keras.saving around reading a file",
    used_by=("distributed/worker_process_group.py",),
)
CHIEF_ONLY_FOLDERS = Patch(
    target="callback of class ModelCheckpoint",
    attributes=("_get_file_path",),
    lifetime="one call of fit on a worker that is not the chief",
    reason="it makes the folder of a file that it does not write there",
    public_api="a predicate of keras.saving that says whether this process writes",
    used_by=("distributed/worker_process_group.py",),
)
INTERCEPT_FIT = Patch(
    target="class Model",
    attributes=("fit",),
    lifetime="while a user's script runs up to its call of fit",
    reason="tools read the arguments of the script's first fit in place of running it",
    public_api="a hook around fit",
    used_by=("_keras/trainer.py",),
)
OBSERVE_COMPILE = Patch(
    target="class Model",
    attributes=("compile",),
    lifetime="while a user's script runs up to its call of fit",
    reason="the doctor notes the place where a model was compiled",
    public_api="a hook around compile",
    used_by=("tools/doctor_command.py",),
)
END_SAVES = Patch(
    target="class Model",
    attributes=("save", "save_weights", "export"),
    lifetime="while a user's script runs up to its call of fit, or a plan calls a function that makes a model",
    reason="a script whose fit was not run must not write its untrained model over a trained one on its way out, nor a plan zeros",
    public_api="a hook around writing a file",
    used_by=("_keras/trainer.py",),
)
END_SAVE_FUNCTIONS = Patch(
    target="module keras.saving, and keras.models",
    attributes=("save_model", "save_weights"),
    lifetime="while a user's script runs up to its call of fit, or a plan calls a function that makes a model",
    reason="they write the file of a model without its methods",
    public_api="a hook around writing a file",
    used_by=("_keras/trainer.py",),
)
STATE_SYNC = Patch(
    target="model",
    attributes=("jax_state_sync",),
    lifetime="one call of fit with parameter servers",
    reason="the servers have the newest values, which are fetched before Keras writes its state into the variables",
    public_api="a callback before the trainer writes its state back",
    used_by=("_keras/trainer.py",),
)
STATELESS_CALL = Patch(
    target="model",
    attributes=("stateless_call",),
    lifetime="one trace of a step",
    reason="the forward pass of a step runs by replicas, or its values are recorded",
    public_api="an argument of the trainer that is used in place of stateless_call",
    used_by=(
        "execution/step_functions.py",
        "fit/nan_diagnosis.py",
        "parameter_server/gradient_step.py",
    ),
)
CALL_ON_REPLICA = Patch(
    target="class Model",
    attributes=("stateless_call",),
    lifetime="while strategy.run traces a replica",
    reason="a model draws other random numbers on each replica, and what it returns is merged over the replicas",
    public_api="a hook that Keras calls around each stateless_call",
    used_by=("custom_loops/replica_context.py",),
)
LAYER_CALL = Patch(
    target="layer",
    attributes=("call",),
    lifetime="one trace",
    reason="outputs of layers are recorded, or a layer computes in another way during this trace",
    public_api="hooks around Layer.__call__",
    used_by=(
        "_keras/recompute.py",
        "execution/executors.py",
        "execution/step_functions.py",
        "fit/nan_diagnosis.py",
        "parameter_server/sparse_rows.py",
    ),
)
REMATERIALIZED_CALL = Patch(
    target="layer",
    attributes=("rematerialized_call",),
    lifetime="one trace of a step, or one that looks for non-finite values",
    reason="JAX keeps what it has traced of a function, and the `call` that is replaced is one function in all traces of a step; the NaN guard "
    "reads values inside of layers",
    public_api="hooks around Layer.__call__",
    used_by=("execution/step_functions.py", "fit/nan_diagnosis.py"),
)
MOMENTS = Patch(
    target="layer of class BatchNormalization",
    attributes=("_moments",),
    lifetime="one trace",
    reason="the proof follows what a normalization does besides the statistics of the batch, which replicas have by design; and a log line "
    "says whether a model that is called directly computes them",
    public_api="a method of BatchNormalization for the moments",
    used_by=("_keras/batch_normalization.py",),
)
LOSS = Patch(
    target="model",
    attributes=("compute_loss",),
    lifetime="one trace",
    reason="the NaN guard records the loss",
    public_api="Model.compute_loss in a subclass; models are the user's",
    used_by=("fit/nan_diagnosis.py",),
)
OPTIMIZER_UPDATE = Patch(
    target="optimizer",
    attributes=("stateless_apply",),
    lifetime="one trace of a step",
    reason="the step is cut in front of the update, which runs on one device or on servers",
    public_api="a train_step that returns gradients",
    used_by=("execution/gradient_extraction.py",),
)
OPTIMIZER_SLOTS = Patch(
    target="optimizer",
    attributes=("add_variable_from_reference",),
    lifetime="as long as a copy of the optimizer that is made to read its variables' shapes",
    reason="each variable of an optimizer is matched with the model variable that it belongs to",
    public_api="a mapping from the optimizer's variables to the model's",
    used_by=("parameter_server/optimizer_sharding.py",),
)
SYNCHRONIZED_FLAG = Patch(
    target="layer",
    attributes=("synchronized",),
    lifetime="one trace",
    reason="a layer that sees the global batch needs no collective, which Keras would refuse on JAX",
    public_api="BatchNormalization(synchronized=True) on JAX",
    used_by=("_keras/batch_normalization.py",),
)
LOCAL_DEVICES = Patch(
    target="module of the backend's devices",
    attributes=("_to_backend_device",),
    lifetime="as long as the process, from its first strategy over several processes on",
    reason='"cpu:0" is a device of the first process in all of them, whose arrays the others cannot read',
    public_api="keras.device for a device of this process",
    used_by=("_keras/trainer.py",),
)

PATCHES = tuple(value for value in list(vars().values()) if isinstance(value, Patch))

Replacement = tuple[Any, str, Any]  # a class or an instance, the name of its attribute, the new value
_ABSENT = object()


Value = TypeVar("Value")


@contextlib.contextmanager
def value_in_context(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a context variable a value while this context is open."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def patched(patch: Patch, replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes while this context is open; afterwards each is as before, also after an exception."""
    restore = install(patch, replacements)
    try:
        yield
    finally:
        restore()


def patched_method(
    patch: Patch, owners: Iterable[Any], around: Callable[[Any, Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Replace the one method of ``patch`` on each owner by ``around(owner, method)`` while a context is open."""
    (name,) = patch.attributes
    return patched(patch, ((owner, name, around(owner, getattr(owner, name))) for owner in owners))


def install(patch: Patch, replacements: Iterable[Replacement]) -> Callable[[], None]:
    """Replace attributes until the returned function is called.

    Args:
        patch: the entry of the table.
        replacements: what is replaced. Each is set before the next one is taken from the iterable.

    Returns:
        A function that restores what was there before.

    Raises:
        LookupError: the entry does not list an attribute. Nothing stays replaced.
    """
    previous: list[Replacement] = []

    def restore() -> None:
        while previous:
            _set(*previous.pop())

    try:
        for owner, name, value in replacements:
            if name not in patch.attributes:
                raise LookupError(f"The table of patches does not list {name!r} of {patch.target}.")
            previous.append((owner, name, vars(owner).get(name, _ABSENT)))
            _set(owner, name, value)
    except BaseException:
        restore()
        raise
    return restore


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class, or of an instance without Keras's ``__setattr__``; delete it if ``value`` is ``_ABSENT``."""
    if isinstance(owner, type):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
