"""Every public name has its entry in the reference, and what stands there is complete."""

import ast
import enum
import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import lockstep

PAGES = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.rst"))
MODULES = ("callbacks", "cluster_resolver", "config", "datasets", "experimental", "partitioners", "testing")


@dataclass(frozen=True)
class Entry:
    """A directive of a page: a name, whether Lockstep makes such objects itself, and its options."""

    kind: str
    name: str
    is_made_by_lockstep: bool
    options: dict[str, str]

    @cached_property
    def item(self):
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def is_shown(self, cls, member):
        if "no-members" in self.options or member in self.options.get("exclude-members", "").split(", "):
            return False
        return cls is self.item or ("inherited-members" in self.options and cls.__name__ not in self.options.values())


def entries():
    pattern = r"^\.\. (auto\w+|py:class|py:data):: (lockstep[\w.]*)(\(\))?\n((?:   :.*\n)*)"
    for page in PAGES:
        for kind, name, call, options in re.findall(pattern, page.read_text(), flags=re.MULTILINE):
            yield Entry(kind, name, bool(call), dict(re.findall(r":([\w-]+):\s?(.*)", options)))


ENTRIES = list(entries())


def documented():
    """What has a docstring of its own: functions, classes and their methods and properties, as (name, object, entry)."""
    for entry in ENTRIES:
        if entry.kind == "autofunction":
            yield entry.name, entry.item, entry
        elif entry.kind in ("autoclass", "autoexception"):
            yield entry.name, entry.item, entry
            stop = entry.options.get("inherited-members")
            for cls in entry.item.__mro__:
                if cls.__name__ == stop or not cls.__module__.startswith("lockstep"):
                    break
                for member, value in vars(cls).items():
                    if not member.startswith("_") and entry.is_shown(cls, member):
                        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                        if inspect.isfunction(value) or isinstance(value, property | cached_property):
                            yield f"{entry.name}.{member}", value, entry


DOCUMENTED = list(documented())
FUNCTIONS = [(name, item, entry) for name, item, entry in DOCUMENTED if inspect.isfunction(item)]
CLASSES = [(name, item, entry) for name, item, entry in DOCUMENTED if inspect.isclass(item)]
MADE = [
    (name, item, entry)
    for name, item, entry in CLASSES
    if not entry.is_made_by_lockstep and not issubclass(item, Exception | enum.Enum)
]


def each(cases):
    return pytest.mark.parametrize(("name", "item", "entry"), cases, ids=[name for name, _, _ in cases])


def section(item, title):
    found = re.search(rf"^{title}:\n((?:[ \t]+.*(?:\n|$)|\n)+)", inspect.getdoc(item) or "", flags=re.MULTILINE)
    return "" if found is None else textwrap.dedent(found.group(1))


def named(item, title):
    return [
        name.lstrip("*")
        for names in re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*):(?:\s|$)", section(item, title), flags=re.MULTILINE)
        for name in names.split(", ")
    ]


def parameters(item):
    return [name for name in inspect.signature(item).parameters if name != "self" and not name.startswith("_")]


def raised(function):
    """Names of our errors that the body of a function itself raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)} & set(lockstep.__all__)


def test_every_public_name_has_one_entry():
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names))
    wanted = {f"lockstep.{name}" for name in lockstep.__all__}
    for module in MODULES:
        wanted |= {f"lockstep.{module}.{name}" for name in getattr(lockstep, module).__all__}
    assert wanted - set(names) == {
        "lockstep.experimental.partitioners"
    }  # A module, which has an entry by its own name.


def test_what_has_another_entry_is_the_same():
    for entry in ENTRIES:
        if entry.kind == "py:class":
            assert entry.item is getattr(lockstep, entry.item.__name__)


@each(DOCUMENTED)
def test_it_begins_with_a_sentence(name, item, entry):
    first = (inspect.getdoc(item) or "").partition("\n\n")[0]
    assert first.endswith((".", ":")), first


@each(FUNCTIONS + MADE)
def test_its_arguments_are_those_of_the_signature(name, item, entry):
    assert named(item, "Args") == parameters(item)


@each(FUNCTIONS)
def test_what_it_returns_is_said(name, item, entry):
    returned = inspect.signature(item).return_annotation
    assert returned in (None, "None") or section(item, "Returns") or section(item, "Yields")


@each(FUNCTIONS + MADE)
def test_what_it_raises_is_said(name, item, entry):
    functions = (
        [item] if inspect.isfunction(item) else [vars(item).get(f"__{which}__") for which in ("init", "post_init")]
    )
    written = [
        function for function in functions if function is not None and function.__code__.co_filename != "<string>"
    ]
    assert {error for function in written for error in raised(function)} <= set(named(item, "Raises"))


def shown():
    """The code that other tests run: examples in docstrings, on pages, and the scripts."""
    root = PAGES[0].parents[2]
    yield from (inspect.getdoc(item) or "" for _, item, _ in DOCUMENTED)
    yield from (path.read_text() for path in (root / "examples").rglob("*.py"))
    for page in (root / "docs").rglob("*.md"):
        yield from re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


SHOWN = "\n".join(shown())


@each(FUNCTIONS + MADE)
def test_an_example_shows_it(name, item, entry):
    if name != entry.name or name.startswith("lockstep.datasets"):  # Methods; and what needs data.
        assert re.search(rf"^.*\w.*\.{item.__name__}\(", SHOWN, flags=re.MULTILINE)
    else:
        assert ">>> " in inspect.getdoc(item)
