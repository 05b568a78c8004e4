"""What the programs of workers share."""

import hashlib
import json
import sys

import jax
import numpy as np

import lockstep
from lockstep.devices import placement

config = json.loads(sys.argv[1])
if "jax" in config:  # As a user's script or Ray does, at an address of the test's choice.
    jax.distributed.initialize(
        config["jax"],
        config.get("jax_processes", config["workers"]),
        config["index"],
        coordinator_bind_address=config["jax"],
        **config.get("jax_options", {}),
    )
placement.SHARD_FROM = config.get("shard_from", placement.SHARD_FROM)


def tell(**values):
    """Tell the test something, as JSON."""
    print("\n" + json.dumps(values), flush=True)  # A progress bar leaves its line open.


def digest(model):
    """Of all variables; with sharded ones, all workers call this."""
    values = [np.asarray(variable) for variable in (*model.variables, *model.optimizer.variables)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def make_strategy(**options):
    """A strategy over ``devices`` logical CPU devices of this worker, which ends a wait after ``timeout`` seconds.

    ``strategy`` are further options. If these shard variables, ``shard_from`` lets those of small models be sharded.
    """
    return lockstep.MultiWorkerMirroredStrategy(**_common(options))


def make_mesh(**options):
    """The same as a mesh, of the sizes ``mesh``."""
    return lockstep.ModelParallelStrategy(config["mesh"], **_common(options))


def _common(options):
    options |= config.get("strategy", {})
    if "timeout" in config:
        options.setdefault("communication_options", lockstep.CommunicationOptions(timeout_seconds=config["timeout"]))
    return options | {"devices": [f"cpu:{number}" for number in range(config.get("devices", 1))]}
