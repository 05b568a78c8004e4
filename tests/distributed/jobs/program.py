"""What the programs of workers share."""

import json
import sys

import lockstep

config = json.loads(sys.argv[1])


def tell(**values):
    """Tell the test something, as JSON."""
    print("\n" + json.dumps(values), flush=True)  # A progress bar leaves its line open.


def make_strategy(**options):
    """A strategy over ``devices`` logical CPU devices of this worker, which ends a wait after ``timeout`` seconds."""
    devices = [f"cpu:{number}" for number in range(config.get("devices", 1))]
    if "timeout" in config:
        options["communication_options"] = lockstep.CommunicationOptions(timeout_seconds=config["timeout"])
    return lockstep.MultiWorkerMirroredStrategy(devices=devices, **options)
