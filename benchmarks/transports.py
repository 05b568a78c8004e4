"""Claim: for gradients, plain sockets are as fast as message libraries, so a variable server needs none.

A client pushes a float32 array to a server on this machine and receives one of the same size, like a worker that pushes its gradient and pulls
the variables. One server process, one or four client processes; every transport moves the same arrays with the same small JSON header. The
transports take turns in three rounds; the best round of each counts.

Needs ``pyzmq`` and ``grpcio`` in addition. Decision 20 is based on this.
"""

import json
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress

import grpc
import numpy as np
import zmq
from results_file import write

SIZES = {"1 kB": 250, "100 kB": 25_000, "4 MB": 1_000_000, "40 MB": 10_000_000}  # numbers of float32
CLIENTS = (1, 4)
ROUNDS = 3
SECONDS = 0.4  # of each measurement, at least
LARGEST = 2**28
METHOD = "/variables/push_and_pull"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

LENGTHS = struct.Struct(">II")  # bytes of the head, bytes of the array


def head_of(array: np.ndarray) -> bytes:
    return json.dumps({"kind": "push", "arrays": [["kernel", array.dtype.name, list(array.shape)]]}).encode()


def array_of(head: bytes, data: object) -> np.ndarray:
    (_, dtype, shape) = json.loads(head)["arrays"][0]
    return np.frombuffer(data, dtype).reshape(shape)


# --- plain sockets -------------------------------------------------------------------------------------------------


def read(connected: socket.socket, count: int) -> memoryview:
    buffer = memoryview(np.empty(count, np.uint8)).cast("B")
    done = 0
    while done < count:
        received = connected.recv_into(buffer[done:])
        if not received:
            raise ConnectionError
        done += received
    return buffer


def send_array(connected: socket.socket, array: np.ndarray) -> None:
    head = head_of(array)
    data = memoryview(array).cast("B")
    connected.sendall(LENGTHS.pack(len(head), len(data)) + head)
    connected.sendall(data)


def receive_array(connected: socket.socket) -> np.ndarray:
    head, data = LENGTHS.unpack(read(connected, LENGTHS.size))
    if head + data > LARGEST:
        raise ConnectionError
    return array_of(bytes(read(connected, head)), read(connected, data))


def sockets_server(size: int, tell: Callable[[int], None]) -> None:
    values = np.ones(size, np.float32)

    def serve(connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError), connected:
            while True:
                receive_array(connected)
                send_array(connected, values)

    listener = socket.create_server(("127.0.0.1", 0))
    tell(listener.getsockname()[1])
    while True:
        threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()


def sockets_client(port: int, size: int) -> Callable[[], None]:
    connected = socket.create_connection(("127.0.0.1", port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient = np.ones(size, np.float32)

    def push_and_pull() -> None:
        send_array(connected, gradient)
        receive_array(connected)

    return push_and_pull


# --- pyzmq ---------------------------------------------------------------------------------------------------------


def pyzmq_server(size: int, tell: Callable[[int], None]) -> None:
    values = np.ones(size, np.float32)
    router = zmq.Context().socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    tell(router.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        client, head, data = router.recv_multipart(copy=False)
        array_of(head.bytes, data.buffer)
        router.send_multipart([client.bytes, head_of(values), values], copy=False)


def pyzmq_client(port: int, size: int) -> Callable[[], None]:
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    gradient = np.ones(size, np.float32)

    def push_and_pull() -> None:
        dealer.send_multipart([head_of(gradient), gradient], copy=False)
        head, data = dealer.recv_multipart(copy=False)
        array_of(head.bytes, data.buffer)

    return push_and_pull


# --- grpcio --------------------------------------------------------------------------------------------------------


def packed(array: np.ndarray) -> bytes:
    head = head_of(array)
    return b"".join((LENGTHS.pack(len(head), array.nbytes), head, memoryview(array).cast("B")))


def unpacked(message: bytes) -> np.ndarray:
    head, _ = LENGTHS.unpack_from(message)
    view = memoryview(message)[LENGTHS.size :]
    return array_of(bytes(view[:head]), view[head:])


def grpcio_server(size: int, tell: Callable[[int], None]) -> None:
    values = np.ones(size, np.float32)

    def push_and_pull(message: bytes, context: grpc.ServicerContext) -> bytes:
        unpacked(message)
        return packed(values)

    handler = grpc.unary_unary_rpc_method_handler(push_and_pull)
    server = grpc.server(futures.ThreadPoolExecutor(max(CLIENTS)), options=UNLIMITED)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("variables", {"push_and_pull": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    tell(port)
    server.wait_for_termination()


def grpcio_client(port: int, size: int) -> Callable[[], None]:
    call = grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED).unary_unary(METHOD)
    gradient = np.ones(size, np.float32)
    return lambda: unpacked(call(packed(gradient)))


# --- measuring -----------------------------------------------------------------------------------------------------

WAYS = {
    "sockets": (sockets_server, sockets_client),
    "pyzmq": (pyzmq_server, pyzmq_client),
    "grpcio": (grpcio_server, grpcio_client),
}


def serve(way: str, size: int, found: object) -> None:
    WAYS[way][0](size, found.put)


def drive(way: str, size: int, port: int, start: object, results: object) -> None:
    """One client: puts how many round trips it made in how many seconds, and its fastest."""
    push_and_pull = WAYS[way][1](port, size)
    push_and_pull()
    start.wait(60)
    begin = now = time.perf_counter()
    count, best = 0, float("inf")
    while now - begin < SECONDS or count < 2:
        push_and_pull()
        before, now = now, time.perf_counter()
        count, best = count + 1, min(best, now - before)
    results.put((count, now - begin, best))


def measure(processes: object, way: str, size: int, clients: int) -> tuple[float, float]:
    """Seconds of the fastest round trip, and round trips a second of all clients together."""
    found, results, start = processes.Queue(), processes.Queue(), processes.Barrier(clients)
    server = processes.Process(target=serve, args=(way, size, found), daemon=True)
    server.start()
    port = found.get(timeout=60)
    drivers = [processes.Process(target=drive, args=(way, size, port, start, results)) for _ in range(clients)]
    for driver in drivers:
        driver.start()
    measured = [results.get(timeout=60) for _ in drivers]
    for driver in drivers:
        driver.join(60)
    server.kill()
    return min(best for *_, best in measured), sum(count / seconds for count, seconds, _ in measured)


def main() -> None:
    processes = multiprocessing.get_context("fork")
    cases = [(clients, name, way) for clients in CLIENTS for name in SIZES for way in WAYS]
    fastest, most = dict.fromkeys(cases, float("inf")), dict.fromkeys(cases, 0.0)
    for _ in range(ROUNDS):
        for case in cases:
            clients, name, way = case
            best, rate = measure(processes, way, SIZES[name], clients)
            fastest[case], most[case] = min(fastest[case], best), max(most[case], rate)
    rows = []
    for case in cases:
        clients, name, way = case
        base = (clients, name, "sockets")
        megabytes = 2 * 4 * SIZES[name] * most[case] / 1e6
        ratio = f"{most[case] / most[base]:.2f}"
        rows.append((clients, name, way, f"{1e3 * fastest[case]:.3f}", f"{megabytes:.0f}", ratio))
    columns = ("clients", "array", "way", "fastest round trip, ms", "MB/s, both directions", "of sockets' rate")
    versions = f"pyzmq {zmq.__version__}, grpcio {grpc.__version__}."
    load = f"Load average {os.getloadavg()[0]:.0f} at the end: other work ran beside it; read the ratios."
    write("transports", "Transports of gradients and variables", columns, rows, f"{versions} {load}")


if __name__ == "__main__":
    main()
