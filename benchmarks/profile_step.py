"""Profile a step on CPUs: JAX's profiler over some steps of one net of ``peers/``, by kind of operation.

``python benchmarks/profile_step.py cifar 128``. Times are sums over all threads; an operation is named by its layer and primitive, from the
metadata that JAX passes to XLA.
"""

import collections
import gzip
import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import jax
import results_file
from nets import build
from rows import rows

import lockstep

STEPS, SHOWN = 6, 12
KINDS = {"conv": "convolutions", "dot": "products of matrices"}  # by what stands in an operation's name


def profile(net, batch):
    """Microseconds by name of the compiled operation, and the text of the program."""
    with lockstep.MirroredStrategy(replicas=2).scope():
        model = build(net)
    data = rows(net, batch * STEPS)
    dump = Path(os.environ["XLA_FLAGS"].rpartition("=")[2])
    model.fit(*data, batch_size=batch, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            model.fit(*data, batch_size=batch, verbose=0)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    texts = [path.read_text() for path in dump.glob("*cpu_after_optimizations.txt")]
    times = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            times[event["name"]] += event["dur"]
    return times, max(texts, key=len)


def origin(text, name):
    """Layer and primitive of an operation, from the compiled program."""
    found = re.search(rf"%{re.escape(name)} = .*?op_name=\"([^\"]*)\"", text)
    path = found[1] if found else name
    return "/".join(part for part in path.split("/")[1:] if not part.startswith(("jit(", "shard_map")))[:90] or name


def main():
    net, batch = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = f"--xla_dump_hlo_as_text --xla_dump_to={dump}"
        times, text = profile(net, batch)
    by_origin = collections.Counter()
    for name, micros in times.items():
        by_origin[origin(text, name)] += micros
    total = sum(times.values())
    shares = [
        (what, f"{micros / STEPS / 1000:.2f}", f"{100 * micros / total:.0f} %")
        for what, micros in by_origin.most_common(SHOWN)
    ]
    sums = {
        kind: sum(micros for what, micros in by_origin.items() if part in what.rpartition("/")[2])
        for part, kind in KINDS.items()
    }
    note = ", ".join(f"{kind} {100 * micros / total:.0f} %" for kind, micros in sums.items())
    title = f"Where a step of {net} goes, batch {batch}"
    results_file.write(
        f"profile_{net}", title, ("operation", "ms a step, all threads", "share"), shares, f"In all: {note}."
    )


if __name__ == "__main__":
    main()
