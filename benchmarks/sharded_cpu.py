"""Claim: on CPU devices, too, each device keeps its shards only, and the collectives are those of PyTorch's FSDP2.

Two blocks of ``sharded.py`` (width 512, 8 heads, 4 sequences of 64 positions on each device) with Adam, on four CPU devices. Bytes are those of
live arrays on the first device between two steps. The plans of Lockstep run in turn in this process; FSDP2 runs in four processes of its
own with Gloo, before them.

``python benchmarks/sharded_cpu.py``; ``./scripts/test-inputs`` makes the environment of torch.
"""

import json
import os
import socket
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import sharded  # It sets the platform, so it comes before JAX.
from results_file import write

import lockstep
from lockstep.tools.plan.hlo import collectives

DEVICES, BLOCKS, WIDTH, HEADS, LENGTH, ROWS = 4, 2, 512, 8, 64, 4
TURNS, STEPS = 5, 4
ROOT = Path(__file__).parents[1]
COLUMNS = (
    "plan",
    "weights, MiB",
    "optimizer, MiB",
    "step, MiB",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "step / replicated",
)
TORCH_NAMES = {"all-gather": "_allgather_base_", "reduce-scatter": "_reduce_scatter_base_", "all-reduce": "allreduce_"}
NOTE = (
    "MiB on one device between two steps, and what a step needs besides. Collectives: their number in a step, and of Lockstep the MiB of "
    "their results on a device. FSDP2 gathers the weights of a block together. Four devices share two cores, so the times show only what "
    "collectives and second computations cost; those of processes and of one process cannot be compared."
)


def torch_row():
    """Run FSDP2 in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = map(str, (BLOCKS, WIDTH, HEADS, LENGTH, ROWS))
    command = [ROOT / ".venv-inputs" / "bin" / "python", ROOT / "benchmarks" / "peers" / "with_fsdp.py", *sizes]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(DEVICES), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | address | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(DEVICES)
    ]
    found = [process.communicate(timeout=300)[0] for process in processes]
    told = json.loads(found[0].splitlines()[-1])
    counts = [told["collectives"].get(f"c10d.{name}", 0) or "none" for name in TORCH_NAMES.values()]
    return ("PyTorch FSDP2", *(round(size / sharded.MIB, 2) for size in told["bytes"]), "-", *counts, "-")


class Plan:
    """A model under one plan, its bytes and collectives, and the time of its steps."""

    def __init__(self, options):
        strategy = lockstep.MirroredStrategy([f"cpu:{number}" for number in range(DEVICES)], **options)
        sharded.WIDTH, net = WIDTH, sharded.Net(BLOCKS, HEADS, LENGTH, ROWS, has_words=False)
        with strategy.scope():
            self.model, row = sharded.made(net)
        self.x = np.repeat(row, DEVICES * ROWS * STEPS, 0)
        self.seconds()
        functions = strategy._functions_of(self.model)
        step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
        batch = (np.repeat(row, DEVICES * ROWS, 0),) * 2
        state = sharded.trainer.training_state(self.model, batch)
        program = step.compile_for(state, strategy._placement.abstract_batch(batch))
        self.temporaries = round(program.memory_analysis().temp_size_in_bytes / sharded.MIB, 2)
        self.collectives = list(map(sharded.listed(collectives(program.as_text())), sharded.NAMES))

    def seconds(self):
        """The time of a step."""
        began = time.perf_counter()
        self.model.fit(self.x, self.x, batch_size=DEVICES * ROWS, shuffle=False, verbose=0)
        return (time.perf_counter() - began) / STEPS

    def bytes(self):
        """MiB of weights and of the optimizer's variables on the first device."""
        kinds = self.model.weights, self.model.optimizer.variables
        return [round(sum(x.value.addressable_shards[0].data.nbytes for x in kind) / sharded.MIB, 2) for kind in kinds]


def main():
    """Measure and write the table."""
    row = torch_row()
    plans = {name: Plan(options) for name, options in sharded.PLANS.items()}
    times = {name: [] for name in plans}
    for _ in range(TURNS):
        for name, plan in plans.items():
            times[name].append(plan.seconds())
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, times["replicated"], strict=True))
        for name, own in times.items()
    }
    rows = [
        (name, *plan.bytes(), plan.temporaries, *plan.collectives, round(ratios[name], 2))
        for name, plan in plans.items()
    ]
    write("sharded_cpu", "Sharded variables on four CPU devices", COLUMNS, [*rows, row], NOTE, arguments=())


if __name__ == "__main__":
    main()
