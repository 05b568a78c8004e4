"""Run the nightly set part by part, and commit what came of each part.

``./scripts/nightly`` runs every part that has not passed on the present sources, so a run that was interrupted continues
with the next part. ``./scripts/nightly PART ...`` runs these parts, ``--list`` shows all parts with their last result.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nightly.json"
TABLE = RESULTS.with_suffix(".md")
LOGS = ROOT / "build" / "nightly"
LIMIT = 60 * 60  # seconds of a part
ENVIRONMENT = os.environ | {"LOCKSTEP_TEST_OPTIMIZED": "1"}  # as users have XLA
WRITTEN = ("benchmarks/results", "docs/conformity.md")  # what parts write
SOURCES = (".", *(f":(exclude){path}" for path in WRITTEN))

# Of tests/programs, by replicas and devices, as all of them take hours.
PROGRAMS = {
    "one-device": "R2P1 or R3P1",
    "two-devices": "(R2P2 or R3P2) and not deterministic",
    "deterministic": "deterministic",
    "noise": "not numbers_of_plain_keras",
}

# Tests marked "nightly", by path; the part "rest" takes those of all other paths.
PATHS = {
    "law-1": ["tests/laws/test_law_1_n_replicas_equal_one_device.py"],
    "law-2": ["tests/laws/test_law_2_any_topology_same_bits.py"],
    "law-3": ["tests/laws/test_law_3_resume.py", "tests/fit/checkpointing"],
    "rows": ["tests/execution/rowwise"],
    **{f"programs-{part}": ["tests/programs", "-k", chosen] for part, chosen in PROGRAMS.items()},
}

# Tests of the suite, which has most of them without XLA's optimizations.
OPTIMIZED = {
    "laws": ["tests/laws"],
    "others": ["tests/execution", "tests/strategies", "tests/custom_loops", "tests/fit", "tests/data"],
}

# Nets that are compiled for TPUs in one part.
COMPILED = {"small": ["MLP", "CNN", "small LM"], "lm": ["LM"], "resnet50": ["ResNet50"]}


def commands() -> dict[str, list[str]]:
    """Return the command of each part."""
    workers = os.environ.get("TEST_WORKERS") or str(os.cpu_count() or 2)
    pytest = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadgroup", "--durations=10", "-m", "nightly"]
    named = sorted({path for paths in PATHS.values() for path in paths if path.startswith("tests/")})
    found = {part: [*pytest, *paths] for part, paths in PATHS.items()}
    for part, paths in OPTIMIZED.items():
        found[f"optimized-{part}"] = [*pytest[:-1], "not nightly", *paths]
    found["rest"] = [*pytest, *(f"--ignore={path}" for path in named)]
    for kind, kills in {"process": "500", "workers": "200", "sharded": "200", "servers": "200", "nodes": "100"}.items():
        found[f"soak-{kind}"] = [sys.executable, "benchmarks/soak.py", kind, kills]
    for job in ("workers", "servers", "launcher", "nodes"):
        found[f"faults-{job}"] = [sys.executable, "benchmarks/faults.py", job]
    found["fuzz"] = [sys.executable, "benchmarks/fuzz.py"]
    found["inputs"] = ["./scripts/test-inputs"]
    found["ray"] = ["./scripts/test-ray"]
    found["notebooks"] = ["./scripts/docs", "--notebooks"]
    found["hub"] = ["./scripts/test-hub"]
    targets = {"2x2": "v5e 2x2", "2x4": "v5e 2x4", "16x16": "v5e 16x16", "h100": "H100 x 8"}
    for target, (name, nets) in itertools.product(targets, COMPILED.items()):
        found[f"compiled-{name}-{target}"] = ["./scripts/test-accelerators", "--all", targets[target], *nets]
    for way in ("plain", "replicas", "devices", "deterministic"):
        found[f"conformity-{way}"] = ["./scripts/conformity", way]
    found["versions"] = ["./scripts/test-versions"]
    found["next"] = ["./scripts/test-versions", "--next"]
    return found


def main() -> int:
    """Run parts; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="scripts/nightly", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run, even if they have passed")
    parser.add_argument("--list", action="store_true", help="show all parts with their last result, and run nothing")
    options = parser.parse_args()
    known, results = commands(), json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if unknown := sorted(set(options.parts) - set(known)):
        parser.error(f"there is no part {', '.join(unknown)}; parts: {', '.join(known)}")
    if options.list:
        print(table(results, known))
        return 0
    if git("status", "--porcelain"):
        parser.error("the working tree has changes that are not committed. Fix: commit them, a result names its commit")
    failed = []
    for part in options.parts or [part for part in known if not has_passed(results.get(part))]:
        results[part] = run(part, known[part])
        record(part, results, known)
        failed += [part] if results[part]["exit code"] else []
    return bool(failed)


def has_passed(result: dict | None) -> bool:
    """Whether a part has passed on sources that differ from the present ones in results only."""
    if result is None or result["exit code"]:
        return False
    command = ["git", "diff", "--quiet", result["commit"], "HEAD", "--", *SOURCES]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def run(part: str, command: list[str]) -> dict:
    """Run one part, with its output in ``build/nightly/PART.log``."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, began = LOGS / f"{part}.log", time.monotonic()
    print(f"{part}: {' '.join(command)}", flush=True)
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds = round(time.monotonic() - began)
    lines = log.read_text(errors="replace").splitlines()
    counts = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed).* in \d", line)]
    print(f"{part}: exit code {code} after {seconds} s. {'; '.join(counts)}", flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    commit = git("log", "-1", "--format=%H", "--", *SOURCES)  # Later ones have changed results only.
    return {"commit": commit, "date": date, "seconds": seconds, "exit code": code, "counts": counts}


def record(part: str, results: dict, known: dict[str, list[str]]) -> None:
    """Write the results of all parts, and commit them."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    TABLE.write_text(f"# The nightly set\n\n`./scripts/nightly`\n\n{table(results, known)}\n")
    git("add", *WRITTEN)
    git("commit", "-q", "-m", f"nightly: record {part} at {results[part]['commit'][:9]}", "--", *WRITTEN)


def table(results: dict, known: dict[str, list[str]]) -> str:
    """Return the parts and their results in Markdown."""
    lines = ["| part | commit | date | minutes | exit code | tests |", "| --- | --- | --- | --- | --- | --- |"]
    for part in known:
        if result := results.get(part):
            minutes, counts = f"{result['seconds'] / 60:.0f}", "; ".join(result["counts"])
            cells = part, result["commit"][:9], result["date"], minutes, result["exit code"], counts
        else:
            cells = part, *["-"] * 5
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def git(*arguments: object) -> str:
    """Return what a git command prints."""
    return subprocess.run(
        ["git", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
