"""What is public is listed, sorted, documented with an example, and named as in tf.distribute."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.collectives import ALGORITHMS

ROOT = Path(__file__).parents[1]


def public():
    for name in lockstep.__all__:
        item = getattr(lockstep, name)
        if inspect.isclass(item):
            yield name, item


def test_the_list_is_sorted_and_true():
    assert list(lockstep.__all__) == sorted(lockstep.__all__)
    assert {name for name in dir(lockstep) if not name.startswith("_")} >= set(lockstep.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Strategie'"):
        _ = lockstep.Strategie


def test_type_checkers_see_the_table():
    tree = ast.parse(Path(inspect.getfile(lockstep)).read_text())
    (block,) = (node.body for node in tree.body if isinstance(node, ast.If))
    seen: dict[str, list[str]] = {}
    for node in block:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.name == alias.asname for alias in node.names)
        seen.setdefault(node.module or "", []).extend(alias.name for alias in node.names)
    assert {module: tuple(names) for module, names in seen.items()} == lockstep._PUBLIC


def test_importing_lockstep_imports_neither_keras_nor_jax():
    code = "import sys, lockstep; lockstep.OptionError; print(sorted({'jax', 'keras', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("name", "item"), list(public()))
def test_every_public_class_is_documented(name, item):
    assert inspect.getdoc(item)
    for member, function in inspect.getmembers(
        item, lambda value: inspect.isfunction(value) or isinstance(value, property)
    ):
        if not member.startswith("_") and "with_traceback" not in member and "add_note" not in member:
            assert inspect.getdoc(function), f"{name}.{member}"


@pytest.mark.parametrize(
    "item",
    [
        lockstep.MirroredStrategy,
        lockstep.CentralStorageStrategy,
        lockstep.CommunicationOptions,
        lockstep.CrossDeviceOps,
        lockstep.testing.check_cross_device_ops,
        *ALGORITHMS.values(),
    ],
)
def test_what_a_user_makes_has_a_running_example(item):
    assert ">>> " in inspect.getdoc(item)


def test_every_algorithm_is_public():
    assert all(getattr(lockstep, algorithm.__name__) is algorithm for algorithm in ALGORITHMS.values())


def test_the_version_stands_in_the_changelog():
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == lockstep.__version__


def test_errors_form_the_tree_that_is_drawn():
    drawn = re.findall(r"[├└]── (\w+) .*\((\w+)\)", inspect.getdoc(inspect.getmodule(lockstep.LockstepError)))
    assert drawn
    for name, builtin in drawn:
        error = getattr(lockstep, name)
        assert issubclass(error, lockstep.LockstepError)
        assert builtin in {base.__name__ for base in error.__mro__}
    assert {name for name, _ in drawn} == {name for name in lockstep.__all__ if name.endswith("Error")} - {
        "LockstepError"
    }
