"""Claim: connections of strangers change no bit of a training, and leave no process, descriptor or memory behind.

Real jobs train on loopback: two workers, a cluster with a parameter server, and two nodes with a rendezvous. Meanwhile strangers connect to
every port on which a process of the job listens, JAX's own service excepted, and send random bytes, cut or changed frames of a real
handshake, lengths that are too large, nothing at all, or one byte after the other. The result must have the bits of an undisturbed run.

``python benchmarks/fuzz.py [CONNECTIONS [SEED]]``: so many connections in all, 10,000 by default.
"""

import contextlib
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONNECTIONS, SECONDS, PARALLEL, HELD = 10_000, 400, 16, 0.2
MIB = 64  # A job may grow by so much: its own training has a part of that.
COLUMNS = (
    "job",
    "ports",
    "connections",
    "digests that differ",
    "exit code",
    "processes left",
    "descriptors more",
    "MiB more",
)
PROGRAM = """
import hashlib, os, sys, time
os.environ["KERAS_BACKEND"] = "jax"
import keras, lockstep, numpy as np

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

servers = sys.argv[1] == "servers"
strategy = lockstep.ParameterServerStrategy(max_staleness=0) if servers else lockstep.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
model.fit(x, x.sum(axis=1, keepdims=True), batch_size=16, epochs=16, shuffle=False, verbose=0, callbacks=[Slow()])
if strategy.is_chief:
    weights = b"".join(np.ascontiguousarray(weight).tobytes() for weight in model.get_weights())
    print("digest", hashlib.sha256(weights).hexdigest(), flush=True)
"""


def commands(kind, program, port):
    """Commands of a job; each is a process of this machine."""
    run = [sys.executable, "-m", "lockstep.cli", "run"]
    if kind == "workers":
        return [[*run, "-n", "2", program, kind]]
    if kind == "servers":
        return [[*run, "--workers", "1", "--servers", "1", program, kind]]
    address = f"127.0.0.1:{port}"
    return [
        [*run, "--nnodes", "2:2", "--node-rank", str(rank), "--coordinator", address, program, kind] for rank in (0, 1)
    ]


class Job:
    """A job in a session of its own, so that all its processes are known."""

    def __init__(self, kind, folder):
        program = folder / f"{kind}.py"
        program.write_text(PROGRAM)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.output = folder / f"{kind}.txt"
        with self.output.open("wb") as output:
            self.processes = [
                subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
                for command in commands(kind, str(program), free_port())
            ]

    def members(self):
        """Processes of the job that are alive."""
        found, parents = {process.pid for process in self.processes}, parents_of_all()
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid for pid in found if pid in parents}

    def wait(self):
        """Wait for the end; return the digest and the largest exit code."""
        codes = [process.wait(SECONDS) for process in self.processes]
        digests = re.findall(r"digest (\w{64})", self.output.read_text(errors="replace"))
        return digests[-1] if digests else "none", max(codes, key=abs)

    def end(self):
        """End what is left, by process number."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def parents_of_all():
    """Parent of each process that has not ended."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    found[int(folder.name)] = int(parent)
    return found


def listening_ports(members):
    """Ports of TCP on which one of these processes listens, with its number."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found = {}
    for pid in members:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
                    if inode and inode[1] in inodes:
                        found[inodes[inode[1]]] = pid
    return found


def resources(pids):
    """Open descriptors and resident MiB of processes."""
    descriptors = megabytes = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            megabytes += int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024
    return descriptors, megabytes


def speaks_our_protocol(port):
    """Whether a listener answers a handshake as Lockstep's do; JAX's service does not."""
    from lockstep.distributed.control.handshake import hello, new_nonce
    from lockstep.distributed.control.transport import FramedSocket

    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as plain:
        connection = FramedSocket(plain.dup(), 1 << 16)
        connection.send(hello(new_nonce()))
        until = time.monotonic() + 3
        while time.monotonic() < until and connection.ended is None:
            connection.flush()
            if any(message.get("kind") == "challenge" for message in connection.receive()):
                connection.close()
                return True
            time.sleep(0.01)
        connection.close()
    return False


def payloads(rng):
    """Endless things that a stranger may send, with the seconds to hold the connection for."""
    from lockstep.distributed.control.handshake import hello, new_nonce

    while True:
        frame = hello(new_nonce())
        changed = bytearray(frame)
        changed[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        yield rng.randbytes(rng.randrange(1, 4096)), 0.0
        yield frame[: rng.randrange(len(frame))], 0.0
        yield bytes(changed), 0.0
        yield rng.randrange(1 << 31, 1 << 32).to_bytes(4, "big") + rng.randbytes(64), 0.0
        yield b"", HELD
        yield frame + frame + rng.randbytes(rng.randrange(64)), 0.0
        yield frame[: len(frame) // 2], HELD


def attack(ports, count, seed, stopped):
    """Connect ``count`` times to the ports in turn; return how often that was possible."""
    rng, made = random.Random(seed), 0
    for port, (data, hold) in itertools.islice(zip(itertools.cycle(ports), payloads(rng)), count):
        if stopped.is_set():
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as connection:
            made += 1
            connection.settimeout(2)
            connection.sendall(data)
            stopped.wait(hold)
    return made


def fuzzed(kind, folder, connections, seed):
    """Return a row: the same job undisturbed, then with strangers."""
    undisturbed, _ = Job(kind, folder).wait()
    job, stopped, made = Job(kind, folder), threading.Event(), []
    try:
        ports = await_ports(job)
        members = set(ports.values())
        before = resources(members)
        share = -(-connections // PARALLEL)
        threads = [
            threading.Thread(target=lambda n=n: made.append(attack(list(ports), share, seed + n, stopped)), daemon=True)
            for n in range(PARALLEL)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and job.processes[0].poll() is None:
            time.sleep(0.2)
        time.sleep(min(6.0, 1 + HELD))  # longer than connections are held
        after = resources(members)
        if ended := members - parents_of_all().keys():
            raise RuntimeError(f"{kind}: process {min(ended)} ended before what strangers had left was counted")
        stopped.set()
        for thread in threads:
            thread.join(10)
        everyone = job.members()
        digest, code = job.wait()
        left = len([pid for pid in everyone if pid in parents_of_all()])
    finally:
        job.end()
    grown = after[0] - before[0], round(after[1] - before[1], 1)
    return kind, len(ports), sum(made), int(digest != undisturbed or digest == "none"), code, left, *grown


def await_ports(job):
    """Wait until the job trains, and return its ports that speak our protocol, with the process that listens."""
    until, known = time.monotonic() + 90, {}
    while time.monotonic() < until and job.processes[0].poll() is None:
        found = listening_ports(job.members())
        if found and found == known:
            ours = {port: pid for port, pid in found.items() if speaks_our_protocol(port)}
            if ours:
                return ours
        known = found
        time.sleep(2)
    raise RuntimeError(f"the job opened no port: {job.output.read_text(errors='replace')[-800:]}")


def free_port():
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def is_wrong(row):
    """Whether a claim does not hold."""
    *_, differ, code, left, descriptors, mebibytes = row
    return bool(differ or code or left or descriptors > 0 or mebibytes > MIB)


def main(connections=CONNECTIONS, seed=None):
    """Fuzz each kind of job, and write the result; the exit code is 1 if a claim does not hold."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from results_file import write

    seed = random.randrange(1 << 32) if seed is None else seed
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(("workers", "servers", "nodes")):
            rows.append(fuzzed(kind, Path(folder), connections // 3, seed + 1000 * number))
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    write("fuzz", "Unauthenticated connections during a training", COLUMNS, rows, f"Seed {seed}.")
    return any(map(is_wrong, rows))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
