"""Run each mutant with the tests that execute its line, in a copy of the repository, and store the result."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import trace
from tests.mutants.mutant import ROOT, GoneError, Mutant, every
from tests.mutants.picking import PICK
from tests.mutants.reach import FOLDER, Reach, python_path, suite_hash

RESULTS = Path(__file__).with_name("results.json")
_BEYOND = 15.0  # seconds after its own limit in which a test that hangs may still end by itself
CAUGHT, SURVIVED, GONE, UNCLEAR = "caught", "survived", "gone", "unclear"


def limit_of(seconds: float) -> float:
    """Seconds that a test may take with a mutant, on a busy machine; more is a hang."""
    return round(30 + 4 * seconds)


def run(ids: list[str], jobs: int, budget: float, again: bool, wide: bool, keep_caught: bool) -> int:
    """Run mutants; gives the number of those that were not caught."""
    results, suite, reach = Results(), suite_hash(), Reach()
    if reach.suite != suite:
        print(
            "The sources or the tests have changed since ./scripts/mutants reach: tests that are newer are not known.",
            file=sys.stderr,
        )
    unknown = set(ids) - {mutant.id for mutant in every()}
    if unknown:
        sys.exit(f"There is no mutant {', '.join(sorted(unknown))}.")
    chosen = [mutant for mutant in every() if mutant.id in ids or not ids]
    due = [mutant for mutant in chosen if again or ids or not results.is_known(mutant, suite, keep_caught)]
    places: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(min(jobs, len(due))):
        places.put(Copy(number))

    def one(mutant: Mutant) -> None:
        place = places.get()
        try:
            found = _judged(mutant, place, reach, results, budget, wide)
        finally:
            places.put(place)
        results.put(mutant, found | {"suite": suite})
        told = found.get("test") or found.get("why") or f"{found.get('tests')} tests"
        print(
            f"{mutant.id}: {found['outcome']} in {found.get('seconds', 0):.0f} s: {told}: {found.get('said', '')[:100]}",
            flush=True,
        )

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(one, due))
    return sum(results.of(mutant).get("outcome") != CAUGHT for mutant in chosen)


def _judged(mutant: Mutant, place: "Copy", reach: Reach, results: "Results", budget: float, wide: bool) -> dict:
    try:
        tests = reach.tests_of(mutant, wide)
    except GoneError as error:
        return {"outcome": GONE, "why": str(error)}
    begun = time.monotonic()
    while True:
        wanted = [test for test in tests if test not in results.unfit]
        if not wanted:
            return {"outcome": SURVIVED, "why": "no test reaches it", "tests": 0}
        found = place.tried(mutant, _limits(wanted, reach), budget)
        test = found.get("test")
        if found["outcome"] != CAUGHT or test is None or results.passes(test, place, reach):
            return found | {"seconds": round(time.monotonic() - begun, 1)}


def _limits(tests: list[str], reach: Reach) -> dict[str, float]:
    """In the order in which they are to run: file by file, as tests of one share what they have made, and the cheapest first."""
    whole: dict[str, float] = {}
    for test in tests:
        file = test.partition("::")[0]
        whole[file] = whole.get(file, 0.0) + reach.seconds[test]
    ordered = sorted(
        tests, key=lambda test: (whole[test.partition("::")[0]], test.partition("::")[0], reach.seconds[test])
    )
    return {test: limit_of(reach.seconds[test]) for test in ordered}


class Results:
    """What is known, kept after each mutant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mutants: dict[str, dict] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self._good: set[str] = set()  # tests that were seen to pass without a mutant
        self.unfit: set[str] = set()  # those that failed

    def of(self, mutant: Mutant) -> dict:
        return self._mutants.get(mutant.id, {})

    def is_known(self, mutant: Mutant, suite: str, keep_caught: bool) -> bool:
        found = self.of(mutant)
        is_same = found.get("new") == mutant.new and found.get("old") == mutant.old
        return is_same and (found["suite"] == suite or (keep_caught and found["outcome"] == CAUGHT))

    def put(self, mutant: Mutant, found: dict) -> None:
        with self._lock:
            self._mutants[mutant.id] = {"file": mutant.file, "old": mutant.old, "new": mutant.new, **found}
            kept = {key: self._mutants[key] for key in sorted(self._mutants)}
            RESULTS.with_suffix(".new").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            RESULTS.with_suffix(".new").rename(RESULTS)

    def passes(self, test: str, place: "Copy", reach: Reach) -> bool:
        """Whether a test that has failed with a mutant passes without it; if not, it is not asked again."""
        if test not in self._good:
            found = place.tried(None, _limits([test], reach), limit_of(reach.seconds[test]) + 120)
            (self._good if found["outcome"] == SURVIVED else self.unfit).add(test)
            if test in self.unfit:
                print(f"{test} fails without a mutant, too, and is left out: {found}", file=sys.stderr)
        return test in self._good


@dataclass
class Copy:
    """A copy of the repository that one mutant after the other is tried in."""

    number: int

    def __post_init__(self) -> None:
        self.root = FOLDER / f"copy-{self.number}"
        self.notes = FOLDER / f"notes-{self.number}"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        shutil.rmtree(self.root, ignore_errors=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        # Two versions of a file may have one size and one time: what was compiled is known by a digest of its source.
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", self.root / "src"]
        subprocess.run(command, check=True)

    def tried(self, mutant: Mutant | None, limits: dict[str, float], budget: float) -> dict:
        """What becomes of the tests, within ``budget`` seconds, with a mutant or without."""
        if mutant is None:
            return self._result(*self._run(limits, budget), limits)
        path, source = mutant.source()
        (self.root / path).write_text(source)
        try:
            return self._result(*self._run(limits, budget), limits)
        finally:
            shutil.copy2(ROOT / path, self.root / path)

    def _run(self, limits: dict[str, float], budget: float) -> tuple[int | None, str, list[dict]]:
        """Exit code, or None for a run that was broken off, what it printed last, and its notes."""
        pick, strays = FOLDER / f"pick-{self.number}", FOLDER / f"strays-{self.number}"
        pick.write_text(json.dumps({"limits": limits, "notes": str(self.notes)}))
        self.notes.write_text("")
        strays.unlink(missing_ok=True)
        environ = os.environ | {
            PICK: str(pick),
            trace.SOURCES: str(self.root / "src"),
            "LOCKSTEP_MUTANTS_STRAYS": str(strays),
        }
        environ |= {"PYTHONPATH": python_path(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        files = dict.fromkeys(test.partition("::")[0] for test in limits)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.mutants.picking",
            *files,
        ]
        output = FOLDER / f"output-{self.number}"
        with output.open("w") as out:
            process = subprocess.Popen(
                command, cwd=self.root, env=environ, stdout=out, stderr=out, start_new_session=True
            )
            begun, code = time.monotonic(), None
            while code is None and time.monotonic() - begun < budget and not self._hangs(limits):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.5)
            _end(process.pid, f"{trace.SOURCES}={self.root / 'src'}".encode())
            process.wait()
        if strays.exists():
            print(f"Some process has not run the sources with the mutant:\n{strays.read_text()}", file=sys.stderr)
        return code, output.read_text()[-600:], self._noted()

    def _noted(self) -> list[dict]:
        return [json.loads(line) for line in self.notes.read_text().splitlines() if line.endswith("}")]

    def _hangs(self, limits: dict[str, float]) -> str | None:
        """The test that has taken longer than it may."""
        last = next((note for note in reversed(self._noted()) if "test" in note), None)
        late = last and time.time() - last["begun"] > limits[last["test"]] + _BEYOND
        return last["test"] if last and late else None

    def _result(self, code: int | None, printed: str, notes: list[dict], limits: dict[str, float]) -> dict:
        failed = next((note for note in notes if "failed" in note), None)
        begun = [note["test"] for note in notes if "test" in note]
        count = {"tests": len(begun)}
        if failed:
            return {"outcome": CAUGHT, "test": failed["failed"], "said": failed["said"], **count}
        if code is None and (test := self._hangs(limits)):
            return {"outcome": CAUGHT, "test": test, "said": f"no end within {limits[test]:.0f} s", **count}
        if code is None:
            return {"outcome": SURVIVED, "why": f"out of time after {len(begun)} of {len(limits)} tests", **count}
        if code == 0:
            return {"outcome": SURVIVED, **count}
        if begun:  # The process of the tests has died.
            return {
                "outcome": CAUGHT,
                "test": begun[-1],
                "said": f"pytest ended with {code}: {printed[-200:]}",
                **count,
            }
        is_broken = not any("found" in note for note in notes)  # It could not even be imported.
        return {
            "outcome": CAUGHT if is_broken else UNCLEAR,
            "said": printed[-300:],
            "why": f"pytest ended with {code}",
            **count,
        }


def _end(process: int, mark: bytes) -> None:
    """End a run and all that it has started: what has left its group is known by its environment."""
    for found in [
        process,
        *(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _has(path, mark)),
    ]:
        try:
            os.kill(found, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _has(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
