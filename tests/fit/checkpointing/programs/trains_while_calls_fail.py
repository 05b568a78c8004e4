"""Trains while calls of the operating system fail, and once more when they work again: ``python -m … DIRECTORY CASES``.

CASES are JSON: for each fault a name of a call and an error number. It prints JSON: the digest of an undisturbed run, and for each fault
the digests of the disturbed run and of that which resumes it, its lines, and the steps whose checkpoints are good in between.
"""

import hashlib
import json
import logging
import os
import sys
from pathlib import Path

import keras

from lockstep.callbacks import BackupAndRestore
from lockstep.checkpoint.store import CheckpointStore
from tests.fit.monitoring.runs import built, data

EPOCHS = 2  # of 3 steps


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def trained(folder, epochs, at_epoch_2=lambda: None):
    model = built()
    x, y = data(24)
    call = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 1 and at_epoch_2())
    backup = BackupAndRestore(folder, save_freq=1, keep=2)
    model.fit(x, y, batch_size=8, epochs=epochs, callbacks=[backup, call], verbose=0)
    return hashlib.sha256(b"".join(value.tobytes() for value in model.get_weights())).hexdigest()


def main(directory, cases):
    lines = Lines()
    logging.getLogger("lockstep").addHandler(lines)
    logging.getLogger("lockstep").setLevel("INFO")
    switch = Path(os.environ["FAULT_SWITCH"])
    whole = {epochs: trained(directory / f"whole {epochs}", epochs) for epochs in (EPOCHS, EPOCHS + 1)}
    found = []
    for number, (call, error) in enumerate(cases):
        folder = directory / f"faulty {number}"
        os.environ |= {"FAULT_CALL": call, "FAULT_ERRNO": str(error)}
        lines.found.clear()
        disturbed = trained(folder, EPOCHS, switch.touch)
        switch.unlink()
        store = CheckpointStore(folder)
        good = [store.read(path).step for path in store.paths()]
        said = list(lines.found)
        resumed = trained(folder, EPOCHS + 1)
        left = sorted(path.name for path in folder.iterdir() if path.name.startswith(".w"))
        found.append({"disturbed": disturbed, "resumed": resumed, "good": good, "lines": said, "left": left})
    print(json.dumps({"whole": [whole[EPOCHS], whole[EPOCHS + 1]], "cases": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
