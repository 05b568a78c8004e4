"""The parts of ``./scripts/accelerator``.

``python benchmarks/accelerator/parts.py PART [--small]`` runs one part in this process, and prints each finding as a line of JSON.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from accelerator import checks, measurements
from lockstep.devices.xla_flags import prepare_determinism

PARTS = {
    part.__name__: part
    for part in (
        checks.numbers,
        checks.bits,
        checks.inputs,
        checks.uneven,
        checks.strategies,
        checks.loops,
        checks.joined,
        checks.precision,
        checks.nan_guard,
        checks.monitoring,
        checks.resume,
        checks.jobs,
        checks.out_of_memory,
        checks.devices,
        checks.mesh,
        measurements.host,
        measurements.memory,
        measurements.memory_resnet50,
        measurements.steps_mlp,
        measurements.steps_cnn,
        measurements.steps_lm,
        measurements.steps_resnet50,
        measurements.deterministic,
        measurements.torch,
        measurements.plan,
    )
}
PROGRAMS = {"resume": checks.resumed_run, "jobs": checks.job}  # that parts start
DETERMINISTIC = ("numbers", "bits", "strategies", "mesh", "resume", "jobs", "deterministic")


def main():
    """Run one part, or a program that a part starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--program", metavar="ARGUMENT", help="run the program of this part, with its argument")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU trains in seconds")
    options = parser.parse_args()
    if options.part in DETERMINISTIC:
        prepare_determinism()  # before JAX starts, which it does as soon as a part names devices
    if options.program:
        PROGRAMS[options.part](options.program, options.small)
        return
    for found in PARTS[options.part](options.small):
        print(json.dumps({**dataclasses.asdict(found), "right": found.is_right}), flush=True)


if __name__ == "__main__":
    main()
