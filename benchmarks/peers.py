"""Compare the time of a step under Lockstep, under other libraries, and at the limit of the machine.

Each competitor trains the same net on the same number of rows, alone on the machine: a round starts one after the other, waits until
it is compiled and warm, has it train three epochs, of which the median counts, and ends it. An epoch is one of a call of ``fit`` (a loop
in torch, bare steps for the limit) whose epochs wait for the driver. If a competitor has two processes, they start together, and the
slower one counts. Rows are synthetic, with the real shapes. Alive beside others, also if it only waits, TensorFlow is ten times slower.

====================  =================================================================================================
lockstep              ``MirroredStrategy(replicas=2)``: two replicas on the machine's CPU, one device with all threads
lockstep_2_devices    ``MirroredStrategy(["cpu:0", "cpu:1"])``: the same replicas on two logical CPU devices
keras                 Keras on JAX on one device, with the same global batch
keras_same_allocator  the same, with the allocator of Lockstep
data_parallel         ``keras.distribution.DataParallel`` on two CPU devices, with enough threads to avoid a deadlock
tensorflow            ``tf.distribute.MirroredStrategy`` on two logical CPUs, batches from a cache of ``tf.data``, not shuffled
limit                 two processes on a core each, with half of the batch and bare compiled steps that exchange nothing
lockstep_workers      ``MultiWorkerMirroredStrategy`` in two processes, each of which reads all rows
torch                 ``DistributedDataParallel`` with Gloo in two processes
====================  =================================================================================================

Ratios above 1 mean that the peer takes longer than Lockstep; each is the median of the ratios of the rounds. The ratio of the limit
is the share of the machine's limit that Lockstep reaches: 1 is no loss, the goal is 0.85. Lockstep and the limit start with the allocator that
``lockstep run`` gives its workers, the others with that of the system, as their users start them; ``--allocator`` and
``--peers-allocator`` change it. The last column names competitors whose rounds differ much.

To repeat it: ./scripts/test-inputs creates the environment of TensorFlow and torch; then, on an idle machine,
``python benchmarks/peers.py``. A case takes some minutes on two cores. ``--only mnist-64,cifar-128`` measures some cases and
keeps the others' results, where machine, versions and allocators are the same. With ``--competitors`` or ``--steps``, for
experiments, no results are kept. Lockstep is taken from the environment of the python that runs this.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import results_file
from bars import draw

from lockstep.launch.rank_assignment import reserved_addresses
from lockstep.launch.worker_environment import ALLOCATORS, choose_allocator, glibc_version, library_folders
from lockstep.tools.env import describe_machine

FOLDER, RESULTS = Path(__file__).parent / "peers", Path(__file__).parent / "results"
sys.path.insert(0, str(FOLDER))

from programs import Program


@dataclass(frozen=True)
class Case:
    """A net, its global batch, and how many steps take about two seconds."""

    net: str
    batch: int
    steps: int


CASES = {
    f"{net}-{batch}": Case(net, batch, steps)
    for net, batch, steps in (
        ("reuters", 32, 200),
        ("reuters", 256, 60),
        ("mnist", 64, 700),
        ("mnist", 256, 300),
        ("mnist", 512, 150),
        ("cifar", 128, 8),
        ("mobilenet", 32, 4),
        ("transformer", 64, 10),
    )
}


@dataclass(frozen=True)
class Competitor:
    """Its program, for how many processes, on which Keras (None: without), with whose allocator, and what else it needs."""

    program: str
    processes: int = 1
    backend: str | None = "jax"
    has_our_allocator: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs in the environment of TensorFlow and torch."""
        return self.backend != "jax"


TWO_DEVICES = (("XLA_FLAGS", "--xla_force_host_platform_device_count=2"), ("NPROC", "8"), ("PJRT_NPROC", "8"))
ONE_THREAD = (("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false"),)
HALF_OF_THE_CORES = (("OMP_NUM_THREADS", str(max(1, os.cpu_count() // 2))),)
COMPETITORS = {
    "lockstep": Competitor("with_lockstep.py", has_our_allocator=True),
    "lockstep_2_devices": Competitor("with_lockstep.py", has_our_allocator=True, variables=(("TWO_DEVICES", "1"),)),
    "keras": Competitor("with_keras.py"),
    "keras_same_allocator": Competitor("with_keras.py", has_our_allocator=True),
    "data_parallel": Competitor("with_keras.py", variables=TWO_DEVICES),
    "tensorflow": Competitor("with_tensorflow.py", backend="tensorflow"),
    "limit": Competitor("limit.py", 2, has_our_allocator=True, variables=ONE_THREAD),
    "lockstep_workers": Competitor("with_lockstep.py", 2, has_our_allocator=True),
    "torch": Competitor("with_torch.py", 2, backend=None, variables=HALF_OF_THE_CORES),
}
RATIOS = (
    ("keras", "lockstep"),
    ("keras_same_allocator", "lockstep"),
    ("data_parallel", "lockstep"),
    ("tensorflow", "lockstep"),
    ("limit", "lockstep"),
    ("lockstep_2_devices", "lockstep"),
    ("torch", "lockstep_workers"),
    ("limit", "lockstep_workers"),
)
EPOCHS = 3  # of a competitor in a round
UNEVEN, UNSTEADY = 1.25, "slowest / fastest round, above 1.25"
COLUMNS = ("case", "measured", "rounds", "steps", *(f"{name}, ms" for name in COMPETITORS))
COLUMNS += (*(f"{peer} / {ours}" for peer, ours in RATIOS), UNSTEADY)
# What would tell a program something else than is meant.
LEFT_OUT = {"XLA_FLAGS", "NPROC", "PJRT_NPROC", "OMP_NUM_THREADS", "TF_CONFIG", "RANK", "WORLD_SIZE", "KERAS_BACKEND"}


# --- starting -------------------------------------------------------------------------------------------------------------


def start(name, case, chosen, folder, addresses):
    """The program of a competitor."""
    competitor = COMPETITORS[name]
    python = chosen.peers_python if competitor.is_elsewhere else sys.executable
    command = [
        str(python),
        str(FOLDER / competitor.program),
        case.net,
        str(case.batch),
        str(chosen.steps or case.steps),
    ]
    environments = [environment(name, rank, chosen, addresses) for rank in range(competitor.processes)]
    return Program(name, command, environments, folder, chosen.timeout)


def environment(name, rank, chosen, addresses):
    competitor = COMPETITORS[name]
    left_out = LEFT_OUT | ({"PYTHONPATH"} if competitor.is_elsewhere else set())
    inherited = {key: value for key, value in os.environ.items() if key not in left_out}
    told = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if competitor.backend is not None:
        told["KERAS_BACKEND"] = competitor.backend
    if name == "lockstep_workers":
        told["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    elif competitor.processes > 1:
        host, port = addresses[0].split(":")
        world = str(competitor.processes)
        told |= {"RANK": str(rank), "WORLD_SIZE": world, "MASTER_ADDR": host, "MASTER_PORT": port}
    wanted = chosen.allocator if competitor.has_our_allocator else chosen.peers_allocator
    return {**inherited, **told, **dict(competitor.variables), **allocator(wanted).variables}


def allocator(wanted):
    return choose_allocator(wanted, os.environ, library_folders(os.environ), glibc_version())


# --- measuring ------------------------------------------------------------------------------------------------------------


def measure(case, chosen):
    """For each competitor, milliseconds of a step in each round."""
    names, times, trainable = list(chosen.competitors), {name: [] for name in chosen.competitors}, {}
    for number in range(chosen.rounds):
        first = number % len(names)  # Nobody always comes after the same other one.
        for name in names[first:] + names[:first]:
            trainable[name], found = measure_alone(name, case, chosen)
            times[name].append(found)
        if len(set(trainable.values())) > 1:
            raise SystemExit(f"{case.net}: these are not the same nets, by their trained parameters: {trainable}")
    return times


def measure_alone(name, case, chosen):
    """Number of trained parameters of a competitor, and milliseconds of its step."""
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        addresses = ends.enter_context(reserved_addresses(COMPETITORS[name].processes))
        program = start(name, case, chosen, folder, addresses)
        ends.callback(program.end)
        return program.trainable(), statistics.median(program.turn() for _ in range(EPOCHS))


def row(name, times, chosen):
    """One line of the table."""
    told = {"case": name, "measured": time.strftime("%Y-%m-%d"), "rounds": chosen.rounds}
    told["steps"] = chosen.steps or CASES[name].steps
    for competitor, found in times.items():
        told[f"{competitor}, ms"] = float(f"{statistics.median(found):.4g}")
    for peer, ours in RATIOS:
        if {peer, ours} <= set(times):
            ratios = [a / b for a, b in zip(times[peer], times[ours], strict=True)]
            told[f"{peer} / {ours}"] = round(statistics.median(ratios), 2)
    uneven = {competitor: max(found) / min(found) for competitor, found in times.items()}
    told[UNSTEADY] = ", ".join(f"{competitor} {ratio:.1f}" for competitor, ratio in uneven.items() if ratio > UNEVEN)
    return {column: told.get(column, "") for column in COLUMNS}


# --- keeping --------------------------------------------------------------------------------------------------------------


def setting(chosen):
    """What must be the same in all rows besides the machine."""
    versions = "from importlib.metadata import packages_distributions as of, version as v; print(', '.join("
    versions += "f'{name} {v(of()[name][0])}' for name in ('tensorflow', 'torch', 'keras')))"
    try:
        asked = subprocess.run([chosen.peers_python, "-c", versions], text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"--peers-python {chosen.peers_python}: TensorFlow, torch and Keras are not there ({error}); ./scripts/test-inputs makes "
            "an environment that has them, or name another python."
        ) from None
    # "tcmalloc", not where it lies.
    ours, theirs = (allocator(wanted).name.split(" (")[0] for wanted in (chosen.allocator, chosen.peers_allocator))
    return (
        f"Peers: {asked.stdout.strip()}. Allocator of Lockstep, of the limit and of keras_same_allocator: {ours}; of the other "
        f"peers: {theirs}."
    )


def kept(chosen):
    """Rows of earlier measurements by case, where they may stand beside new ones."""
    path = RESULTS / "peers.json"
    if len(chosen.only) == len(CASES) or not path.exists():
        return {}
    earlier, now = json.loads(path.read_text()), (without_date(describe_machine()), setting(chosen))
    before = (without_date(earlier["machine"]), earlier["note"].split("\n")[0])
    if before != now:
        raise SystemExit(
            f"{path}: its rows come from another setting, {' '.join(before)} Now it is {' '.join(now)} Measure all cases, "
            "without --only, or move the file away."
        )
    return {line["case"]: line for line in earlier["rows"]}


def without_date(machine):
    return machine.rpartition("; ")[0]


def keep(rows, chosen):
    rows = [rows[name] for name in CASES if name in rows]
    note = (
        f"{setting(chosen)}\n\nMedians of the rounds; a ratio is the median of the ratios of the rounds, above 1 where Lockstep is "
        "faster. Competitors: see the head of `benchmarks/peers.py`.\n\n![Ratios by case](peers.svg)"
    )
    title = "A training step of Lockstep and of its peers"
    # The rows may come from several calls; the command without options measures all of them.
    results_file.write("peers", title, COLUMNS, [tuple(line.values()) for line in rows], note, arguments=())
    named = [f"{peer} / {ours}" for peer, ours in RATIOS]
    groups = {line["case"]: {name: line[name] for name in named if line[name] != ""} for line in rows}
    draw(RESULTS / "peers.svg", "Time of a step against Lockstep's (right of 1: Lockstep is faster)", groups)


# --- the command ----------------------------------------------------------------------------------------------------------


def names(all_names):
    """A parser of names, separated by commas."""

    def parse(text):
        found = text.split(",")
        for name in found:
            if name not in all_names:
                raise argparse.ArgumentTypeError(f"{name}: expected some of {', '.join(all_names)}")
        return [name for name in all_names if name in found]

    return parse


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=names(CASES), default=list(CASES), help="cases, for example mnist-64,cifar-128")
    parser.add_argument("--competitors", type=names(COMPETITORS), default=list(COMPETITORS), help="nothing is kept")
    parser.add_argument("--steps", type=int, help="of a round, to try it out; nothing is kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="auto", help="of Lockstep and the limit")
    parser.add_argument("--peers-allocator", choices=ALLOCATORS, default="system", help="of the others")
    parser.add_argument("--peers-python", default=".venv-inputs/bin/python", help="with TensorFlow and torch")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a program may take to answer")
    return parser.parse_args()


def main():
    chosen = arguments()
    is_trial = chosen.steps is not None or len(chosen.competitors) < len(COMPETITORS)
    if not is_trial or any(COMPETITORS[name].is_elsewhere for name in chosen.competitors):
        setting(chosen)  # Better now than after the first programs.
    rows = {} if is_trial else kept(chosen)
    for name in chosen.only:
        times = measure(CASES[name], chosen)
        if is_trial:
            found = row(name, times, chosen)
            print(json.dumps({key: value for key, value in found.items() if value != ""}), flush=True)
        else:
            rows[name] = row(name, times, chosen)
            keep(rows, chosen)  # After each case: what comes later may fail.


if __name__ == "__main__":
    main()
