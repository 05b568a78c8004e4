"""Claim: whichever process of a job is stopped, killed, asked to end or interrupted, in any phase, the job ends in its limit or goes on.

``python benchmarks/faults.py`` runs all cells of ``tests/faults/matrix.py`` that have no result on the present sources, some at once, and
writes the table after each; until then a cell has its result on earlier sources. Arguments are kinds of jobs:
``python benchmarks/faults.py workers servers``. The exit code is 1 if a cell is not as it must be.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["KERAS_BACKEND"] = "jax"

from lockstep.tools.env import describe_machine
from tests.faults.matrix import IMPOSSIBLE, PHASES, ROLES, SIGNALS, TIMEOUT, Cell, cells, run, undisturbed
from tests.support.processes import ForkServer

RESULTS = Path(__file__).parent / "results" / "faults.json"
SOURCES = ("src/lockstep", "tests/faults")
TITLES = {
    "workers": "Two workers",
    "servers": "Parameter servers: a chief, two workers, a server and an evaluator, `max_staleness=0`",
    "launcher": "`lockstep run -n 2`",
    "nodes": "`lockstep run --nnodes 1:2`, two nodes with a worker each",
}
LEGEND = f"""Each cell is a real job on loopback with a limit of {TIMEOUT:g} s for its waits. A process held it in the phase until the signal
was sent. In a cell: the exit code of the process that got the signal → the codes of the others, `named` if each of those that failed, or
started again, names it; the seconds until the others had ended; then `same bits` if that job came to the end with the bits of an
undisturbed one, or `resumed` if its next start did. Negative codes are signals. A stopped process went on when the others had ended,
and its code is that of its end. A cell in which a process is left is wrong.
Other work ran on the machine, so the seconds are above what they need be. The next call of the script runs a wrong cell again.

What a cell cannot be: in the phases marked \\* the role has no part, and the job was held by another process. A supervisor takes part in
none: its worker 0 held the job, but for the rendezvous of nodes, in which the node was alone with its signal."""


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def known():
    """Return the results of cells, and the keys of those that are on the present sources."""
    present = {cell.key for job in ROLES for cell in cells(job)}
    recorded = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}
    found = {key: result for key, result in recorded.items() if key in present}
    commits = {result["commit"] for result in found.values()}
    current = {commit for commit in commits if not git("diff", "--quiet", commit, "--", *SOURCES).returncode}
    return found, {key for key, result in found.items() if result["commit"] in current}


class Table:
    """The results, on disk after each cell."""

    def __init__(self, results):
        self._results, self._lock = results, threading.Lock()
        self._commit = git("rev-parse", "HEAD").stdout.strip()

    def add(self, cell, found):
        """Add the result of a cell."""
        with self._lock:
            self._results[cell.key] = {"commit": self._commit, **found}
            print(cell.key, json.dumps(found), flush=True)
            write(self._results)


def write(results):
    content = {"machine": describe_machine(), "cells": dict(sorted(results.items()))}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    commits = Counter(result["commit"][:9] for result in results.values())
    wrong = {key: result["wrong"] for key, result in sorted(results.items()) if result["wrong"]}
    count = sum(len(cells(job)) for job in ROLES)
    lines = ["# Signals to each role in each phase", "", describe_machine(), "", "`python benchmarks/faults.py`", ""]
    lines += [
        f"{len(results)} of {count} cells were run; {len(wrong)} of them are not as they must be. "
        f"Sources: {', '.join(f'{number} cells at {commit}' for commit, number in commits.most_common())}.",
        "",
        LEGEND,
        "",
    ]
    lines += [f"- **{key}**: {'; '.join(faults)}" for key, faults in wrong.items()] + [""] * bool(wrong)
    for job, roles in ROLES.items():
        lines += [f"## {TITLES[job]}", ""]
        for role in roles:
            lines += [f"Signal to the {role}:", "", *table(results, job, role), ""]
    RESULTS.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def table(results, job, role):
    yield f"| phase | {' | '.join(SIGNALS)} |"
    yield "| --- " * (len(SIGNALS) + 1) + "|"
    for phase in PHASES:
        mark = " \\*" * ((job, role, phase) in IMPOSSIBLE)
        found = (results.get(Cell(job, role, signal, phase).key) for signal in SIGNALS)
        yield f"| {phase}{mark} | {' | '.join(describe(result, job, role) for result in found)} |"


def describe(result, job, role):
    if result is None:
        return "-"
    if "codes" not in result:
        return "**failed**"
    target = ROLES[job][role]
    others = ", ".join(str(code) for code in sorted({code for name, code in result["codes"].items() if name != target}))
    named = " named" if result["named"] else ""
    bits = {"same": "same bits", "same after a restart": "resumed"}.get(result["bits"], f"**{result['bits']}**")
    codes = f"{result['codes'][target]} → {others}{named}" if others else str(result["codes"][target])
    return f"{codes}; {result['seconds']:g} s; {bits}" + " **wrong**" * bool(result["wrong"])


def try_cell(forks, folder, cell, expected):
    began = time.monotonic()
    try:
        found = run(forks, folder, cell, expected)
    except (AssertionError, OSError, ValueError) as error:
        found = {"wrong": [f"{type(error).__name__}: {error}"[:2000]]}
    return found | {"wall": round(time.monotonic() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", help=f"kinds of jobs, of {', '.join(ROLES)}; default: all")
    parser.add_argument("--at-once", type=int, default=2, help="cells that run at the same time")
    options = parser.parse_args()
    results, current = known()
    jobs = options.jobs or list(ROLES)
    missing = [cell for job in jobs for cell in cells(job) if cell.key not in current or results[cell.key]["wrong"]]
    results, forks = Table(results), (ForkServer(), ForkServer())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        expected = {
            job: undisturbed(forks, Path(folder) / job, job) for job in jobs if any(cell.job == job for cell in missing)
        }

        def work(numbered):
            number, cell = numbered
            found = try_cell(forks, Path(folder) / str(number), cell, expected[cell.job])
            results.add(cell, found)
            return bool(found["wrong"])

        failed = list(pool.map(work, enumerate(missing)))
    for each in forks:
        each.close()
    return any(failed)


if __name__ == "__main__":
    sys.exit(main())
