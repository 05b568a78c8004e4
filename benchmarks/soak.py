"""Claim: a training that is killed repeatedly, at any point, ends with the same bits as an uninterrupted one.

Kills are ``kill -9`` at random points of the program or after a random time, in one process with two devices and in two workers. Each is
followed by a resume, until the training ends. Lost and repeated steps are found in the history of the weights, by the optimizer's counter and
by the rows of each epoch; recomputed steps are those started after the last checkpoint, which ``save_freq`` determines. The third argument is
the seed of the kills: ``python benchmarks/soak.py KILLS [SAVE_FREQ [SEED]]``.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["KERAS_BACKEND"] = "jax"

from results_file import write

from tests.fit.checkpointing.soaking import EPOCHS, Soak
from tests.support.processes import ForkServer

KILLS, SAVE_FREQ = 200, 2


def soaked(forks, folder, workers, save_freq, seed, kills):
    began = time.monotonic()
    found = Soak(forks, folder / str(workers), workers, save_freq, seed).run(kills)
    seconds = time.monotonic() - began
    places = ", ".join(f"{place} {count}" for place, count in sorted(found.places.items()))
    counted = found.kills, found.trainings, found.differ, found.steps_in_weights, found.rows, found.other_codes
    means = found.done_again / found.kills, found.median_seconds, seconds / found.kills
    return (workers, *counted, *(f"{value:.2f}" for value in means)), f"Kills with {workers}: {places}."


def main(kills=KILLS, save_freq=SAVE_FREQ, seed=None):
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    forks = ForkServer(), ForkServer()
    with tempfile.TemporaryDirectory() as folder:
        alone = kills * 3 // 5  # A job of two workers takes several times as long to start.
        shares = {1: alone, 2: kills - alone}
        found = [soaked(forks, Path(folder), workers, save_freq, seed, share) for workers, share in shares.items()]
    for each in forks:
        each.close()
    columns = (
        "processes",
        "kills",
        "trainings",
        "digests that differ",
        "steps lost or repeated",
        "trainings with a row not once",
        "workers with another code than 75",
        "steps done again a kill",
        "seconds to the first step after a resume",
        "seconds a kill",
    )
    note = (
        f"Seed {seed}; a checkpoint each {save_freq} steps. A CNN with BatchNorm and dropout, 3 replicas, 23 rows in batches of 8, {EPOCHS} epochs. "
        "Processes are forked from one that has imported Keras, and keep their compiled programs: importing and compiling are not in the seconds. "
        "Other work ran on the machine, so the seconds are above what they need be."
    )
    rows, places = zip(*found, strict=True)
    write("soak", "Killed at random and resumed", columns, list(rows), "\n\n".join([note, *places]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
