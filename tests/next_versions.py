"""Run a part of the tests with the installed versions, and write what broke to ``benchmarks/results/next.md``.

``./scripts/test-versions --next`` calls this with Keras's nightly build and the newest JAX.
"""

import datetime
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "results" / "next.md"
RESULTS = ROOT / "build" / "next.xml"
LIMIT = 40 * 60  # seconds
PART = [
    *(
        "tests/keras",
        "tests/test_keras_features.py",
        "tests/test_public_api.py",
        "tests/fit/monitoring",
        "tests/tuning",
        "tests/data/test_indexed_batches.py",
    ),
    "tests/laws/test_law_1_n_replicas_equal_one_device.py",
    *("tests/fit/checkpointing/test_backup_and_restore.py", "tests/fit/checkpointing/test_preemption.py"),
]
PACKAGES = ("keras", "jax", "jaxlib", "numpy")


def main() -> int:
    """Run the tests; the exit code is 1 if none ran."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.unlink(missing_ok=True)
    workers = os.environ.get("TEST_WORKERS") or str(os.cpu_count() or 2)
    options = ["-q", "-n", workers, "--dist", "loadgroup", "-m", "not nightly and not slow", f"--junitxml={RESULTS}"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *PART], cwd=ROOT, timeout=LIMIT, check=False)
    if not RESULTS.exists():
        print(f"pytest ended with {done.returncode} and wrote no results")
        return 1
    text = page(ElementTree.parse(RESULTS).getroot())
    TABLE.write_text(text)
    print(text)
    return 0


def page(root: ElementTree.Element) -> str:
    """Return what broke as Markdown: each error with the number of tests that end with it, and one of them.

    Example:
        >>> suite = ElementTree.fromstring(
        ...     '<s><testcase classname="a.b" name="t"/><testcase classname="a.b" name="u"><failure message="KeyError: 7"/></testcase></s>'
        ... )
        >>> print(page(suite).splitlines()[-1])
        | `KeyError: 7` | 1 | `a.b::u` |
    """
    cases = list(root.iter("testcase"))
    broken = defaultdict(list)
    for case in cases:
        for fault in (*case.findall("failure"), *case.findall("error")):
            broken[reason_of(fault)].append(f"{case.get('classname')}::{case.get('name')}".removeprefix("::"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = sum(map(len, broken.values()))
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [
        "# Keras's main branch and the newest JAX",
        "",
        "`./scripts/test-versions --next`",
        "",
        f"{datetime.datetime.now(datetime.UTC).date()}: {versions}, Python {sys.version.split()[0]}. Of {len(cases)} tests "
        f"{len(cases) - failed - skipped} passed, {failed} failed, {skipped} were skipped.",
        "",
        "| what broke | tests | for example |",
        "| --- | --- | --- |",
    ]
    for reason, tests in sorted(broken.items(), key=lambda item: -len(item[1])):
        lines.append(f"| `{reason}` | {len(tests)} | `{tests[0]}` |")
    return "\n".join(lines) + "\n"


def reason_of(fault: ElementTree.Element) -> str:
    """Return the last error of a traceback in one line, without addresses and numbers of a run."""
    errors = re.findall(
        r"^E +((?:assert |\w*(?:Error|Exception|Warning|Exit)\b).*\w.*)$", fault.text or "", flags=re.MULTILINE
    )
    line = (errors or (fault.get("message") or "").splitlines() or ["unknown"])[-1]
    line = re.sub(r"0x[0-9a-f]+|\d{4,}|/[\w./-]+/", "…", line).replace("|", "/").replace("`", "'")
    return line[:160]


if __name__ == "__main__":
    sys.exit(main())
