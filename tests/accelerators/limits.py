"""What a step may exchange and need, from its model and from Keras's own step on the same devices."""

from lockstep.execution.deterministic_rows import KEEP_FROM
from tests.accelerators.steps import KINDS, Case, Measured, Sizes

SMALL = 4096  # bytes of losses, metrics and seeds
CHIPS = 4  # TPUs v5e of one host
MANY = 256  # TPUs; for so many XLA writes all-gathers and reduce-scatters as all-reduces of whole arrays
# Largest memory beside that of Keras's own step. With deterministic=True residuals are results of one program and arguments of another.
MEMORY = {"uneven": 1.2, "deterministic": 2.0}
# A step of one program keeps so much in the vector memory of a TPU core, which is not counted.
VECTOR_MEMORY = 128 << 20
# Two normalizations whose outputs are added, as those of a block and of its projection, have equal gradients of their offsets: XLA adds up
# one of them.
EQUAL_GRADIENTS = {"ResNet50": 4 * (256 + 512 + 1024 + 2048)}
TILES = 1.02  # on TPUs, whose arrays are padded to tiles: of the largest axis of the outputs, to a multiple of 128


def faults(case: Case, found: Measured, keras: Measured, sizes: Sizes, rows: int, devices: int) -> list[str]:
    """Return a sentence for each limit that a step of a case exceeds.

    Args:
        case: net, plan and target.
        found: the step of Lockstep.
        keras: Keras's own step on an even batch; for an uneven one on the next even one.
        sizes: of the model.
        rows: of the batch, padding included.
        devices: their number.
    """
    outputs = rows * sizes.outputs
    allowed = _exchanges(case, keras, sizes, outputs, devices)
    if _gathers_by_all_reduces(case, devices):
        allowed = _as_all_reduces(allowed, devices)
    wrong = []
    for name, (number, size) in found.exchanged.items():
        most, largest = allowed.get(name, (0, 0))
        if number > most or size > largest:
            wrong.append(f"{number} {name} of {size} bytes: at most {most} of {largest} are expected")
    least = _least_reduced(case, sizes)
    if found.reduced(devices) < least:
        wrong.append(f"{found.reduced(devices)} bytes are reduced: the gradients and statistics have {least}")
    memory = _memory(case, keras, sizes, outputs, devices)
    if found.memory > memory:
        wrong.append(f"{found.memory} bytes of memory: at most {memory:.0f} are expected")
    donated = _least_donated(case, sizes)
    if found.donated < donated:
        wrong.append(f"{found.donated} arrays of the state are donated: expected {donated}")
    return [*wrong, *(f"an exchange with the host: {instruction}" for instruction in found.from_host)]


def _exchanges(case: Case, keras: Measured, sizes: Sizes, outputs: int, devices: int) -> dict[str, tuple[int, float]]:
    """Return for each collective the largest number and the most bytes."""
    averaged = sizes.gradients + sizes.statistics
    if case.plan == "predict":  # Each process returns all rows.
        return {"all-gather": (1, outputs)} if _has_several_hosts(case, devices) else {}
    if case.plan in KINDS:
        return {"all-reduce": (1, SMALL)}
    if case.plan == "shard_optimizer":
        # Arrays that the devices do not divide are reduced as in the fast plan. On TPUs slices are padded to tiles, and their rows move
        # to the neighbour.
        return {
            "all-gather": (sizes.trainable, 1.3 * sizes.gradients),
            "reduce-scatter": (sizes.trainable, 1.1 * sizes.gradients / devices + SMALL),
            "all-reduce": (keras.number_of("all-reduce") + 2, sizes.statistics + 0.02 * sizes.gradients + 4 * SMALL),
            "collective-permute": (sizes.trainable, sizes.gradients / devices),
        }
    if case.plan == "deterministic":
        # Large sums: parts are exchanged, added in the order of the tree, and gathered. Of small ones every device gets all.
        # Of large outputs what the loss and the metrics need is gathered; on TPUs XLA writes a small all-gather as an all-reduce.
        gathered = outputs if outputs < KEEP_FROM else outputs / 50
        size = 1.3 * sizes.gradients + devices * (sizes.statistics + 4 * SMALL) + gathered
        of_rows = {} if outputs < KEEP_FROM or not case.target.startswith("v5e") else {"all-reduce": (1, SMALL)}
        return {
            "all-to-all": (sizes.trainable, sizes.gradients),
            "all-gather": (sizes.trainable + 4, size),
            **of_rows,
        }
    return {"all-reduce": (keras.number_of("all-reduce"), averaged + SMALL)}


def _as_all_reduces(allowed: dict[str, tuple[int, float]], devices: int) -> dict[str, tuple[int, float]]:
    whole = {"all-reduce": 1, "all-gather": 1, "reduce-scatter": devices}
    found = [(allowed[name], times) for name, times in whole.items() if name in allowed]
    all_reduce = sum(number for (number, _), _ in found), sum(times * size for (_, size), times in found)
    return allowed | {"all-reduce": all_reduce}


def _least_reduced(case: Case, sizes: Sizes) -> int:
    if case.plan in KINDS or case.plan == "deterministic":
        return 0
    return sizes.gradients - EQUAL_GRADIENTS.get(case.net, 0) + sizes.statistics


def _gathers_by_all_reduces(case: Case, devices: int) -> bool:
    return case.target.startswith("v5e") and devices >= MANY


def _has_several_hosts(case: Case, devices: int) -> bool:
    return case.target.startswith("v5e") and devices > CHIPS


def _memory(case: Case, keras: Measured, sizes: Sizes, outputs: int, devices: int) -> float:
    times, more = MEMORY.get(case.plan, 1.05), 16 * SMALL
    is_gathered = case.plan == "deterministic" and outputs < KEEP_FROM
    if is_gathered or (case.plan == "predict" and _has_several_hosts(case, devices)):
        # Gathered, and what makes or reads them. An all-reduce that gathers reads as much as it writes.
        copies = 3 if is_gathered and _gathers_by_all_reduces(case, devices) else 2
        more += copies * outputs * (TILES if case.target.startswith("v5e") else 1)
    if case.target.startswith("v5e") and case.plan == "deterministic":
        more += VECTOR_MEMORY
    return times * keras.memory + more


def _least_donated(case: Case, sizes: Sizes) -> int:
    if case.plan in KINDS:
        return 0  # The state is kept.
    if case.plan == "run":
        return sizes.state - sizes.metrics
    if case.plan == "deterministic":
        # The learning rate is changed by no program, and statistics are added up in another one.
        return sizes.state - 1 - sizes.averaged
    return sizes.state
