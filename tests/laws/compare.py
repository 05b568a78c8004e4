"""Comparison of two runs, with tolerances for rounding."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import keras
import numpy as np

import lockstep
from lockstep._keras.variable_placement import stored_value

# Adding the rows of a batch in another order changes a float32 sum by about 1e-7 of its terms' size. Law 1 allows 1e-6 a
# step; five to ten steps follow each other in a case, so the bound of a run is ten times that of a step.
RELATIVE = 1e-5


@dataclass
class Run:
    """Everything that a user can read after a run."""

    history: dict[str, list[float]]
    evaluation: dict[str, float]
    predictions: list[np.ndarray]
    variables: dict[str, np.ndarray]
    on_batch: dict[str, float]


@dataclass(frozen=True)
class Topology:
    """R replicas over P CPU devices."""

    replicas: int
    devices: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def strategy(self):
        names = [f"cpu:{index}" for index in range(self.devices)]
        return lockstep.MirroredStrategy(names, replicas=self.replicas, **self.options)

    def __str__(self) -> str:
        return f"R{self.replicas}P{self.devices}"


@dataclass(frozen=True)
class Central(Topology):
    """The variables on one device, which may compute, too."""

    home: str = "cpu:0"

    def strategy(self):
        names = [f"cpu:{index}" for index in range(self.devices)]
        return lockstep.CentralStorageStrategy(names, self.home, replicas=self.replicas, **self.options)


@dataclass(frozen=True)
class Mesh(Topology):
    """One replica on a mesh of CPU devices: rows over the first axis, variables over the second."""

    sizes: tuple[int, int] = (1, 2)

    def strategy(self):
        names = [f"cpu:{index}" for index in range(self.devices)]
        data, model = self.sizes
        return lockstep.ModelParallelStrategy({"data": data, "model": model}, devices=names, **self.options)

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))


REPLICAS = (1, 2, 3, 4, 7)
DEVICES = (1, 2, 3)
TOPOLOGIES = [Topology(replicas, devices) for replicas in REPLICAS for devices in DEVICES]


def run(case, topology: Topology | None = None, only_fit: bool = False) -> Run:
    """Train, evaluate and predict a case with plain Keras or a strategy; or only train it.

    Batches hold 8, 8 and 7 rows, or, where only training is asked for, 7 rows three times, which compiles one step.
    """
    keras.backend.clear_session(free_memory=False)  # Automatic names start anew; a strategy must survive it.
    keras.utils.set_random_seed(7)
    if topology is None:
        model = (case.plain or case.build)()
    else:
        with topology.strategy().scope():
            model = case.build()
    data = case.data(np.random.default_rng(5))
    short = only_fit and not case.fit_only
    if short:
        data = {name: first(value, 21) for name, value in data.items()}
    options = {"batch_size": 7 if short else 8, "epochs": 2, "shuffle": False, "verbose": 0} | case.fit
    history = model.fit(**data, **options).history
    variables = state_of(model)
    if only_fit or case.fit_only:
        return Run(history, {}, [], variables, {})
    weights = {"sample_weight": data["sample_weight"]} if "sample_weight" in data else {}
    evaluation = model.evaluate(data["x"], data["y"], batch_size=23, verbose=0, return_dict=True, **weights)
    predictions = keras.tree.flatten(model.predict(first(data["x"], 16), batch_size=8, verbose=0))
    on_batch = model.test_on_batch(data["x"], data["y"], return_dict=True)
    on_batch |= {
        f"train_{k}": v
        for k, v in model.train_on_batch(first(data["x"], 7), first(data["y"], 7), return_dict=True).items()
    }
    return Run(history, evaluation, predictions, variables, on_batch)


@functools.cache
def reference(case, only_fit: bool = False) -> Run:
    """Return plain Keras's run of a case, computed once in each process.

    Tests of one case have ``xdist_group(case.name)``, so one process runs them all.
    """
    return run(case, only_fit=only_fit)


def first(tree: Any, rows: int) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[:rows], tree)


def stored_arrays(variables) -> list[jax.Array]:
    """Return the arrays of variables as they are on the devices, with the padding of shards."""
    return jax.tree.leaves([stored_value(variable) for variable in variables])


def bytes_by_device(variables) -> dict[Any, int]:
    """Return the bytes that each device holds of some variables."""
    held: dict[Any, int] = {}
    for array in stored_arrays(variables):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def state_of(model: keras.Model) -> dict[str, np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {f"{number} {variable.path}": np.asarray(variable) for number, variable in enumerate(variables)}


def assert_same(found: Run, expected: Run, relative: float = RELATIVE) -> None:
    """Assert that all logs, predictions and variables of two runs agree, relative to the largest entry of each variable."""
    for name in ("history", "evaluation", "on_batch") if found.evaluation else ("history",):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, rtol=relative, atol=relative, err_msg=f"{name} {key}")
    for ours, theirs in zip(found.predictions, expected.predictions if found.predictions else [], strict=True):
        assert ours.shape == theirs.shape
        assert_close(ours, theirs, relative, "predictions")
    assert len(found.variables) == len(expected.variables)
    for (name, ours), theirs in zip(found.variables.items(), expected.variables.values(), strict=True):
        assert_close(ours, theirs, relative, name)


def assert_close(ours: np.ndarray, theirs: np.ndarray, relative: float, what: str) -> None:
    assert ours.dtype == theirs.dtype
    if not np.issubdtype(theirs.dtype, np.floating):
        np.testing.assert_array_equal(ours, theirs, err_msg=what)
        return
    # Numbers below 0.01 are compared as if they were 0.01: a bias that a normalization cancels, for example, has a gradient of
    # zero, and what is stored is the rounding of the terms that cancel.
    largest = float(np.max(np.abs(theirs), initial=0.01))
    np.testing.assert_allclose(ours, theirs, rtol=relative, atol=relative * largest, err_msg=what)
