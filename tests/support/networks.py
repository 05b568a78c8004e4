"""Machines on a network of their own, as far as a process can tell: network namespaces, joined by a bridge.

Each has an address, and a ``/etc/hosts`` in which the machine's name stands for it. All is removed at the end.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

HOSTS = Path("/etc/netns")  # ip netns exec puts the files of a namespace's folder in the place of those in /etc.


def why_not():
    """Why this machine cannot make namespaces; None where it can."""
    if shutil.which("ip") is None:
        return "there is no command ip: install iproute2"
    if os.geteuid():
        return "only root may make network namespaces"
    name = f"lockstep-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=20)
    return None


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Network:
    """So many machines on one bridge; to be used as a context manager."""

    def __init__(self, machines):
        tag = f"ls{os.getpid() % 100000}"
        self.bridge = f"{tag}b"
        self.names = [f"{tag}n{number}" for number in range(machines)]
        self.links = [f"{tag}v{number}" for number in range(machines)]
        self.addresses = [f"10.213.{os.getpid() % 250}.{1 + number}" for number in range(machines)]

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            ip("link", "add", self.bridge, "type", "bridge")
            ip("link", "set", self.bridge, "up")
            for machine in range(len(self.names)):
                self._add(machine)
            stack.pop_all()
        return self

    def __exit__(self, *error):
        self._remove()

    def inside(self, machine):
        """What a command is to be preceded by, to run there."""
        return ["ip", "netns", "exec", self.names[machine]]

    def mend(self, machine):
        """Its plug is in, and its name stands for its address."""
        self.lead_name(machine, self.addresses[machine])
        ip("-n", self.names[machine], "link", "set", "eth0", "up")

    def cut(self, machine):
        """Pull its plug."""
        ip("-n", self.names[machine], "link", "set", "eth0", "down")

    def lead_name(self, machine, address):
        """Have its name stand for an address there."""
        (HOSTS / self.names[machine] / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def _add(self, machine):
        name, link, address = self.names[machine], self.links[machine], self.addresses[machine]
        ip("netns", "add", name)
        (HOSTS / name).mkdir(parents=True)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", link, "master", self.bridge, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "lo", "up")
        self.mend(machine)

    def _remove(self):
        """As far as it was made."""
        for name, link in zip(self.names, self.links, strict=True):
            subprocess.run(["ip", "link", "del", link], capture_output=True, timeout=20)
            shutil.rmtree(HOSTS / name, ignore_errors=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, timeout=20)
        with contextlib.suppress(OSError):
            HOSTS.rmdir()  # Only where nobody else has something there.
