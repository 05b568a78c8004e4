"""Record the lines of the package that a process executes, continuously, so that a killed process loses little.

Every Python process of a run of the tests loads this file by its path, as ``sitecustomize.py`` says (:func:`startup`); it imports nothing of
the tests. A process of pytest says which test runs (:meth:`Recorder.switch`); its children read that from a file, several times a second.
"""

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from pathlib import Path

REACH, SOURCES = (
    "LOCKSTEP_MUTANTS_REACH",
    "LOCKSTEP_MUTANTS_SOURCES",
)  # a folder for what is written; where the package must come from
NOTHING = "-"  # runs: neither a test nor a fixture of several tests
_SECONDS = 0.1
MODULE = "lockstep_mutants_trace"

recorder: "Recorder | None" = None


def startup(folder: Path) -> Path:
    """Write the ``sitecustomize.py`` that has each process load this file; gives its folder, which belongs into ``PYTHONPATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location({MODULE!r}, {str(Path(__file__).resolve())!r})\n"
        "module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.begin()\n"
    )
    path = folder / "sitecustomize.py"
    if not path.exists() or path.read_text() != code:
        path.write_text(code)
    return folder


def begin() -> None:
    """What this process was started to do, by its environment."""
    global recorder
    if SOURCES in os.environ:
        sys.meta_path.insert(0, _Origin(os.environ[SOURCES], Path(os.environ["LOCKSTEP_MUTANTS_STRAYS"])))
    if REACH in os.environ:
        recorder = Recorder(Path(os.environ[REACH]))


class _Origin(importlib.abc.MetaPathFinder):
    """Notes where this process imports the package from another place than the sources with the mutant."""

    def __init__(self, sources: str, strays: Path) -> None:
        self._sources, self._strays = sources, strays

    def find_spec(self, name, path=None, target=None):
        if name == "lockstep":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is None or not str(spec.origin).startswith(self._sources):
                with self._strays.open("a") as file:
                    file.write(f"{spec and spec.origin} in {sys.argv} with {sys.path}\n")


class Recorder:
    """Writes ``name<tab>file<tab>lines`` to a file of this process.

    Args:
        folder: for that file; also has what runs now, for children.
    """

    def __init__(self, folder: Path) -> None:
        import coverage

        self.folder = folder
        self._is_told = False
        self._name = self._read_name()
        self._lock = threading.RLock()
        self._coverage = coverage.Coverage(data_file=None, config_file=False, source_pkgs=["lockstep"])
        self._coverage.start()
        self._again()
        os.register_at_fork(after_in_child=self._again)
        atexit.register(self.flush)
        for module, name in ((os, "_exit"), (os, "kill"), (os, "killpg"), (os, "execv"), (os, "execve")):
            setattr(module, name, self._flushing(getattr(module, name)))

    @property
    def _now(self) -> Path:
        """What runs in the process of pytest that this one comes from; which that is, pytest-xdist says late."""
        return self.folder / f"now-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"

    def switch(self, name: str) -> None:
        """Another test runs in this process from now on."""
        self.flush()
        self._is_told, self._name = True, name
        new = self._now.with_suffix(".new")
        new.write_text(name)
        new.rename(self._now)

    def note(self, *words: str) -> None:
        """Write a line of another kind."""
        with self._lock, self._path.open("a") as file:
            file.write("\t".join(words) + "\n")

    def flush(self) -> None:
        """Write what has been run since the last time."""
        with self._lock:
            before = self._name
            if not self._is_told:
                self._name = self._read_name()
            found = []
            for file, lines in dict(self._coverage._collector.data).items():
                own = sorted(lines.copy())
                lines.difference_update(own)
                if own:
                    found.append((file, ",".join(map(str, own))))
            for name in {before, self._name} - {NOTHING} if found else ():
                for file, own in found:
                    self.note(name, file, own)

    def _again(self) -> None:
        """Begin in this process, which may be a child that was forked: it has neither the threads nor the file of its parent."""
        self._lock = threading.RLock()
        self._path = self.folder / f"lines-{os.getpid()}"
        if self._is_told:  # A child: its parent may go on to another test.
            self._is_told = False
        threading.Thread(target=self._run, name="mutants-trace", daemon=True).start()

    def _run(self) -> None:
        sys.settrace(None)
        wait = threading.Event().wait
        while not wait(_SECONDS):
            self.flush()

    def _read_name(self) -> str:
        try:
            return self._now.read_text() or NOTHING
        except OSError:
            return NOTHING

    def _flushing(self, function):
        def flush_and_do(*args, **kwargs):
            self.flush()
            return function(*args, **kwargs)

        return flush_and_do
