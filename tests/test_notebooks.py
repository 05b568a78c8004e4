"""The notebooks of ``examples/notebooks``: their form, and that they run.

A notebook states its result as an assertion in a cell, so a statement that is false fails its run. ``./scripts/docs`` runs two
notebooks, ``./scripts/docs --notebooks`` all of them, in an environment that has nbclient and ipykernel.
"""

import ast
import json
import os
import re
from pathlib import Path

import pytest

from tests.pages import names_the_backend_first
from tests.support.processes import NOT_INHERITED

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
PATHS = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
IN_EACH_RUN_OF_DOCS = {"start", "kill_and_resume"}
LIMIT = 240  # seconds of a cell, far more than any here takes on a busy machine
FIELDS = {"cell_type", "id", "metadata", "source"}


def read(name):
    return json.loads(PATHS[name].read_text(encoding="utf-8"))


def code_of(notebook):
    """Return the text of each cell of code, without the cells that write a script."""
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [text for text in texts if not text.startswith("%%writefile ")]


def scripts_of(notebook):
    """Return the text of each script that a cell writes."""
    texts = ["".join(cell["source"]) for cell in notebook["cells"]]
    return [text.partition("\n")[2] for text in texts if text.startswith("%%writefile ")]


def test_there_are_seven():
    assert len(PATHS) == 7
    assert PATHS.keys() >= IN_EACH_RUN_OF_DOCS


@pytest.mark.parametrize("name", PATHS)
def test_notebook_has_the_format_of_version_4_5(name):
    notebook = read(name)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"]["language_info"]["name"] == "python"
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell.keys() == FIELDS | ({"outputs", "execution_count"} if cell["cell_type"] == "code" else set())
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert not cell["source"][-1].endswith("\n")
    identifiers = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.parametrize("name", PATHS)
def test_notebook_has_no_outputs_and_no_execution_counts(name):
    for cell in read(name)["cells"]:
        assert not cell.get("outputs"), cell["id"]
        assert cell.get("execution_count") is None, cell["id"]
        assert not cell["metadata"], cell["id"]


@pytest.mark.parametrize("name", PATHS)
def test_notebook_is_short_and_ends_with_its_statement(name):
    notebook = read(name)
    assert 5 <= len(notebook["cells"]) <= 9
    assert notebook["cells"][0]["source"][0].startswith("# ")
    statements = ast.parse(code_of(notebook)[-1]).body
    assert any(isinstance(statement, ast.Assert) for statement in statements)
    assert all(isinstance(statement, (ast.Assert, ast.Assign)) for statement in statements)


@pytest.mark.parametrize("name", PATHS)
def test_first_cell_of_code_sets_the_backend_before_keras_is_imported(name):
    notebook = read(name)
    setup, *others = code_of(notebook)
    assert notebook["cells"][1]["id"] == "setup"
    assert names_the_backend_first("\n".join([setup, "import keras", *others]))
    assert "pip wheel --no-deps ." in setup
    for script in scripts_of(notebook):
        is_translated = "tf.distribute" in script
        assert is_translated or names_the_backend_first(script)


def test_all_notebooks_have_the_same_setup():
    assert len({code_of(read(name))[0] for name in PATHS}) == 1


def test_readme_lists_each_notebook_once():
    readme = (NOTEBOOKS.parent / "README.md").read_text()
    assert sorted(re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", readme)) == list(PATHS)


def execute(notebook, folder):
    """Run a notebook in a folder, with the variables of a user's environment; raise if a cell fails."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: ./scripts/docs --notebooks")
    pytest.importorskip("ipykernel", reason="needs ipykernel beside nbclient: ./scripts/docs --notebooks")
    import nbformat

    environment = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", *NOT_INHERITED)}
    environment |= {"TMPDIR": str(folder), "IPYTHONDIR": str(folder)}
    node = nbformat.reads(json.dumps(notebook), as_version=4)
    nbformat.validate(node)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(node, timeout=LIMIT, kernel_name="python3", resources=resources).execute(env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in IN_EACH_RUN_OF_DOCS else pytest.param(name, marks=pytest.mark.nightly) for name in PATHS],
)
def test_notebook_runs(name, tmp_path):
    execute(read(name), tmp_path)


@pytest.mark.slow
def test_a_statement_that_is_false_fails_the_run(tmp_path):
    notebook = read("start")
    cell = notebook["cells"][-1] | {"source": ["undisturbed, resumed = 1, 2\n", "assert resumed == undisturbed"]}
    with pytest.raises(Exception, match=r"assert resumed == undisturbed[\s\S]*AssertionError"):
        execute(notebook | {"cells": [cell]}, tmp_path)
