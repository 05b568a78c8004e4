"""Claim: on TPUs and GPUs a step of each plan exchanges and needs what its model implies, beside Keras's own step.

``./scripts/test-accelerators --all "v5e 2x4" MLP CNN`` compiles the steps of these nets with all plans for devices that are only described
(``tests/accelerators/steps.py``) and adds them to the table; without names of nets all of them, without a target all TPUs. The exit code is 1
if a step exceeds a limit of ``tests/accelerators/limits.py``.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from bars import draw
from results_file import write

from tests.accelerators import steps
from tests.accelerators.limits import faults

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("target", "net", "plan", "rows", "programs", "collectives", "of Keras"),
    *("MiB a device", "of Keras, MiB", "ratio"),
)
MIB = 1 << 20
NOTE = (
    "Collectives with their number and the MiB of their results on a device, and the memory of a device: arguments, temporaries, and results "
    'that reuse no argument. "of Keras" is `jax.jit` of Keras\'s own step with an even batch, for an uneven one the next, that is cut over the '
    "devices; its batch normalization sees the global batch. With `deterministic=True` a step has several programs; memory is that of the largest.\n\n"
    "![Memory of a step beside Keras's own step](compiled.svg)"
)


def rows_of(net, target):
    """Compile the steps of a net with all plans; return their rows of the table, and a sentence for each limit that is exceeded."""
    devices = len(steps.devices(target))
    sizes, baselines, rows, wrong = steps.sizes(net), {}, [], []
    for plan in steps.PLANS:
        case, kind = steps.Case(net, plan, target), steps.KINDS.get(plan, "train")
        batch = kind, steps.padded_rows(case)
        if batch not in baselines:
            baselines[batch] = steps.measure_keras(case)
        keras, found = baselines[batch], steps.measure(case)
        wrong += [f"{case}: {each}" for each in faults(case, found, keras, sizes, steps.padded_rows(case), devices)]
        rows.append(
            (
                *(target, net, plan, steps.rows_of(case), found.programs, listed(found), listed(keras)),
                *(round(one.memory / MIB, 2) for one in (found, keras)),
                round(found.memory / keras.memory, 2),
            )
        )
    return rows, wrong


def listed(found):
    """Return the collectives in a cell."""
    each = [f"{number} {name} {size / MIB:.2f}" for name, (number, size) in found.exchanged.items()]
    return ", ".join(each) or "none"


def recorded():
    """Return the rows of the table that is there, by target and net."""
    file, found = RESULTS / "compiled.json", {}
    for row in json.loads(file.read_text())["rows"] if file.exists() else ():
        found.setdefault((row["target"], row["net"]), []).append(tuple(row[column] for column in COLUMNS))
    return found


def record(found):
    """Write the table and the picture, in the order of targets and nets."""
    known = [(target, net) for target in steps.TARGETS for net in steps.NETS]
    missing = {target: [net for net in steps.NETS if (target, net) not in found] for target in steps.TARGETS}
    named = "; ".join(f"{target}: {', '.join(nets)}" for target, nets in missing.items() if nets)
    note = NOTE + (f"\n\nNot compiled: {named}." if named else "")
    rows = [row for one in known for row in found.get(one, ())]
    write("compiled", "Steps compiled for devices that are only described", COLUMNS, rows, note, arguments=())
    ratio = COLUMNS.index("ratio")
    groups = {
        f"{net}, {target}": {row[2]: row[ratio] for row in found[target, net]}
        for target, net in known
        if (target, net) in found
    }
    draw(RESULTS / "compiled.svg", "Memory of a device in a step, beside Keras's own step", groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", choices=steps.TARGETS, help="by default all TPUs")
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"by default all: {', '.join(steps.NETS)}")
    options = parser.parse_args()
    if unknown := sorted(set(options.nets) - set(steps.NETS)):
        parser.error(f"there is no net {', '.join(unknown)}; nets: {', '.join(steps.NETS)}")
    targets = [options.target] if options.target else [name for name in steps.TARGETS if name.startswith("v5e")]
    wrong = []
    for target in targets:
        for net in options.nets or steps.NETS:
            rows, more = rows_of(net, target)
            record(recorded() | {(target, net): rows})
            wrong += more
    print("\n".join(wrong) or "no limit is exceeded")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
