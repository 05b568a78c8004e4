"""Run the parts, each in a process of its own with a time limit, and add their findings to one file and one page.

First those that compare, with ``--jobs N`` N of them at a time; then those that need a device for themselves.

``./scripts/accelerator`` runs all parts that have no right result for the present commit on this kind of device, ``PART …`` runs these,
``--list`` shows what is recorded. A result of small sizes stands only for small sizes.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOGETHER = (
    "numbers",
    "bits",
    "inputs",
    "uneven",
    "strategies",
    "loops",
    "joined",
    "precision",
    "nan_guard",
    "monitoring",
    "resume",
    "jobs",
    "devices",
    "mesh",
)
ALONE = (
    "out_of_memory",
    "host",
    "memory",
    "memory_resnet50",
    "steps_mlp",
    "steps_cnn",
    "steps_lm",
    "steps_resnet50",
    "deterministic",
    "torch",
    "plan",
)
PARTS = TOGETHER + ALONE
PACKAGES = ("jax", "jaxlib", "keras", "numpy", "torch")
LIMIT = 9 * 60  # seconds of a part


def main():
    """Run parts; the exit code is 1 if a finding is outside its limit, or a part did not run."""
    parser = argparse.ArgumentParser(prog="scripts/accelerator", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run, even if they are recorded")
    parser.add_argument("--list", action="store_true", help="show what is recorded, and run nothing")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU trains in seconds")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="parts that compare, at a time")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    file = options.results / "accelerator.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    if options.list:
        print(page(records))
        return 0
    own = records.setdefault(device_kind(), {})
    wanted = options.parts or [part for part in PARTS if not is_done(own.get(part), options.small)]
    failed = False

    def add(part, record):
        nonlocal failed
        own[part] = record
        options.results.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(records, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(records))
        wrong = [one["what"] for one in record["findings"] if not one["right"]]
        failed |= bool(wrong or record["error"])
        print(f"{part}: {record['error'] or '; '.join(wrong) or 'right'}, {record['seconds']} s", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        started = {
            pool.submit(run, part, options.small, shared=options.jobs > 1): part for part in wanted if part in TOGETHER
        }
        for done in as_completed(started):
            add(started[done], done.result())
    for part in wanted:
        if part in ALONE:
            add(part, run(part, options.small))
    return int(failed)


def is_done(record, small):
    """Whether the record of a part, or None, is of this commit, of such sizes or of whole ones, and right."""
    if record is None or record["commit"] != commit() or record["error"]:
        return False
    return (small or not record["small"]) and all(one["right"] for one in record["findings"])


def device_kind():
    """Kind and number of the devices, asked of a process that ends: one that holds a device keeps it from the parts."""
    program = "import jax; d = jax.local_devices(); print(f'{d[0].device_kind} x {len(d)}')"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout.splitlines()[-1]


def run(part, small, *, shared=False):
    """Run one part, and return its record, with what it had found by then if it fails or takes too long.

    Args:
        part: its name.
        small: whether its sizes are small.
        shared: whether other parts run at the same time, so that it must not take the memory of the device when it starts.
    """
    command = [sys.executable, str(Path(__file__).parent / "parts.py"), part, *(["--small"] if small else [])]
    environment = {**os.environ, **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shared else {})}
    begun = datetime.datetime.now(datetime.UTC)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=errors, env=environment, timeout=LIMIT, check=False
            ).returncode
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"not done after {LIMIT} s"
        output.seek(0)
        findings = [json.loads(line) for line in output if line.startswith('{"what"')]
        errors.seek(0)
        error = error and f"{error}: {last_lines(errors.read())}"
    return {
        "commit": commit(),
        "date": begun.date().isoformat(),
        "seconds": round((datetime.datetime.now(datetime.UTC) - begun).total_seconds()),
        "small": small,
        "versions": versions(),
        "findings": findings,
        "error": error,
    }


def last_lines(text):
    """Return the end of what a part printed."""
    return " ".join(text.strip().splitlines()[-3:])[-600:]


def versions():
    """Return the versions of Python and of the packages that are there."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit():
    """Return the commit of the sources: $LOCKSTEP_COMMIT where they are a copy of it, else that of this checkout."""
    if given := os.environ.get("LOCKSTEP_COMMIT"):
        return given[:12]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()[:12] or "unknown"


def page(records):
    """Return the records as Markdown."""
    lines = ["# What was seen on real devices", "", "`./scripts/accelerator`", ""]
    for device, parts in records.items():
        for part in (part for part in PARTS if part in parts):
            record = parts[part]
            used = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
            size = ", small sizes" if record["small"] else ""
            lines += [f"## {device}: {part}", "", f"{record['date']}, {record['seconds']} s{size}; {used}", ""]
            lines += [f"It did not run: {record['error']}", ""] if record["error"] else []
            if record["findings"]:
                lines += ["| | value | limit | right |", "| --- | --- | --- | --- |"]
                lines += [
                    f"| {one['what']} | {shown(one['value'])} | {'' if one['limit'] is None else one['limit']} | {'yes' if one['right'] else 'no'} |"
                    for one in record["findings"]
                ]
                lines.append("")
    return "\n".join(lines)


def shown(value):
    """Return a value for a cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
