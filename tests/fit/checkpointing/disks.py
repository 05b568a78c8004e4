"""Disks that get full or read-only, as far as a test can make them: file systems in memory. All are unmounted at the end."""

import contextlib
import os
import shutil
import subprocess

SIZE = "1m"
_PIECE = 4096


def why_not(folder):
    """Why this machine cannot mount; None where it can."""
    if os.geteuid():
        return "only root may mount file systems"
    if shutil.which("mount") is None:
        return "there is no command mount"
    place = folder / "trial"
    place.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        return f"mount: {tried.stderr.strip()}"
    run("umount", str(place))
    return None


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Disk:
    """A file system of ``SIZE`` at ``path``; to be used as a context manager."""

    def __init__(self, path):
        self.path, self._mounted = path, 0

    def __enter__(self):
        self.path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={SIZE}", "none")
        return self

    def __exit__(self, *error):
        while self._mounted:
            self.take_away()

    def fill(self):
        """Leave no space on it."""
        with open(self.path / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_PIECE))
        assert not shutil.disk_usage(self.path).free

    def clear(self):
        (self.path / "filler").unlink()

    def make_read_only(self):
        """Show the same files at the same place, not to be changed; who has opened one before still has it."""
        self._mount("--bind", str(self.path))
        run("mount", "-o", "remount,bind,ro", str(self.path))

    def replace(self):
        """Put an empty one over it that cannot be written."""
        self._mount("-t", "tmpfs", "-o", "ro", "none")

    def take_away(self):
        """What was put there last. It goes when nobody uses it any more."""
        run("umount", "--lazy", str(self.path))
        self._mounted -= 1

    def _mount(self, *arguments):
        run("mount", *arguments, str(self.path))
        self._mounted += 1
