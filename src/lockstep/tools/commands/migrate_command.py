"""``lockstep migrate``: what it prints, and ``--check``, which tries what it has written."""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep._errors import LockstepError, OptionError
from lockstep.doctor.finding import Report
from lockstep.tools.commands.doctor_command import examine_script, to_standard_error
from lockstep.tools.migrate.translate import Migration, migrate

__all__ = ["run_migrate"]

_ONE_WORKER = {"cluster": {"worker": ["127.0.0.1:12421"]}, "task": {"type": "worker", "index": 0}}


def run_migrate(paths: Sequence[str], *, write: bool, check: bool) -> int:
    """Translate the files of a program, and print what has changed and what is left.

    Args:
        paths: of the files.
        write: whether the files get the new text.
        check: whether the new program is run up to its first ``fit``, and looked at by the doctor.

    Returns:
        The exit code: 0, 1 where something is left or found, 2 where the program cannot be translated or does not start.
    """
    try:
        found = migrate(paths, write=write)
    except LockstepError as error:
        print(f"lockstep migrate: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(one.difference, end="", flush=True)
    for one in found:
        print(one.summary, file=sys.stderr)
    left = any(one.translation.marks for one in found)
    return max(_checked(found) if check else 0, int(left))


def _checked(found: Sequence[Migration]) -> int:
    script = _script_of(found)
    try:
        with to_standard_error(True):
            report = _examined(found, script)
    except LockstepError as error:
        print(f"lockstep migrate --check: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        print(f"lockstep migrate --check: {script.path} does not come to its first fit yet.", file=sys.stderr)
        return 2
    print(f"{script.path} comes to its first fit. {report}", file=sys.stderr)
    return 1 if report.findings else 0


def _script_of(found: Sequence[Migration]) -> Migration:
    """The file that nobody of the others imports; the last one, where there are several."""
    imported = [
        one
        for one in found
        if any(Path(one.path).stem in other.translation.modules for other in found if other is not one)
    ]
    return next((one for one in reversed(found) if one not in imported), found[-1])


def _examined(found: Sequence[Migration], script: Migration) -> Report:
    """The program runs in a folder of its own, as one worker; what it reads and was not translated it finds where it was."""
    names = [Path(one.path).name for one in found]
    if len(set(names)) < len(names):
        raise OptionError(f"files of one name cannot be tried together: {', '.join(sorted(names))}. Give one program.")
    with tempfile.TemporaryDirectory() as folder, _beside(script.path):
        for name, one in zip(names, found, strict=True):
            Path(folder, name).write_text(one.translation.after, encoding="utf-8")
        return examine_script(str(Path(folder, Path(script.path).name)), ())


@contextmanager
def _beside(path: str) -> Iterator[None]:
    """A program is there as one worker, with the modules of a folder."""
    before = os.environ.get("TF_CONFIG")
    os.environ["TF_CONFIG"] = json.dumps(_ONE_WORKER)
    sys.path.append(str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.path.pop()
        if before is None:
            del os.environ["TF_CONFIG"]
        else:
            os.environ["TF_CONFIG"] = before
