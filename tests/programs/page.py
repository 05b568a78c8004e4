"""``KERAS_BACKEND=jax python -m tests.programs.page`` writes the table of docs/programs.md."""

from pathlib import Path

from .every import PROGRAMS

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
_HEAD = """# Programs

{count} models and training steps after the [examples of Keras](https://keras.io/examples/), at small
size and with random data. Each is compared with plain Keras on one device: `fit`, `evaluate`,
`predict`, save and load (the weights, and the whole model if all its classes are Keras's), with a
short last batch, on two and three replicas, on one and two devices, with and without
`deterministic=True` ([tests/programs](../tests/programs/test_programs.py)). Most are split into
replicas. A program that runs on the global batch has the numbers of one device, too, and a log line
gives the reason.

| example | area | runs |
| --- | --- | --- |
"""


def text() -> str:
    """The whole page."""
    rows = [
        f"| {program.name} | {program.area} | {f'on the global batch: {program.global_batch}' if program.global_batch else 'by replicas'} |"
        for program in PROGRAMS
    ]
    return _HEAD.format(count=len(PROGRAMS)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
