"""Claim: asynchronous workers do not delay each other: a worker that is ten times slower costs the others nothing.

One process serves 332,856 float32 in 20 variables (the size of the Reuters example), applies Adam to each gradient, and hands out batches. Each
worker is a process that takes a batch, pulls, sleeps for the time of a gradient, pushes, and reports completion. Sleeping needs no core, so this
measures the cost of waiting, not the computing power of two cores.
"""

import multiprocessing
import os
import socket
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
from results_file import write

SECONDS = 6.0  # of each measurement
COMPUTE = 0.04  # seconds of a batch
VARIABLES = 20
SIZE = 332_856 // VARIABLES

# Seconds of a batch, for each worker.
CASES = {
    "1 worker": [COMPUTE],
    "2 workers": [COMPUTE] * 2,
    "3 workers": [COMPUTE] * 3,
    "4 workers": [COMPUTE] * 4,
    "3 workers and one 10 times slower": [COMPUTE] * 3 + [10 * COMPUTE],
    "the same, bound 4": [COMPUTE] * 3 + [10 * COMPUTE],
    "1 worker that computes nothing": [0.0],
    "4 workers that compute nothing": [0.0] * 4,
}
BOUNDS = {"the same, bound 4": 4}


def plan_of():
    from lockstep._array_encoding import ArraySpec
    from lockstep.parameter_server.sharding import plan_shards

    return plan_shards([ArraySpec(f"w{number}", (SIZE,), "float32") for number in range(VARIABLES)], 1)


def serve_all(found, bound):
    import keras

    from lockstep.distributed.control.handshake import Peer
    from lockstep.parameter_server.rpc import ArrayServer
    from lockstep.parameter_server.task_dispatcher import TaskDispatcher
    from lockstep.parameter_server.variable_client import VariableClient
    from lockstep.parameter_server.variable_server import serve

    variables, work = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    ports = [each.getsockname()[1] for each in (variables, work)]
    dispatcher, me = TaskDispatcher(), Peer(0, 1, "here", 0, information={"job": "chief"})
    serve(0, plan_of(), keras.optimizers.Adam(1e-6), variables, max_staleness=bound)
    VariableClient(plan_of(), [f"127.0.0.1:{ports[0]}"], me).fill(gradient())
    ArrayServer(me, dispatcher, work).start()
    dispatcher.open(1)
    for _ in range(100_000):
        dispatcher.schedule({})
    found.put(ports)
    time.sleep(3600)


def gradient():
    return {f"w{number}": np.ones(SIZE, np.float32) for number in range(VARIABLES)}


def drive(index, workers, ports, seconds, start, results):
    from lockstep.distributed.control.handshake import Peer
    from lockstep.parameter_server.rpc import connect_rpc
    from lockstep.parameter_server.task_client import TaskClient
    from lockstep.parameter_server.variable_client import VariableClient

    me = Peer(index, workers, "here", index)
    client = VariableClient(plan_of(), [f"127.0.0.1:{ports[0]}"], me)
    dispatcher = TaskClient(connect_rpc("chief", f"127.0.0.1:{ports[1]}", me, None, 60.0, print))
    arrays = gradient()
    dispatcher.enter(1)
    client.pull(will_push=False)
    start.wait(100)
    begin, count, before = time.perf_counter(), 0, sum(client.traffic)
    while time.perf_counter() - begin < SECONDS:
        piece = dispatcher.take(1)
        client.pull()
        time.sleep(seconds)
        client.push(arrays, task=piece.number)
        dispatcher.finish(1, piece, ({}, {})).result()
        count += 1
    used = time.perf_counter() - begin
    results.put((index, count / used, (sum(client.traffic) - before) / used, client.statistics()[0]["staleness"]))
    start.wait(100)  # Nobody goes before all are done: whoever goes is waited for no more.
    client.close()
    dispatcher.close()


def measure(processes, seconds, bound):
    found, results, start = processes.Queue(), processes.Queue(), processes.Barrier(len(seconds))
    server = processes.Process(target=serve_all, args=(found, bound), daemon=True)
    server.start()
    ports = found.get(timeout=100)
    workers = [
        processes.Process(target=drive, args=(index, len(seconds), ports, each, start, results), daemon=True)
        for index, each in enumerate(seconds)
    ]
    for worker in workers:
        worker.start()
    measured = sorted(results.get(timeout=100) for _ in workers)
    for worker in workers:
        worker.join(60)
    server.kill()
    return measured


def main():
    processes = multiprocessing.get_context("spawn")
    rows = []
    for name, seconds in CASES.items():
        measured = measure(processes, seconds, BOUNDS.get(name))
        staleness = {
            s: count for s, count in max((each[3] for each in measured), key=lambda pairs: sum(c for _, c in pairs))
        }
        mean = sum(s * count for s, count in staleness.items()) / sum(staleness.values())
        rates = [rate for _, rate, _, _ in measured]
        rows.append(
            (
                name,
                f"{sum(rates):.1f}",
                f"{sum(rates[:3]):.1f}" if len(rates) > 3 else "",
                f"{sum(sent for *_, sent, _ in measured) / 1e6:.0f}",
                f"{mean:.1f}",
                max(staleness),
            )
        )
    columns = ("case", "updates/s", "of these by the first three", "MB/s", "mean staleness", "largest")
    write("variables_on_servers", "Workers that push to a server", columns, rows)


if __name__ == "__main__":
    main()
