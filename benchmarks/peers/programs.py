"""The driver's end of the talk with the programs: starts them, has them work in turn, ends them."""

import json
import selectors
import subprocess
import time
from pathlib import Path

SHOWN = 3000  # characters of the end of what a process wrote to standard error
PATIENCE = 10  # seconds that processes have to end by themselves


class Program:
    """The processes of one competitor; each answers in a line of JSON, within ``seconds``."""

    def __init__(self, name: str, command: list[str], environments: list[dict[str, str]], folder: Path, seconds: float):
        self.name, self._seconds = name, seconds
        self._errors = [folder / f"{name}-{rank}.txt" for rank in range(len(environments))]
        self._processes = []
        for environment, path in zip(environments, self._errors, strict=True):
            with path.open("w") as errors:
                process = subprocess.Popen(
                    command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                )
            self._processes.append(process)

    def trainable(self) -> int:
        """Wait until all are ready; the number of parameters that they train."""
        (count,) = {answer["trainable"] for answer in self._answers()}
        return count

    def turn(self) -> float:
        """Milliseconds of a step in one more epoch: those of the slowest process."""
        self._say("go")
        return max(answer["ms"] for answer in self._answers())

    def end(self) -> None:
        """Ask all to end, and see to it."""
        self._say("stop")
        for process in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def _say(self, word: str) -> None:
        for process in self._processes:
            try:
                process.stdin.write(f"{word}\n")
                process.stdin.flush()
            except BrokenPipeError:  # It has ended; what it answers, nothing, tells.
                continue

    def _answers(self) -> list[dict]:
        deadline, found = time.monotonic() + self._seconds, {}
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while waiting.get_map():
                events = waiting.select(max(0, deadline - time.monotonic()))
                if not events:
                    missing = sorted(key.data for key in waiting.get_map().values())
                    self._fail(missing, f"did not answer within {self._seconds:g} s")
                for key, _ in events:
                    line = key.fileobj.readline()  # Lines are written whole.
                    if not line:
                        self._fail([key.data], "has ended")
                    found[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in sorted(found)]

    def _fail(self, ranks: list[int], what: str) -> None:
        ends = [self._errors[rank].read_text(errors="replace")[-SHOWN:] for rank in ranks]
        shown = "\n".join(f"--- process {rank}\n{end}" for rank, end in zip(ranks, ends, strict=True))
        who = f"process {' and '.join(map(str, ranks))} of {len(self._processes)}"
        raise SystemExit(f"{self.name}: {who} {what}; the end of what it wrote:\n{shown}")
