"""A job whose workers are threads of this process."""

import socket
import threading

from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.connect import open_control_channel
from tests.support.waiting import DEADLINE


def listening():
    """A socket that listens at a port of its own, and the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


class ThreadedJob:
    """Workers in threads. ``each`` gives the arguments of ``join`` that one worker has for itself."""

    def __init__(self, workers, each=lambda index: {}, missing=(), **options):
        self.listener, self.coordinator = listening()
        self.workers, self.options, self.each = workers, {"timeout_seconds": 20, **options}, each
        self.lines = [[] for _ in range(workers)]
        self.failures = [[] for _ in range(workers)]
        self.sessions, self.errors = {}, {}
        self._threads = [
            threading.Thread(target=self._join, args=(index,), daemon=True)
            for index in range(workers)
            if index not in missing
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        return self

    def __exit__(self, *error):
        self.everyone(lambda session: session.leave())
        self.listener.close()

    def arguments(self, index):
        own = {
            "identity": {"jax": "1"},
            "log": self.lines[index].append,
            "on_failure": self.failures[index].append,
            "listener": self.listener if index == 0 else None,
            "group": WorkerGroup(workers=self.workers, index=index, coordinator=self.coordinator),
        }
        return {**own, **self.options, **self.each(index)}

    def everyone(self, work):
        """What ``work(session)`` gives on each worker at the same time, or the exception that it raises."""
        results = {}

        def run(index, session):
            try:
                results[index] = work(session)
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=item, daemon=True) for item in self.sessions.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        return [results[index] for index in sorted(results)]

    def _join(self, index):
        try:
            self.sessions[index] = open_control_channel(**self.arguments(index))
        except Exception as error:
            self.errors[index] = error
