"""The pages of ``docs/`` whose code runs in forks of a process that has imported Keras (the fixture ``python``).

Such a run cannot show that the code names the backend before it imports Keras, so that is read from the code.
"""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
IN_FORKS = (
    "batch_size",
    "central_storage",
    "collectives",
    "custom_loops",
    "determinism",
    "doctor",
    "inputs",
    "kerashub",
    "model_parallel",
    "monitoring",
    "nan_guard",
    "plan",
    "resume",
    "scaling",
    "several_machines",
    "sharding",
)
SETS_THE_BACKEND = ("os.environ['KERAS_BACKEND'] = 'jax'", "os.environ.setdefault('KERAS_BACKEND', 'jax')")


def text_of(name):
    """Return the text of a page."""
    assert name in IN_FORKS, f"docs/{name}.md is not in IN_FORKS, so that no test reads where it names the backend."
    return (DOCS / f"{name}.md").read_text()


def blocks_of(name):
    """Return the blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", text_of(name), flags=re.DOTALL)


def names_the_backend_first(code):
    """Return whether ``os.environ["KERAS_BACKEND"] = "jax"`` always runs before anything imports Keras or Lockstep.

    Where the variable is not set, ``setdefault`` does the same.
    """
    tree = ast.parse(code)
    imports = [node.lineno for node in ast.walk(tree) if {"keras", "lockstep"} & imported(node)]
    names = [node.lineno for node in tree.body if ast.unparse(node) in SETS_THE_BACKEND]
    return bool(imports and names) and min(names) < min(imports)


def imported(node):
    """Return the top-level packages that a node of a syntax tree imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()
