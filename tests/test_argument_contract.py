"""Arguments: every public function, method, constructor and option either works or refuses an argument by its name.

What is public is read from ``__all__`` and from the parser of the command line: a new name is tested, or is listed under ``EXCLUDED``
with the reason. In a call that is otherwise right, each argument gets all of ``VALUES``, whatever its type is, and values that
hypothesis draws. A value that the type hint does not allow must be refused.
"""

import argparse
import collections.abc
import enum
import functools
import inspect
import math
import re
import time
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

import lockstep
from lockstep import cli
from lockstep._errors import shown

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),  # NumPy says that a float32 becomes infinite.
    pytest.mark.filterwarnings("ignore:Python iterable type"),  # of JAX, about an iterator as a leaf
]
SECONDS = 5.0  # limit of a call: a busy machine compiles in it, and waits for other processes are longer


def nested(depth=3000):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class Unprintable:
    def __repr__(self):
        raise RuntimeError("this has no text")


class Made:
    """A class that takes any arguments."""

    def __init__(self, *args):
        pass


VALUES = (
    *(None, True, False, 0, 1, -1, 3, 10**9, -(10**9), 10**30, 10**5000),
    *(0.5, -0.5, 1.0, math.nan, math.inf, -math.inf, 1e300, np.float32("nan"), np.int64(3), np.bool_(True)),
    *("", " ", "x", "8", "yes", "\0", "cpu:0", "auto", "é" * 10_000, b"x"),
    *([], (), {}, set(), nested(), [None], [1], [-1], [math.nan], ["x"], [[]], {"x": None}, {1: 2}, {None: []}),
    *(object(), Unprintable(), Made, lambda *args: None, iter([1]), Path("x"), Path("\0")),
    *(np.zeros(0), np.zeros((2, 3)), np.asarray(["a"]), np.asarray([None]), 1j, range(3)),
)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


# --- what is called ----------------------------------------------------------------------------------------------------------------

X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
STRATEGY = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
with STRATEGY.scope():
    MODEL = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(1)])
    MODEL.compile("sgd", "mse")
MESH = lockstep.ModelParallelStrategy({"data": 1, "model": 1}, devices=["cpu:0"])
with MESH.scope():
    MODEL_ON_MESH = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(1)])
    MODEL_ON_MESH.compile("sgd", "mse")
VALUE = STRATEGY.experimental_distribute_values_from_function(lambda context: np.ones(2))
SPEC = lockstep.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
RESOLVER = lockstep.cluster_resolver.SimpleClusterResolver(SPEC, task_type="worker", task_id=1, environ={})
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}}'


@dataclass(frozen=True)
class Given:
    """The arguments of a call: those that it needs, and one that stops it when all others are checked, so that nothing starts."""

    arguments: dict[str, Any] = field(default_factory=dict)
    stops_with: str = "(?!)"  # pattern of the error of a call with right arguments
    owner: Any = None  # whose method is called


UNSET = Given(stops_with="is not set|no worker of Ray")
GIVEN = {
    "lockstep.ClusterCoordinator": Given({"strategy": None}),
    "lockstep.ModelParallelStrategy": Given({"mesh": {"data": 1, "model": 1}, "devices": ["cpu:0"]}),
    "lockstep.ParameterServerStrategy": Given(stops_with="nothing says which process"),
    "lockstep.PerWorkerDataset": Given({"dataset": [1]}),
    "lockstep.PerWorkerValues": Given({"make": Made}),
    "lockstep.batch_size_finder": Given(
        {"model": MODEL, "x": X, "y": Y, "memory_limit": 1}, stops_with="not even|valid value for jnp.array"
    ),
    "lockstep.compute_average_loss": Given({"per_example_loss": np.ones(2)}),
    "lockstep.scale_regularization_loss": Given({"regularization_loss": 1.0}),
    "lockstep.plan": Given({"model": MODEL, "data": (X, Y), "hardware": "h100:1"}, stops_with="there is no compiler"),
    "lockstep.scaling_report": Given(
        {"build": Made, "data": (X, Y), "output": "/dev/null/report.html"}, stops_with="cannot be written"
    ),
    "lockstep.callbacks.BackupAndRestore": Given({"directory": "x"}),
    "lockstep.callbacks.LearningRateScaling": Given({"base_batch": 8}),
    "lockstep.cluster_resolver.ClusterSpec": Given({"cluster": SPEC}),
    "lockstep.cluster_resolver.JaxClusterResolver": UNSET,
    "lockstep.cluster_resolver.KubernetesClusterResolver": UNSET,
    "lockstep.cluster_resolver.LeaderWorkerSetClusterResolver": UNSET,
    "lockstep.cluster_resolver.OpenMpiClusterResolver": UNSET,
    "lockstep.cluster_resolver.RayClusterResolver": UNSET,
    "lockstep.cluster_resolver.SlurmClusterResolver": UNSET,
    "lockstep.cluster_resolver.TorchrunClusterResolver": UNSET,
    "lockstep.cluster_resolver.TpuPodClusterResolver": UNSET,
    "lockstep.cluster_resolver.SimpleClusterResolver": Given(
        {"cluster_spec": SPEC, "task_type": "worker", "task_id": 0, "environ": {}}
    ),
    "lockstep.cluster_resolver.TFConfigClusterResolver": Given(
        {"environ": {"TF_CONFIG": TF_CONFIG}, "task_type": "worker", "task_id": 0}, stops_with="is not set"
    ),
    "lockstep.cluster_resolver.WorkerGroup": Given({"workers": 2, "index": 0, "coordinator": "a:1"}),
    "lockstep.cluster_resolver.resolve": Given({"environ": {}}),
    "lockstep.config.set_deterministic": Given({"enabled": False}, stops_with="pool of"),
    "lockstep.config.set_logical_cpu_devices": Given({"count": 1}, stops_with="CPU devices"),
    "lockstep.datasets.mnist": Given({"environment": {"LOCKSTEP_DATA": "/nowhere"}}),
    "lockstep.partitioners.FixedShardsPartitioner": Given({"num_shards": 2}),
    "lockstep.partitioners.MaxSizePartitioner": Given({"max_shard_bytes": 2}),
    "lockstep.testing.check_cross_device_ops": Given(
        {"ops": "ring", "devices": ["cpu:0"], "dtypes": ["int8"], "shapes": [()]}
    ),
    "lockstep.testing.count_traffic": Given({"ops": "ring", "values": [np.ones(2)], "devices": 2}),
    # Methods, by the class that defines them.
    "InputContext.get_per_replica_batch_size": Given({"global_batch_size": 8}, owner=lockstep.InputContext()),
    "WorkerGroup.name_of": Given({"index": 0}, owner=RESOLVER.group()),
    "Strategy.checkpoint": Given({"directory": "/dev/null/x"}, stops_with="no lock|cannot be", owner=STRATEGY),
    "StrategyApi.run": Given({"fn": lambda *args, **kwargs: 1}, owner=STRATEGY),
    "StrategyApi.reduce": Given({"reduce_op": "SUM", "value": VALUE, "axis": 0}, owner=STRATEGY),
    "StrategyApi.gather": Given({"value": VALUE, "axis": 0}, owner=STRATEGY),
    "StrategyApi.experimental_local_results": Given({"value": VALUE}, owner=STRATEGY),
    "StrategyApi.experimental_distribute_values_from_function": Given(
        {"value_fn": lambda _: 1}, stops_with="Values of replicas", owner=STRATEGY
    ),
    "StrategyApi.experimental_distribute_dataset": Given({"dataset": [X]}, owner=STRATEGY),
    "StrategyApi.distribute_datasets_from_function": Given({"dataset_fn": lambda _: [X]}, owner=STRATEGY),
    "Diagnostics.doctor": Given(
        {"model": MODEL, "x": X, "y": Y, "sample_weight": np.ones(4), "class_weight": {0: 1.0}},
        stops_with="at the same time|was given besides",
        owner=STRATEGY,
    ),
    "Diagnostics.self_check": Given(
        {"model": MODEL, "x": X, "y": Y}, stops_with="one common length|valid value for jnp.array", owner=STRATEGY
    ),
    "Strategy.layout": Given({"model": MODEL}, owner=STRATEGY),
    "ModelParallelStrategy.layout": Given({"model": MODEL_ON_MESH}, owner=MESH),
    "ClusterResolver.master": Given(owner=RESOLVER),
    "ClusterResolver.num_accelerators": Given(owner=RESOLVER),
    "ClusterSpec.job_tasks": Given({"job_name": "worker"}, owner=SPEC),
    "ClusterSpec.num_tasks": Given({"job_name": "worker"}, owner=SPEC),
    "ClusterSpec.task_address": Given({"job_name": "worker", "task_index": 0}, owner=SPEC),
    "ClusterSpec.task_indices": Given({"job_name": "worker"}, owner=SPEC),
}

CALLED_BY_LOCKSTEP = "Lockstep or Keras calls it, with what was checked before"
MADE_BY_LOCKSTEP = "Lockstep makes such objects; a program only reads them"
EXCLUDED = {
    r"\w+\.(all_reduce|all_reduce_vector|describe|error_bound)": CALLED_BY_LOCKSTEP,
    r"\w+\.(on_\w+|attach|around_fit|is_present|unused_variables|shards|noting)": CALLED_BY_LOCKSTEP,
    r"(DistributedDataset|InputSource|ParameterServerStrategy|PerReplica|WrappedSource)\.\w+": CALLED_BY_LOCKSTEP,
    r"lockstep\.(DistributedDataset|PerReplica|RemoteValue|ReplicaContext|ValueContext)": MADE_BY_LOCKSTEP,
    r"ReplicaContext\.\w+": "works only in a function that strategy.run traces",
    r"(SchedulingStrategy|ClusterCoordinator)\.\w+": "needs a job of several processes",
    r"lockstep\.cluster_resolver\.ClusterResolver": "a base class; its subclasses check what they are given",
    r"lockstep\.datasets\.(cifar10|reuters)": "reads 180 MB; mnist stands for them",
}
EXCLUDED_ARGUMENTS = {
    ("lockstep.scaling_report", "output"): "a right value starts the measurement; tests/tools/scaling checks it",
    ("Diagnostics.doctor", "class_weight"): "a right value starts training steps",
    ("Diagnostics.doctor", "sample_weight"): "a right value starts training steps",
}
EXCLUDED_VALUES = {
    ("lockstep.testing.check_cross_device_ops", "devices", type(None)): "compiles for eight devices",
    ("Diagnostics.self_check", "model", type(None)): "checks a net of its own, which is compiled",
    ("ClusterResolver.num_accelerators", "config_proto", ...): "of TensorFlow 1; not used",
    ("ClusterResolver.num_accelerators", "task_type", ...): "not used",
    ("ClusterResolver.num_accelerators", "task_id", ...): "not used",
    ("lockstep.batch_size_finder", "x", Unprintable): "likewise",
    ("Diagnostics.doctor", "x", Unprintable): "Keras puts its text into its error",
}
SAID_AS = {  # other words for an argument in messages
    "cluster_spec": "cluster",
    "communication": "implementation",
    "compute_devices": "devices",
    "coordinator": "address",
    "global_batch_size": "global batch",
    "environment": "LOCKSTEP_DATA",
    "ops": "cross_device_ops",
    "task_id": "task|index|indices|this process",
    "task_index": "indices",
    "task_type": "task|job",
    "job_name": "job",
    "workers": "worker",
}


DATA = ("x", "y", "sample_weight", "validation_data")


def public():
    """Every function and constructor by its name, and every method by the class that defines it."""
    modules = [lockstep, *(item for name in lockstep.__all__ if inspect.ismodule(item := getattr(lockstep, name)))]
    found = {}
    for module in modules:
        for name in module.__all__:
            item = getattr(module, name)
            if inspect.isfunction(item) or (inspect.isclass(item) and not issubclass(item, Exception | enum.Enum)):
                found.setdefault(item, f"{module.__name__}.{name}")
                found |= methods(item) if inspect.isclass(item) else {}
    return {name: item for item, name in found.items() if arguments_of(item)}


def methods(cls):
    named = (inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_"))
    functions = [value.__func__ if isinstance(value, staticmethod | classmethod) else value for value in named]
    own = [function for function in functions if inspect.isfunction(function)]
    return {function: function.__qualname__ for function in own if function.__module__.startswith("lockstep")}


def arguments_of(item):
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [name for name, p in inspect.signature(item).parameters.items() if p.kind not in variable and name != "self"]


PUBLIC = public()
TESTED = {name: item for name, item in PUBLIC.items() if not any(re.fullmatch(pattern, name) for pattern in EXCLUDED)}


# --- what is right -----------------------------------------------------------------------------------------------------------------


def allows(hint, value) -> bool:
    """Whether a type hint allows a value; True if that cannot be told."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(allows(each, value) for each in inner)
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint in (int, float):
        kinds = (int, np.integer) if hint is int else (int, float, np.integer, np.floating)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (collections.abc.Sequence, tuple, list):
        return isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)
    if inspect.isclass(origin or hint):
        return isinstance(value, origin or hint)
    return True


def hints_of(item):
    return typing.get_type_hints(item.__init__ if inspect.isclass(item) else item)


def is_named(argument, error):
    words = rf"(?<!\w)({argument}|{SAID_AS.get(argument, argument)})(?!\w)"
    of_rows = "one common length|was given besides" if argument in DATA else "(?!)"  # names what data have in common
    return re.search(f"{words}|{of_rows}", shown_whole(error)) is not None


def shown_whole(error):
    try:
        return str(error)
    except Exception:  # As in a KeyError of a value without text.
        return type(error).__name__


def fault_of(name, argument, value):
    """Return what is wrong with the answer to a value, or None."""
    given, item = GIVEN.get(name, Given()), TESTED[name]
    if any(key in EXCLUDED_VALUES for key in ((name, argument, kind) for kind in (..., type(value)))):
        return None
    function = item if given.owner is None else item.__get__(given.owner)
    began = time.perf_counter()
    try:
        function(**given.arguments | {argument: value})
        fault = None if allows(hints_of(item).get(argument, Any), value) else "is taken, against its type hint"
    except (lockstep.LockstepError, ValueError) as error:
        is_keras = argument in ("x", "y", "sample_weight", "class_weight")  # Keras's own errors about data are kept.
        is_stopped = re.search(given.stops_with, shown_whole(error))
        is_clear = is_named(argument, error) and (is_keras or isinstance(error, lockstep.LockstepError))
        fault = None if is_clear or is_stopped else f"{type(error).__name__}: {shown_whole(error)[:200]}"
    except Exception as error:
        fault = f"{type(error).__name__}: {shown_whole(error)[:200]}"
    if time.perf_counter() - began > SECONDS:
        fault = f"took {time.perf_counter() - began:.1f} s"
    return fault and f"{argument}={shown(value)[:60]}: {fault}"


def weights(model=MODEL):
    return [np.array(variable) for variable in (*model.variables, *model.optimizer.variables)]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    yield
    lockstep.config.set_deterministic(False)
    lockstep.config.set_doctor(True)


def cases():
    return [
        (name, one) for name in TESTED for one in arguments_of(TESTED[name]) if (name, one) not in EXCLUDED_ARGUMENTS
    ]


@pytest.mark.parametrize("name", TESTED)
def test_every_value_works_or_is_refused_by_the_name_of_its_argument(name):
    before = weights()
    tried = [(argument, value) for own, argument in cases() if own == name for value in VALUES]
    faults = [fault for argument, value in tried if (fault := fault_of(name, argument, value))]
    assert not faults, "\n".join(faults)
    assert all(map(np.array_equal, before, weights()))


# --- the model's own methods: with the numbers of plain Keras ----------------------------------------------------------------------

KERAS_ARGUMENTS = {
    "fit": {"x": X, "y": Y, "batch_size": 2, "verbose": 0},
    "evaluate": {"x": X, "y": Y, "verbose": 0},
    "predict": {"x": X, "verbose": 0},
    "train_on_batch": {"x": X, "y": Y},
    "test_on_batch": {"x": X, "y": Y},
    "predict_on_batch": {"x": X},
}
KERAS_CASES = [
    (method, argument) for method in KERAS_ARGUMENTS for argument in arguments_of(getattr(keras.Model, method))
]
COUNTS = ("batch_size", "validation_batch_size", "steps_per_epoch", "steps", "validation_steps")
DIFFERENT_FROM_KERAS = {
    **dict.fromkeys(COUNTS, "Keras takes 0, an empty value, NaN or a negative number for None, or stops at once"),
    "validation_split": "Keras trains on no rows, or on some of them twice",
    "validation_data": "Keras takes data without rows; a function of the step is an input of Lockstep",
    "x": "a function of the step is an input of Lockstep",
    "y": "for one batch, Keras repeats a number for all rows; replicas need rows",
    "sample_weight": "likewise",
}
KERAS_VALUES = (
    *(None, True, 0, 1, -1, 10**30, 1.5, math.nan, "8", [], {}, nested(), [1], {1: 2}, object(), lambda *args: None),
    *({None: []}, np.int64(3), np.zeros(0), np.asarray(["a"]), np.asarray([None])),
)


def answer(model, method, argument, value):
    """Return ("took", result) or ("refused", error); and the variables after it, or None if they are lost."""
    given = KERAS_ARGUMENTS[method] | {argument: value}
    if argument.startswith("validation_") and argument != "validation_data" and argument != "validation_split":
        given["validation_data"] = (X, Y)
    keras.utils.set_random_seed(0)
    try:
        found = getattr(model, method)(**given)
        outcome = "took", found.history if method == "fit" else found
    except Exception as error:
        outcome = "refused", error
    try:
        return outcome, weights(model)
    except TypeError:  # Plain Keras loses the variables if some steps fail.
        return outcome, None


def is_same(one, other):
    leaves = [keras.tree.flatten(each) for each in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(
        np.allclose(a, b, rtol=1e-5, equal_nan=True) for a, b in zip(*leaves, strict=True)
    )


class Twins:
    """A model of a strategy and one of plain Keras, which begin each call with the same variables."""

    def __init__(self):
        self.start = weights()
        self.plain = None

    def reset(self):
        if self.plain is None:
            self.plain = keras.models.clone_model(MODEL)
            self.plain.compile("sgd", "mse")
            self.plain.optimizer.build(self.plain.trainable_variables)
        for model in (MODEL, self.plain):
            for variable, value in zip((*model.variables, *model.optimizer.variables), self.start, strict=True):
                variable.assign(value)

    def fault_of(self, method, argument, value):
        self.reset()
        began = time.perf_counter()
        (said, result), after = answer(MODEL, method, argument, value)
        seconds = time.perf_counter() - began
        (expected, by_keras), by_plain = answer(self.plain, method, argument, value)
        self.plain = None if by_plain is None else self.plain
        fault = None
        if said == "refused":
            same = type(result) is type(by_keras) is ValueError and shown_whole(result) == shown_whole(by_keras)
            if (
                not (is_named(argument, result) and isinstance(result, lockstep.LockstepError | ValueError))
                and not same
            ):
                fault = f"{type(result).__name__}: {shown_whole(result)[:200]}"
            elif expected == "took" and argument not in DIFFERENT_FROM_KERAS:
                fault = f"plain Keras takes it, and here it is refused: {shown_whole(result)[:200]}"
            elif not all(map(np.array_equal, self.start, after)):
                fault = "the weights have changed"
        elif expected == "took" and not (is_same(result, by_keras) and is_same(after, by_plain)):
            fault = f"expected {shown(by_keras)}, got {shown(result)}"
        elif expected == "refused" and argument not in DIFFERENT_FROM_KERAS:
            fault = f"plain Keras refuses it: {shown_whole(by_keras)[:200]}"
        fault = f"took {seconds:.1f} s" if seconds > SECONDS else fault
        return fault and f"{argument}={shown(value)[:60]}: {fault}"


def is_run(argument, value):
    """Whether a value is tried: many epochs take long, and Keras puts data into its errors, also if they have no text."""
    if argument in ("epochs", "initial_epoch"):
        return not isinstance(value, int) or abs(value) <= 3
    return argument not in ("x", "validation_data") or not isinstance(value, Unprintable)


def check_models_method(method, argument, values):
    MODEL.optimizer.build(MODEL.trainable_variables)
    twins = Twins()
    tried = [value for value in values if is_run(argument, value)]
    faults = [fault for value in tried if (fault := twins.fault_of(method, argument, value))]
    twins.reset()
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "argument"), KERAS_CASES)
def test_the_models_methods_take_what_plain_keras_takes_and_refuse_the_rest_by_name(method, argument):
    check_models_method(method, argument, KERAS_VALUES)


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "argument"), KERAS_CASES)
def test_the_models_methods_with_every_value(method, argument):
    check_models_method(method, argument, VALUES)


# --- drawn values ------------------------------------------------------------------------------------------------------------------

FEW = settings(
    max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=30_000, derandomize=False)


def check_drawn(case, value):
    assert not fault_of(*case, value)


@pytest.mark.slow
@FEW
@drawn(st.sampled_from(cases()), ANY_VALUE)
def test_a_drawn_value_works_or_is_refused(case, value):
    check_drawn(case, value)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@MANY
@drawn(st.sampled_from(cases()), ANY_VALUE)
def test_many_drawn_values_work_or_are_refused(case, value):
    check_drawn(case, value)


# --- the command line --------------------------------------------------------------------------------------------------------------

TEXTS = (
    *("", " ", "x", "0", "-1", "1", "3", "1.5", "-0.5", "nan", "inf", "-inf", "1e400", "1e30", "9" * 30, "9" * 5000),
    *(
        "1,2",
        "1,",
        ",",
        "1,x",
        "0,1",
        "1:2",
        "2:1",
        ":",
        "1:",
        "-1:1",
        "a:b:c",
        "localhost:0",
        "localhost:99999",
        "[::1",
    ),
    *("auto", "None", "yes", "True", "{}", "[]", "é" * 10_000, "/dev/null/x", "cpu:0", "cpu:99999"),
)
STOPPED = ["missing.py"]  # a program that does not exist: its error comes when all options are checked
WORDS = {
    "demo": ["--output", "/dev/null/x"],
    "run": STOPPED,
    "test": [],
    "scale": STOPPED,
    "plan": ["--for", "cpu:1", *STOPPED],
    "doctor": STOPPED,
    "migrate": STOPPED,
    "top": ["missing"],
    "checkpoint show": ["missing"],
    "checkpoint verify": ["missing"],
    "checkpoint sign": ["missing"],
    "checkpoint export": ["missing", "out.npz"],
    "checkpoint import": ["missing", "/dev/null/x"],
}
NEEDED = {"plan": ["--for", "cpu:1"]}  # options besides those that are tested
STOPS_WITH = r"missing|KEY_FILE is not set|no status.json|not a readable status|/dev/null/x|no such file|cannot be|no checkpoint|unrecognized arguments|the following arguments"
EXCLUDED_OPTIONS = {
    ("demo", "--output"): "a right value starts the training",
    ("test", "-n"): "a right value starts workers; run checks the same number",
}


def parsers(parser, name=""):
    """Every command with its parser."""
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in commands:
        for word, inner in action.choices.items():
            yield from parsers(inner, f"{name} {word}".strip())
    if not commands:
        yield name, parser


@pytest.fixture(autouse=True, scope="module")
def _the_parser_is_made_once():
    """It would be made for each of some thousand calls, which takes nine tenths of their time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "_parser", functools.cache(cli._parser))
        yield


def options():
    for command, parser in parsers(cli._parser()):
        for action in parser._actions:
            takes_a_value = action.nargs != 0 and not isinstance(action, argparse._HelpAction)
            name = (action.option_strings or [action.dest])[-1]
            if takes_a_value and (command, name) not in EXCLUDED_OPTIONS:
                yield command, name


def check_option(command, name, text, capfd):
    """Run a command with one value; wrong usage is exit code 2 and a sentence with the name of the option."""
    words = [*command.split(), *([f"{name}={text}"] if name.startswith("-") else []), *WORDS[command]]
    if not name.startswith("-"):
        words = [
            *command.split(),
            *NEEDED.get(command, ()),
            *([text] if name != "arguments" else [*WORDS[command], text]),
        ]
    began = time.perf_counter()
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    said = capfd.readouterr()
    seconds = time.perf_counter() - began
    assert not re.search(r"invalid _\w+ value", said.err)  # the name of a function
    words = re.sub("[-_]", "[-_ ]", name.lstrip("-"))
    is_clear = code == 2 and re.search(f"{words}|{STOPS_WITH}", said.out + said.err)
    assert code == 0 or is_clear or (code == 1 and not name.startswith("-")), f"{words}: {code}: {said.err[:300]}"
    assert seconds < SECONDS


@settings(FEW, max_examples=100)
@drawn(st.sampled_from(list(options())), st.text(max_size=6) | st.integers().map(str) | st.floats().map(str))
def test_a_drawn_value_of_an_option_works_or_is_wrong_usage_that_names_it(capfd, option, text):
    check_option(*option, text, capfd)


@pytest.mark.parametrize(("command", "name"), list(options()))
def test_every_value_of_an_option_works_or_is_wrong_usage_that_names_it(command, name, capfd):
    for text in TEXTS:
        check_option(command, name, text, capfd)
