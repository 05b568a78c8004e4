"""``KERAS_BACKEND=jax python -m tests.programs.page`` writes the table of docs/programs.md."""

from pathlib import Path

from .every import PROGRAMS

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
_HEAD = """# Programs

{count} models and training steps after the [examples of Keras](https://keras.io/examples/), at small size and with random data, each of which is compared with plain Keras on one device: `fit`,
`evaluate`, `predict`, saved and loaded (the weights, and the whole model where all its classes are those of Keras), with a short last batch, on two and three replicas, one and two devices, with and without `deterministic=True`
([tests/programs](../tests/programs/test_programs.py)). Most run by replicas. What runs on the global batch says why when it is trained; the numbers are those of one device there, too.

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
