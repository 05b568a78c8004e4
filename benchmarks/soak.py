"""Claim: a training that is killed repeatedly, at any point, ends with the same bits as an uninterrupted one.

Kills are ``kill -9`` at random points of the program or after a random time: in one process with two devices, in two workers, in a job of a
chief, two workers, a server and an evaluator, and in two nodes that join and leave. Each is followed by a resume, unless the job goes on
by itself, until the training ends. Lost and repeated steps are found by the bits of weights, optimizer and history, which have the number
of steps and, of processes and workers, the rows of each epoch; recomputed steps are those started after the last checkpoint.

``python benchmarks/soak.py KIND KILLS [SEED]`` adds a part to the table, which has the sums of all parts. KIND is ``process``, ``workers``,
``sharded``, ``servers`` or ``nodes``; 150 kills take less than an hour.
"""

import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["KERAS_BACKEND"] = "jax"

from lockstep.tools.env import describe_machine
from tests.fit.checkpointing.soaking import EPOCHS, JOB_EPOCHS, JobSoak, Soak
from tests.support.processes import ForkServer

RESULTS = Path(__file__).parent / "results" / "soak.json"
SAVE_FREQ = 2
KINDS = {
    "process": "one process, two devices",
    "workers": "two workers",
    "sharded": "two workers, sharded variables",
    "servers": "chief, two workers, server, evaluator",
    "nodes": "two nodes that join and leave",
}
COUNTED = ("process", "workers", "sharded")  # kinds whose steps and rows are counted
SUMS = {  # of a part: its title in the table
    "kills": "kills",
    "trainings": "trainings",
    "differ": "digests that differ",
    "steps lost or repeated": "steps lost or repeated",
    "rows": "trainings with a row not once",
    "codes": "processes with a code that is not theirs",
    "done again": "steps done again",
    "seconds": "seconds",
}
NOTE = f"""Steps and rows are counted with one process and two workers (with sharded variables the digest is that of whole ones): a CNN with BatchNorm and dropout, 3 replicas, 23 rows in batches of 8,
{EPOCHS} epochs. With servers (`max_staleness=0`) and nodes a dense net with dropout trains for {JOB_EPOCHS} epochs of 3 steps; its digest has
the number of steps and the history. A checkpoint each {SAVE_FREQ} steps. Processes are forked from one that has imported Keras, but for the
workers of nodes. A process that was not killed ends with 0 or 75. Other work ran on the machine, so the seconds are above what they need be."""


def soaked(kind, kills, seed):
    forks = ForkServer(), ForkServer()
    with tempfile.TemporaryDirectory() as folder:
        if kind in COUNTED:
            workers = 1 + (kind != "process")
            strategy = {"shard": "variables", "recompute": "blocks"} if kind == "sharded" else None
            found = Soak(forks, Path(folder) / "soak", workers, SAVE_FREQ, seed, strategy).run(kills)
        else:
            found = JobSoak(forks, Path(folder) / "soak", kind, seed).run(kills)
    for each in forks:
        each.close()
    return found


def part(kind, kills, seed):
    began = time.monotonic()
    found = soaked(kind, kills, seed)
    counted = kind in COUNTED
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "kind": kind,
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip()[:9],
        "kills": found.kills,
        "trainings": found.trainings,
        "differ": found.differ,
        "steps lost or repeated": found.steps_in_weights if counted else None,
        "rows": found.rows if counted else None,
        "codes": found.other_codes,
        "done again": found.done_again if counted else None,
        "seconds": round(time.monotonic() - began),
        "places": found.places,
    }


def write(parts):
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "parts": parts}, indent=1) + "\n")
    total = sum(part["kills"] for part in parts)
    lines = ["# Killed at random and resumed", "", describe_machine(), "", "`python benchmarks/soak.py KIND KILLS`", ""]
    lines += [f"{total:,} kills in {len(parts)} parts.", "", f"| job | {' | '.join(SUMS.values())} |"]
    lines += ["| --- " * (len(SUMS) + 1) + "|"]
    for kind, title in KINDS.items():
        own = [part for part in parts if part["kind"] == kind]
        if own:
            sums = ("-" if None in (values := [part[name] for part in own]) else f"{sum(values):,}" for name in SUMS)
            lines.append(f"| {title} | {' | '.join(sums)} |")
    lines += ["", NOTE, ""]
    for kind, title in KINDS.items():
        own = [part for part in parts if part["kind"] == kind]
        places = {place: 0 for part in own for place in sorted(part["places"])}
        for place in places:
            places[place] = sum(part["places"].get(place, 0) for part in own)
        if own:
            shown = ", ".join(f"{place} {count}" for place, count in sorted(places.items()) if count)
            lines += [f"Kills, {title}: {shown}.", ""]
    lines += ["| part | job | kills | seed | commit | date |", "| --- | --- | --- | --- | --- | --- |"]
    cells = ("kind", "kills", "seed", "commit", "date")
    lines += [
        f"| {number} | {' | '.join(str(part[cell]) for cell in cells)} |" for number, part in enumerate(parts, start=1)
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main(kind, kills, seed=None):
    seed = random.randrange(1 << 32) if seed is None else int(seed)
    print(f"seed {seed}", flush=True)
    new = part(kind, int(kills), seed)
    print(json.dumps(new))
    write([*json.loads(RESULTS.read_text())["parts"], new] if RESULTS.exists() else [new])
    return bool(new["differ"] or new["steps lost or repeated"] or new["rows"] or new["codes"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
