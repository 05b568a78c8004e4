"""Run one example, plain and mirrored, and write what it printed to ``results.md`` beside it.

    python examples/record.py reuters -- "" "cpu:0 cpu:1"

Each word group after ``--`` is one run of mirrored.py with those arguments; single.py runs first, and asynchronous.py last, where there is one.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

from lockstep.tools.env import describe_machine

FOLDER = Path(__file__).parent
LAUNCHER = ("-m", "lockstep.cli", "run", "--workers", "2", "--servers", "1")


def main():
    name, _, *runs = sys.argv[1:]
    text = f"# {name}: what the scripts printed\n\n{describe_machine()}\n"
    scripts = [("single.py", ""), *(("mirrored.py", words) for words in runs)]
    if (FOLDER / name / "asynchronous.py").exists():
        scripts.append(("asynchronous.py", ""))
    for script, arguments in scripts:
        start = time.perf_counter()
        launcher = LAUNCHER if script == "asynchronous.py" else ()
        command = [sys.executable, *launcher, str(FOLDER / name / script), *arguments.split()]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(done.stdout)
        shown = " ".join(["lockstep", *launcher[2:]] if launcher else ["python"])
        shown = " ".join([shown, f"examples/{name}/{script}", *arguments.split()])
        text += f"\n`{shown}` ({seconds:.0f} s)\n\n```\n{kept(done.stdout)}\n```\n"
        print(text[-1500:], flush=True)
    (FOLDER / name / "results.md").write_text(text)


def kept(printed: str) -> str:
    """The lines that carry a result: of a progress bar only its last state, and no terminal codes."""
    plain = re.sub(r"\x1b\[[0-9;]*m|\x08|^\[chief\] ", "", printed, flags=re.MULTILINE)
    lines = [line.rstrip() for line in plain.splitlines()]
    wanted = r"val_|lockstep:|Total params|replicas|^ +\d+ +\d+ +0\.|Restoring|Creating|^\d+/\d+ - |^step \d*00,|^test accuracy"
    return "\n".join(re.sub(r"━+ ?|^\d+/\d+ .*(?=lockstep: )", "", line) for line in lines if re.search(wanted, line))


main()
