"""A worker that tests start as a process: it joins, says so, and does what its arguments tell it."""

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time

from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.connect import open_control_channel
from lockstep.distributed.control.termination import ExitGuard, install_sigabrt_handler
from tests.support.telling import tell


def hang():
    """As a thread in C++ that waits for ever: no exception reaches it."""
    while True:
        signal.pause()


def hang_in_a_step(session, config):
    session.report(8, "step")
    tell(at_work=True)
    hang()


def hang_in_the_data(session, config):
    session.report(7, "data")
    tell(at_work=True)
    hang()


def raise_an_exception(session, config):
    raise ValueError("the labels of batch 7 are missing")


def be_interrupted(session, config):
    raise KeyboardInterrupt


def exit_in_order(session, config):
    session.report(7, "step")
    sys.exit(config["code"])


def exit_without_a_word(session, config):
    os._exit(7)


def wait(session, config):
    session.barrier("the end")


def wait_for_a_signal(session, config):
    tell(at_work=True)
    signal.sigwait({signal.SIGUSR1})
    wait(session, config)


def wait_with_a_child(session, config):
    child = os.fork()
    if child == 0:
        os.close(1)
        os.close(2)
        hang()
    tell(child=child)
    wait(session, config)


def raise_in_a_child(session, config):
    child = os.fork()
    if child == 0:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # What it prints is nobody's; a closed one would fail when it is flushed.
        raise ValueError("in the child")
    _, status = os.waitpid(child, 0)
    tell(child=os.waitstatus_to_exitcode(status))
    wait(session, config)


def fail_as_a_collective_whose_peer_dies(session, config):
    died = os.pidfd_open(config["peer"])
    tell(at_work=True)
    select.select([died], [], [])
    raise RuntimeError("the collective failed: connection closed by peer")


def abort(session, config):
    faulthandler.enable()
    install_sigabrt_handler(session, config["seconds"])
    tell(at_work=True)
    signal.sigwait({signal.SIGUSR1})
    os.abort()


def main(config):
    noticed, lock = [], threading.Lock()

    def notice():
        with lock:  # The second thread to notice ends the process: it waits until the first has told.
            if not noticed:
                noticed.append(time.monotonic())
                tell(noticed=noticed[0])

    def on_failure(failure):
        notice()
        guard.on_failure(failure)

    def excepthook(*error):
        notice()
        sys.__excepthook__(*error)

    secret = config.get("secret")
    sys.excepthook = excepthook
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # Before there are threads that would take it.
    guard = ExitGuard(grace_seconds=0.3)
    guard.install()
    guard.client = open_control_channel(
        WorkerGroup(workers=config["workers"], index=config["index"], coordinator=config["coordinator"]),
        config.get("identity", {"jax": "1"}),
        network=NetworkOptions(None if secret is None else secret.encode()),
        timeout_seconds=config.get("timeout", 30),
        on_failure=on_failure,
    )
    globals()[config["does"]](guard.client, config)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
