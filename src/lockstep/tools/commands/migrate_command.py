"""``lockstep migrate``: print the translation, and with ``--check`` run it up to its first fit."""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep._errors import LockstepError, OptionError
from lockstep.doctor.base import Report
from lockstep.tools.commands.doctor_command import examine_script, to_standard_error
from lockstep.tools.migrate.translate import Migration, migrate

_ONE_WORKER = {"cluster": {"worker": ["127.0.0.1:12421"]}, "task": {"type": "worker", "index": 0}}


def run_migrate(paths: Sequence[str], *, write: bool, check: bool) -> int:
    """Translate the files of a program, and print the differences and the remaining work.

    Args:
        paths: of the files.
        write: whether to write the new text to the files.
        check: whether to run the new program up to its first ``fit`` and examine it with the doctor.

    Returns:
        The exit code: 0; 1 if work remains or the doctor has findings; 2 if the program fails before its first fit.

    Raises:
        LockstepError: the program cannot be translated.
    """
    migrations = migrate(paths, write=write)
    for one in migrations:
        print(one.difference, end="", flush=True)
    for one in migrations:
        print(one.summary, file=sys.stderr)
    remaining = any(one.translation.todos for one in migrations)
    return max(_check(migrations) if check else 0, int(remaining))


def _check(migrations: Sequence[Migration]) -> int:
    script = _script_of(migrations)
    try:
        with to_standard_error(True):
            report = _examine(migrations, script)
    except LockstepError as error:
        print(f"lockstep migrate --check: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        print(f"lockstep migrate --check: {script.path} failed before its first fit.", file=sys.stderr)
        return 2
    print(f"{script.path} reaches its first fit. {report}", file=sys.stderr)
    return 1 if report.findings else 0


def _script_of(migrations: Sequence[Migration]) -> Migration:
    """Return the file that no other file imports; the last one if there are several."""
    imported = [
        one
        for one in migrations
        if any(Path(one.path).stem in other.translation.modules for other in migrations if other is not one)
    ]
    return next((one for one in reversed(migrations) if one not in imported), migrations[-1])


def _examine(migrations: Sequence[Migration], script: Migration) -> Report:
    """Run the program in a temporary folder, as one worker; modules that were not translated are found beside the script."""
    names = [Path(one.path).name for one in migrations]
    if len(set(names)) < len(names):
        raise OptionError(
            f"--check: several files have the same name: {', '.join(sorted(names))}. Fix: give the files of one program."
        )
    with tempfile.TemporaryDirectory() as folder, _environment_of(script.path):
        for name, one in zip(names, migrations, strict=True):
            Path(folder, name).write_text(one.translation.after, encoding="utf-8")
        return examine_script(str(Path(folder, Path(script.path).name)), ())


@contextmanager
def _environment_of(path: str) -> Iterator[None]:
    """Set the environment of a program: a cluster of one worker, and the folder of the script in ``sys.path``."""
    before = os.environ.get("TF_CONFIG")
    os.environ["TF_CONFIG"] = json.dumps(_ONE_WORKER)
    sys.path.append(str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.path.pop()
        if before is None:
            os.environ.pop("TF_CONFIG", None)  # The script may have removed it.
        else:
            os.environ["TF_CONFIG"] = before
