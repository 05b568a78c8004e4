"""The secret of a job, which its processes read from a variable or a file."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from lockstep._atomic_files import open_to_read
from lockstep._errors import ClusterError

SECRET = "LOCKSTEP_SECRET"  # Known to the processes of the job only, which prove it to each other.
SECRET_FILE = "LOCKSTEP_SECRET_FILE"  # A file that has the secret.

MIN_SECRET_BYTES = 32  # From one challenge, guesses can be tested without being seen: it must not be guessed.
_MAX_SECRET_BYTES = 4096


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret without surrounding white space; None if there is none."""
    text, file = environ.get(SECRET), environ.get(SECRET_FILE)
    if text and file:
        raise ClusterError(f"{SECRET} and {SECRET_FILE} are both set. Fix: set one of them.")
    if not text and not file:
        return None
    secret = _read_secret_file(file) if file else (text or "").encode("utf-8", "surrogateescape").strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ClusterError(
            f"{SECRET_FILE if file else SECRET}: expected a secret of at least {MIN_SECRET_BYTES} bytes, got {len(secret)}. "
            "Fix: make one with 'openssl rand -hex 32', and give it to all processes of the job."
        )
    return secret


def _read_secret_file(name: str) -> bytes:
    try:
        with open_to_read(name) as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ClusterError(f"{SECRET_FILE}: {error}. Fix: name a file that this process can read.") from None
    if len(secret) > _MAX_SECRET_BYTES:
        raise ClusterError(
            f"{SECRET_FILE}: expected a file of at most {_MAX_SECRET_BYTES} bytes, got {name!r}. Fix: name a file that has the secret alone."
        )
    if mode & stat.S_IROTH:
        raise ClusterError(
            f"{SECRET_FILE}: every user of this machine can read {name!r}. Fix: chmod 600 {Path(name).name}; for a volume of "
            "Kubernetes, defaultMode: 0440."
        )
    return secret.strip()
