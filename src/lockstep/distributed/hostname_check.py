"""Whether the workers' collectives can reach each other: on CPUs, Gloo listens where a machine's own name leads.

On Debian that is 127.0.1.1 unless somebody has changed it, which other machines cannot reach. Gloo would find out in the first
step, with a sentence about sockets.
"""

import os
import socket
from pathlib import Path

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import is_loopback, split_address
from lockstep.distributed.control.control_client import ControlClient

__all__ = ["refuse_unreachable_names"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def refuse_unreachable_names(session: ControlClient) -> None:
    """Refuse to go on where there are several machines and the name of one leads nowhere, or back to itself.

    Args:
        session: the workers, who all call it.

    Raises:
        ClusterError: on all workers; it names the first such worker, and what to write where.
    """
    own = [_machine(), socket.gethostname(), _address_of_own_name(), _address_towards(session)]
    every = session.gather("the machine and its name", own)
    if len({one[0] for one in every}) == 1:
        return
    for peer, (_, name, address, reachable) in zip(session.peers, every, strict=True):
        if address is None or is_loopback(address):
            leads = "leads to no address" if address is None else f"leads to {address}"
            line = f"{reachable or 'its address in the network'} {name}"
            raise ClusterError(
                f"{peer}: the name of its machine, {name!r}, {leads} there, which the other machines cannot reach; the collectives of "
                f"CPUs (Gloo) listen at the address of that name. Write the line {line!r} into /etc/hosts there, and remove the other "
                "lines with that name."
            )


def _machine() -> str:
    """What all processes share that reach each other on a loopback address: containers of one machine may not."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NETWORK)}"
    except OSError:
        return socket.gethostname()


def _address_of_own_name() -> str | None:
    """The first address of this machine's name at which a socket can be bound, as Gloo looks for it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def _address_towards(session: ControlClient) -> str | None:
    """The address with which this machine goes to worker 0; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            *split_address("the coordinator", session.group.coordinator), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.connect(address)
            own = str(tried.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(own) else own
