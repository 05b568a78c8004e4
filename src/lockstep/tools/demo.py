"""``lockstep demo``: train on replicas, train again on one device, compare the weights, plot both."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from lockstep import datasets
from lockstep._errors import OptionError, file_path, whole_number
from lockstep.devices.cpu_devices import set_logical_cpu_devices
from lockstep.devices.names import parse_device_name
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.options import MAX_REPLICAS

BATCH = 64
RELATIVE_PER_STEP = 1e-6  # tolerance of docs/semantics.md, in float32
Data = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class DemoRun:
    """One run of the demo."""

    history: dict[str, list[float]]
    weights: list[np.ndarray]
    accuracy: float
    seconds: float


def run_demo(data: str, replicas: int, devices: Sequence[str] | None, epochs: int, output: str) -> bool:
    """Train the same network twice, on ``replicas`` replicas and on one device, and compare.

    Args:
        data: "digits" (1,797 images of scikit-learn) or "mnist" (70,000 images).
        replicas: number of replicas.
        devices: names of the devices; None for all.
        epochs: passes over the data.
        output: folder that ``curves.png`` is written to.

    Raises:
        DeviceError: a device is unknown or absent.
        OptionError: another argument is out of its range.

    Returns:
        Whether the weights agree within 1e-6 per step.
    """
    whole_number("--epochs", epochs)
    whole_number("--replicas", replicas, maximum=MAX_REPLICAS)
    for name in devices or ():
        parse_device_name(name, "--devices")
    folder, figure = _made_folder(output), _made_figure()
    train, test = _digits() if data == "digits" else _mnist()
    if devices is None:  # Without an accelerator: one logical CPU device per replica, at most one per core.
        set_logical_cpu_devices(max(1, min(replicas, os.cpu_count() or 1)))
    strategy = MirroredStrategy(devices, replicas=replicas)
    steps = epochs * -(-len(train[0]) // BATCH)
    print(f"\n{len(train[0]):,} images, {steps:,} steps of {BATCH}, on {replicas} replicas:\n")
    ours = _train(train, test, epochs, strategy, verbose=1)
    print("\nThe same on one device with plain Keras, to check …")
    plain = _train(train, test, epochs, None, verbose=0)
    difference = _largest_difference(ours.weights, plain.weights)
    bound = RELATIVE_PER_STEP * steps
    picture = _draw(figure, ours, plain, strategy, folder)
    agreed = difference <= bound
    _print_summary(ours, plain, difference, bound)
    print(f"{'The numbers agree.' if agreed else 'THE NUMBERS DO NOT AGREE.'} Curves: {picture}")
    return agreed


def _made_folder(output: str) -> Path:
    """Make the folder of the curves now, and not after the training."""
    folder = file_path("--output", output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--output: {folder} cannot be made: {error.strerror}. Fix: give a writable folder."
        ) from None
    return folder


def _made_figure() -> Any:
    """Make the empty figure now, so that a missing Matplotlib is reported before the training."""
    import matplotlib.figure

    return matplotlib.figure.Figure(figsize=(9, 3.5), layout="constrained")


def _train(train: Any, test: Any, epochs: int, strategy: MirroredStrategy | None, verbose: int) -> DemoRun:
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _network(train[0].shape[1:])
    start = time.perf_counter()
    fit = model.fit(*train, batch_size=BATCH, epochs=epochs, validation_data=test, shuffle=False, verbose=verbose)
    seconds = time.perf_counter() - start
    accuracy = model.evaluate(*test, batch_size=BATCH, verbose=0, return_dict=True)["accuracy"]
    return DemoRun(fit.history, model.get_weights(), accuracy, seconds)


def _network(shape: tuple[int, ...]) -> keras.Model:
    # Smooth activations: at the kink of a ReLU or a tie in a maximum the last bit of a float32 selects one of two
    # gradients, so that two correct runs diverge. A large learning rate magnifies rounding in the same way.
    convolutions = [
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.AveragePooling2D(2),
    ]
    model = keras.Sequential([keras.Input(shape), *convolutions, layers.Flatten(), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), loss=loss, metrics=["accuracy"])
    return model


def _largest_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest difference of a weight, relative to the largest weight of its layer."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def _digits() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    x, x_test, y, y_test = train_test_split(digits.images[..., None] / 16, digits.target, random_state=0)
    return (x.astype("float32"), y), (x_test.astype("float32"), y_test)


def _mnist() -> Data:
    (x, y), (x_test, y_test) = datasets.mnist()
    return (x[..., None].astype("float32") / 255, y), (x_test[..., None].astype("float32") / 255, y_test)


def _print_summary(ours: DemoRun, plain: DemoRun, difference: float, bound: float) -> None:
    rows = [
        ("training loss, last epoch", f"{ours.history['loss'][-1]:.6f}", f"{plain.history['loss'][-1]:.6f}"),
        ("validation loss, last epoch", f"{ours.history['val_loss'][-1]:.6f}", f"{plain.history['val_loss'][-1]:.6f}"),
        ("test accuracy", f"{ours.accuracy:.4f}", f"{plain.accuracy:.4f}"),
        ("seconds, with compilation", f"{ours.seconds:.1f}", f"{plain.seconds:.1f}"),
    ]
    print(f"\n{'':30}{'replicas':>12}{'one device':>12}")
    for name, first, second in rows:
        print(f"{name:30}{first:>12}{second:>12}")
    print(f"\nLargest difference of a weight: {difference:.1e} of its layer's largest (allowed: {bound:.1e}).")


def _draw(figure: Any, ours: DemoRun, plain: DemoRun, strategy: MirroredStrategy, folder: Path) -> Path:
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        epochs = range(1, len(plain.history[name]) + 1)
        for prefix, color in (("", "tab:blue"), ("val_", "tab:orange")):
            label = "validation" if prefix else "training"
            axes.plot(
                epochs, plain.history[prefix + name], color=color, linewidth=5, alpha=0.3, label=f"{label}, one device"
            )
            axes.plot(epochs, ours.history[prefix + name], color=color, label=f"{label}, replicas")
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small")
    figure.suptitle(f"{strategy.num_replicas_in_sync} replicas on {', '.join(strategy.devices)}, and one device")
    figure.savefig(folder / "curves.png", dpi=120)
    return folder / "curves.png"
