"""Run Keras's own tests plainly and in scopes, and write down what differs.

``./scripts/conformity`` runs all of Keras's tests in :data:`FOLDERS` in each of :data:`WAYS`; ``./scripts/conformity WAY ...`` only these. The
test files come from the source distribution of the installed version of Keras, as its wheel does not hold them.
What comes of it is written to the page, too (``page.py``).
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

from tests.conformity import page

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "conformity"
RESULTS = ROOT / "benchmarks" / "results" / "conformity.json"
FOLDERS = ("trainers", "callbacks", "optimizers", "losses", "metrics", "layers", "models", "saving", "distribution")
WAYS = ("plain", "replicas", "devices", "deterministic")
LIMIT = 55 * 60  # seconds of one way


def test_files() -> Path:
    """Return a folder with Keras's test files, one folder for each of :data:`FOLDERS`."""
    name = f"keras-{version('keras')}"
    tests = BUILD / name
    if not tests.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", BUILD]
        subprocess.run([*map(str, pip), name.replace("-", "==")], check=True, timeout=600)
        with tarfile.open(BUILD / f"{name}.tar.gz") as archive:
            found = [member for member in archive.getmembers() if member.name.endswith("_test.py")]
            for member in found:
                parts = Path(member.name).parts[3:]  # Below keras-VERSION/keras/src.
                if parts[0] in FOLDERS and (file := archive.extractfile(member)):
                    target = tests.with_suffix(".part") / parts[0] / "__".join(parts[1:])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read())
        tests.with_suffix(".part").rename(tests)
    return tests


def run(way: str) -> dict[str, str]:
    """Run the tests in one way.

    Returns:
        For each test "passed", "skipped" or the first line of why it failed.
    """
    report = BUILD / f"{way}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", test_files(), "-c", os.devnull, "--rootdir", test_files(), "-q"]
    command += ["--confcutdir", test_files(), "-W", "ignore"]
    command += [
        "--import-mode=importlib",
        "-p",
        "tests.conformity.in_scope",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    command += [
        "-n",
        os.environ.get("TEST_WORKERS") or str(os.cpu_count() or 2),
        "--timeout=300",
        f"--junitxml={report}",
    ]
    environ = os.environ | {
        "LOCKSTEP_CONFORMITY": way,
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (BUILD / f"{way}.log").open("wb") as log:
        subprocess.run([*map(str, command)], cwd=ROOT, env=environ, stdout=log, stderr=log, timeout=LIMIT, check=False)
    return {_name(case): _outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def _name(case: ElementTree.Element) -> str:
    where, name = case.get("classname", ""), case.get("name", "")
    if not where:  # The file could not be imported.
        where, name = name, "import"
    folder, file, *classes = where.split(".")
    return f"{folder}/{file.replace('__', '/')}.py::" + "::".join([*classes, name])


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag == "skipped":
            return "skipped"
        if child.tag in ("failure", "error"):
            return (child.get("message") or child.tag).partition("\n")[0][:300].replace(f"{ROOT}{os.sep}", "")
    return "passed"


def main() -> int:
    """Run the ways that are asked for; the exit code is 1 if a test failed that passes plainly and has no known reason."""
    parser = argparse.ArgumentParser(prog="scripts/conformity", description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    ways = parser.parse_args().ways or WAYS
    if unknown := sorted(set(ways) - set(WAYS)):
        parser.error(f"there is no way {', '.join(unknown)}; ways: {', '.join(WAYS)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for way in ways:
        found = run(way)
        results["keras"] = version("keras")
        results[way] = {"commit": _commit(), "tests": _counts(found), "not passed": _not_passed(found)}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{way}: {sum(outcome == 'passed' for outcome in found.values())} of {len(found)} passed", flush=True)
    if "plain" in results:
        page.PAGE.write_text(page.page())
    left = page.unexplained(results)
    for way, name, reason in left:
        print(f"{way}: {name}: {reason}")
    return 1 if left else 0


def _counts(found: dict[str, str]) -> dict[str, int]:
    return {folder: sum(name.startswith(f"{folder}/") for name in found) for folder in FOLDERS}


def _not_passed(found: dict[str, str]) -> dict[str, str]:
    return {name: outcome for name, outcome in sorted(found.items()) if outcome != "passed"}


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
