"""The loop of both scripts: a line every ten steps, checkpoints, and an end where a number is none any more."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np


def settings():
    """What the command line says."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("devices", nargs="*", help="of the towers of mirrored.py; all there are where none is named")
    parser.add_argument("--towers", type=int, default=4, help="that draw a batch each step")
    parser.add_argument("--rows", type=int, default=128, help="of the batch of one tower")
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="of the first steps")
    parser.add_argument("--decay", type=float, default=0.3, help="factor of the learning rate from stair to stair")
    parser.add_argument("--decay-steps", type=int, default=500, help="from stair to stair")
    parser.add_argument("--checkpoint-steps", type=int, default=1000, help="from checkpoint to checkpoint")
    parser.add_argument(
        "--save-freq", default="1min", help="how often mirrored.py keeps where it is, so that it can go on"
    )
    parser.add_argument(
        "--folder", type=Path, help="of the checkpoints, from which mirrored.py goes on; by default a new one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and changes")
    given = parser.parse_args()
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="cifar10_towers-"))
    return given


def train(model, step, batches_from, given, checkpoint=None):
    """Call ``step(state, batch) -> (loss, state)`` with each batch; the model has the last state afterwards.

    With a ``checkpoint``, the loop goes on after the step where an earlier run has stopped.

    Raises:
        FloatingPointError: a loss or a weight is no finite number. The checkpoints that were written before stay.
    """
    state = tuple([variable.value for variable in kind] for kind in variables_of(model))
    state, done = checkpoint.restore(state) if checkpoint else (state, 0)
    losses, saved, start = {}, "none yet", time.perf_counter()
    for number, batch in enumerate(batches_from(done), done + 1):
        losses[f"The loss of step {number}"], state = step(state, batch)
        is_told, is_saved = number % 10 == 0, number % given.checkpoint_steps == 0 or number == given.steps
        if is_told or is_saved:
            keep(model, state)
            refuse_nan(
                losses | weights_after(number, model), saved
            )  # waits for the devices, to which steps were sent ahead
        if is_told:
            report(number, list(losses.values()), time.perf_counter() - start, given)
            losses, start = {}, time.perf_counter()
        if is_saved:
            saved = save(model, given.folder / f"model-step-{number:06}.keras")
        if checkpoint and (is_told or is_saved):
            checkpoint.save(number, state)
    keep(model, state)


def weights_after(number, model):
    return {f"After step {number}, {v.path}": v for kind in variables_of(model) for v in kind}


def variables_of(model):
    return model.trainable_variables, model.non_trainable_variables, model.optimizer.variables


def refuse_nan(named, saved):
    for name, values in named.items():
        if not np.isfinite(values).all():
            raise FloatingPointError(
                f"{name} is no finite number, so training ends here. The last good checkpoint: {saved}. Try a lower --learning-rate."
            )


def report(number, losses, seconds, given):
    """The line of a step; s/batch counts the batches of all towers, as examples/s does."""
    batches = len(losses) * given.towers
    rates = f"{batches * given.rows / seconds:.0f} examples/s, {seconds / batches:.4f} s/batch"
    print(f"step {number}, loss {losses[-1]:.4f}, {rates}", flush=True)


def keep(model, state):
    for kind, values in zip(variables_of(model), state, strict=True):
        for variable, value in zip(kind, values, strict=True):
            variable.assign(value)


def save(model, path):
    """Write the model, its optimizer and their averages; under another name first, so that no file is half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        model.save(Path(unfinished, path.name))
        os.replace(Path(unfinished, path.name), path)
    print("checkpoint", path, flush=True)
    return path


def evaluate(model, pictures, labels):
    """Print the accuracy with the moving averages of the weights, which the model has from now on."""
    model.optimizer.finalize_variable_values(model.trainable_variables)
    found = model.evaluate(pictures, labels, batch_size=500, verbose=0, return_dict=True)
    print(f"test accuracy {found['accuracy']:.4f}, with the averages of the weights", flush=True)
