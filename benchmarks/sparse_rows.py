"""Claim: if a batch looks up few rows of an embedding table, only these rows need to be sent.

One process serves an embedding and a last layer; this process is the worker: it pulls, computes the gradient of a batch, and pushes, once with
whole tables and once with rows. Word frequencies are as in texts: the n-th word has a share of 1/n. Cases: the embedding of the Reuters example
with its batches, and a table of 128 MB.
"""

import multiprocessing
import os
import socket
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from results_file import write

SECONDS = 6.0  # of each measurement

# Rows and width of the table; rows and length of a batch; the server's optimizer.
CASES = {
    "Reuters, Adam": (30_982, 7, 64, 300, "adam"),
    "1,000,000 x 32, SGD": (1_000_000, 32, 256, 8, "sgd"),
    "1,000,000 x 32, Adam": (1_000_000, 32, 256, 8, "adam"),
}


def model_of(height, width, length):
    layers = [keras.layers.Embedding(height, width), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(46)]
    return keras.Sequential([keras.Input((length,), dtype="int32"), *layers], name="net")


def serve_all(found, specs, optimizer):
    from lockstep.parameter_server.sharding import plan_shards
    from lockstep.parameter_server.variable_server import serve

    listener = socket.create_server(("127.0.0.1", 0))
    serve(0, plan_shards(specs, 1), keras.optimizers.get(optimizer), listener)
    found.put(listener.getsockname()[1])
    time.sleep(3600)


def measure(model, batches, address, specs, by_rows):
    """Updates a second, bytes of a step, and rows that were pulled in a step."""
    import jax

    from lockstep.distributed.control.handshake import Peer
    from lockstep.parameter_server.sharding import plan_shards
    from lockstep.parameter_server.sparse_rows import TouchedRows, sparsify
    from lockstep.parameter_server.variable_client import VariableClient

    client = VariableClient(plan_shards(specs, 1), [address], Peer(0, 1, "here", 0))
    client.fill({variable.path: variable.numpy() for variable in model.trainable_variables}, overwrite=True)
    touched = TouchedRows(model)

    @jax.jit
    def gradient(values, x):
        def loss_of(values):
            out, _ = model.stateless_call([values[spec.name] for spec in specs], [], x)
            return (out**2).mean()

        return jax.grad(loss_of)(values)

    def step(x):
        rows = touched.needed_rows(x) if by_rows else {}
        values = touched.full_tables(client.pull(rows), rows)
        if by_rows and not touched.is_decided:
            touched.decide(values, x, lambda values: gradient(values, x))
        found = gradient(values, x)
        found = {name: np.asarray(each) for name, each in found.items()}
        client.push(sparsify(found) if by_rows else found)
        return sum(map(len, rows.values()))

    for x in batches:  # Compiles for each number of rows.
        step(x)
    begin, count, rows, before = time.perf_counter(), 0, 0, sum(client.traffic)
    while time.perf_counter() - begin < SECONDS:
        rows += step(batches[count % len(batches)])
        count += 1
    used = time.perf_counter() - begin
    sent = sum(client.traffic) - before
    client.close()
    return count / used, sent / count, rows / count


def main():
    from lockstep.parameter_server.gradient_step import specs_of

    processes = multiprocessing.get_context("spawn")
    lines = []
    for name, (height, width, rows, length, optimizer) in CASES.items():
        model = model_of(height, width, length)
        specs, found, random = specs_of(model), processes.Queue(), np.random.default_rng(0)
        share = 1 / np.arange(1, height + 1)
        batches = [random.choice(height, (rows, length), p=share / share.sum()).astype("int32") for _ in range(8)]
        server = processes.Process(target=serve_all, args=(found, specs, optimizer), daemon=True)
        server.start()
        address = f"127.0.0.1:{found.get(timeout=100)}"
        for by_rows in (False, True):
            rate, sent, needed = measure(model, batches, address, specs, by_rows)
            table = "rows" if by_rows else "whole"
            lines.append((name, table, f"{needed:,.0f}" if by_rows else f"{height:,}", f"{sent:,.0f}", f"{rate:.1f}"))
        server.kill()
    write("sparse_rows", "Rows of embeddings", ("table", "travels", "rows a step", "bytes a step", "updates/s"), lines)


if __name__ == "__main__":
    main()
