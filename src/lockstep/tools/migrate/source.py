"""A program to migrate: its source and edits, and what its names refer to."""

import ast
import inspect
import io
import operator
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

import keras

from lockstep._errors import OptionError
from lockstep._keras.graph import is_keras_class
from lockstep.tools.migrate.symbol_map import of_version_2, translated

Node = TypeVar("Node", bound=ast.AST)
ImportNode = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Edit:
    """Replacement of the characters from ``start`` up to ``end`` by ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class SourceText:
    """The source text of a program.

    Args:
        text: text of the whole file.
        path: path of the file, for messages.
        for_workers: whether several workers run it: another file of the program creates their strategy.
        with_strategy: whether another file of the program names a strategy.
    """

    text: str
    path: str = "script.py"
    for_workers: bool = False
    with_strategy: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree.

        Raises:
            OptionError: the text is not valid Python.
        """
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise OptionError(
                f"{self.path}, line {error.lineno}: {error.msg}. Fix: give a Python 3 script; export a notebook as a script first."
            ) from None

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their ends, split as Python does."""
        return list(io.StringIO(self.text, newline=""))

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return start and end of a node in the text; a decorated statement starts at its keyword."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def _at(self, line: int, column: int) -> int:
        """Convert a position of the parser (line from 1, column in bytes) to an index."""
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def first_line(self, node: ast.expr | ast.stmt) -> int:
        """Return the number of the line of a node, or of its first decorator."""
        return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])

    def line_start(self, node: ast.expr | ast.stmt) -> int:
        """Return the start of the line of a node, or of its first decorator."""
        return self._starts[self.first_line(node) - 1]

    def line_at(self, position: int) -> int:
        """Return the number of the line of an index."""
        return bisect_right(self._starts, position)

    @cached_property
    def _in_format_strings(self) -> set[ast.AST]:
        return {inner for node in self.nodes(ast.FormattedValue) for inner in ast.walk(node)}

    def can_quote(self, node: ast.AST) -> bool:
        """Return whether a string can replace a node: up to Python 3.11 its quotes may end the f-string around it."""
        return node not in self._in_format_strings

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """Return the edit that replaces a node by ``text``, without a final comment if another statement follows on the line."""
        start, end = self.span(node)
        if isinstance(node, ast.stmt) and self.text[end:].lstrip(" \t").startswith(";"):
            before, newline, last = text.rpartition("\n")
            text = before + newline + last.partition("  #")[0]
        return Edit(start, end, text)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def nodes(self, kind: type[Node]) -> Iterator[Node]:
        """Iterate over all nodes of a kind, outer ones first."""
        return (node for node in self._nodes if isinstance(node, kind))

    def with_edits(self, edits: Iterable[Edit]) -> "SourceText":
        """Apply edits, which must not overlap; those at the same position keep their order."""
        parts, at = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
            parts += [self.text[at : edit.start], edit.text]
            at = edit.end
        return replace(self, text="".join([*parts, self.text[at:]]))


_REPLACED = ("tensorflow", "tf_keras")  # Modules whose unused imports are removed.
MODULES = (*_REPLACED, "keras", "lockstep")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS, *_COMPREHENSIONS)


class Scopes:
    """The names that a program binds in each scope, except imports from TensorFlow, Keras and Lockstep, and ``aliases``."""

    def __init__(self, source: SourceText, aliases: Collection[ast.AST] = ()) -> None:
        self._parents = {child: node for node in source.nodes(ast.AST) for child in ast.iter_child_nodes(node)}
        self._bound: dict[ast.AST, set[str]] = defaultdict(set)
        for node in (node for node in source.nodes(ast.AST) if node not in aliases):
            for name in _bound_by(node):
                self._bound[next(self._enclosing(node))].add(name)

    def shadow(self, node: ast.AST, name: str) -> bool:
        """Return whether a scope around a node binds a name; methods do not see names bound by their class."""
        inner, *outer = self._enclosing(node)
        seen = [inner, *(scope for scope in outer if not isinstance(scope, ast.ClassDef))]
        return any(name in self._bound[scope] for scope in seen)

    def _enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Iterate over the scopes around a node, from the innermost."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, _SCOPES):
                yield node


def _modules_of(node: ast.AST) -> list[str]:
    """Return the modules that a node imports or imports from; none for relative imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def is_relevant_import(node: ast.AST) -> bool:
    """Return whether a node is an import from TensorFlow, Keras or Lockstep."""
    return any(map(is_relevant_module, _modules_of(node)))


def is_relevant_module(module: str) -> bool:
    """Return whether a module or a name in it is of TensorFlow, Keras or Lockstep."""
    return module.partition(".")[0] in MODULES


def _bound_by(node: ast.AST) -> list[str]:
    """Return the names that a node binds, except imports from TensorFlow, Keras and Lockstep."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ExceptHandler):
        return [node.name] if node.name else []
    if isinstance(node, ast.Import):
        return [
            alias.asname or alias.name.partition(".")[0] for alias in node.names if not is_relevant_module(alias.name)
        ]
    if isinstance(node, ast.ImportFrom) and not is_relevant_import(node):
        return [alias.asname or alias.name for alias in node.names]
    return []


@dataclass(frozen=True)
class DottedName:
    """A maximal dotted name in a program.

    Args:
        node: syntax tree of the name.
        name: full name that it refers to, such as ``tensorflow.keras.Model`` for ``tf.keras.Model``.
        root: its first word.
    """

    node: ast.Attribute | ast.Name
    name: str
    root: str


class ImportBindings:
    """The imports of a program, and other names that it gives to modules of Keras, as in ``K = tf.keras.backend``.

    Attributes:
        modules: the full name for each name that an import of TensorFlow, Keras or Lockstep binds, or that is given to a module.
        ambiguous: those of them that the program also binds to something else, with the statement.
    """

    def __init__(self, source: SourceText) -> None:
        self._source, self._stars = source, _names_of_stars(source)
        self.modules: dict[str, str] = {}
        self.ambiguous: dict[str, ast.stmt] = {}
        imported = list(self._imported())
        given = list(_module_names(source, {name: full for name, full, _ in imported}))
        self._scopes = Scopes(source, {target for target, _, _ in given})
        for name, full, statement in [*imported, *((target.id, full, one) for target, full, one in given)]:
            before = self.modules.setdefault(name, full)
            if self._scopes.shadow(statement, name) or translated(before) != translated(full):
                self.ambiguous[name] = statement

    def _imported(self) -> Iterator[tuple[str, str, ast.stmt]]:
        for statement in relevant_imports(self._source):
            for alias in self.names_of(statement):
                first = alias.name.partition(".")[0]
                if isinstance(statement, ast.ImportFrom):
                    yield alias.asname or alias.name, of_version_2(f"{statement.module}.{alias.name}"), statement
                elif first in MODULES:
                    yield alias.asname or first, of_version_2(alias.name) if alias.asname else first, statement

    def names_of(self, statement: ImportNode) -> list[ast.alias]:
        """Return what a statement imports; of ``import *`` also each name that the program uses."""
        return [*statement.names, *map(ast.alias, self._stars.get(statement, ()))]

    @cached_property
    def chains(self) -> list[DottedName]:
        """All maximal dotted names whose first word is an import."""
        return [chain for chain in self._chains if self._is_unambiguous(chain.node, chain.root)]

    @cached_property
    def has_strategy(self) -> bool:
        """Whether this file or another one of the program names a class of strategies."""
        return self._source.with_strategy or any(chain.name.endswith("Strategy") for chain in self._chains)

    def translated(self, name: str) -> str:
        """Translate a full dotted name of this program."""
        return translated(name, with_strategy=self.has_strategy)

    @cached_property
    def ambiguous_chains(self) -> list[DottedName]:
        """Dotted names whose first word may be an import."""
        return [chain for chain in self._chains if chain.root in self.ambiguous]

    @cached_property
    def _chains(self) -> list[DottedName]:
        inner = {id(node.value) for node in self._source.nodes(ast.Attribute)}
        found = []
        for node in self._source.nodes(ast.expr):
            if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
                words = _words(node)
                if words and words[0] in self.modules:
                    found.append(DottedName(node, self._full(words), words[0]))
        return found

    def name_of(self, node: ast.expr) -> str:
        """Return the full name of an expression; empty if it is no imported name."""
        words = _words(node)
        is_known = bool(words) and words[0] in self.modules and self._is_unambiguous(node, words[0])
        return self._full(words) if is_known else ""

    def _full(self, words: Sequence[str]) -> str:
        return of_version_2(".".join([self.modules[words[0]], *words[1:]]))

    def is_import_at(self, node: ast.AST, module: str) -> bool:
        """Return whether a module's own name means the module at a node, and nothing else of the program."""
        return translated(self.modules.get(module, module)) == module and not self._scopes.shadow(node, module)

    def _is_unambiguous(self, node: ast.AST, name: str) -> bool:
        return name not in self.ambiguous and not self._scopes.shadow(node, name)


def _module_names(source: SourceText, imported: Mapping[str, str]) -> Iterator[tuple[ast.Name, str, ast.stmt]]:
    """Iterate over the names that a program assigns modules of Keras to, with the full name of the module and the statement."""
    for statement in source.nodes(ast.Assign):
        if len(statement.targets) == 1:
            target, (root, *rest) = statement.targets[0], _words(statement.value) or [""]
            full = ".".join([imported.get(root, ""), *rest])
            becomes = translated(full)
            if isinstance(target, ast.Name) and exists(becomes) and inspect.ismodule(resolve(becomes)):
                yield target, full, statement


def relevant_imports(source: SourceText) -> Iterator[ImportNode]:
    """Iterate over the imports from TensorFlow, Keras and Lockstep."""
    for node in source.nodes(ast.stmt):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and is_relevant_import(node):
            yield node


def _names_of_stars(source: SourceText) -> dict[ast.stmt, list[str]]:
    """Return the names that a program uses by each ``import *``: it binds them nowhere else, and no later star has them."""
    imports = list(relevant_imports(source))
    stars = [one for one in imports if isinstance(one, ast.ImportFrom) and one.names[0].name == "*"]
    bound = _bound_names(imports).union(*map(_bound_by, source.nodes(ast.AST))) if stars else set()
    found: dict[ast.stmt, list[str]] = {}
    for name in sorted({node.id for node in source.nodes(ast.Name)} - bound):
        having = [star for star in stars if exists(translated(of_version_2(f"{star.module}.{name}")))]
        if having:
            found.setdefault(having[-1], []).append(name)
    return found


def _words(node: ast.AST) -> list[str]:
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else []


_STRICT = (keras.layers.Layer, keras.optimizers.Optimizer)
_TAKEN_OUT = re.compile(r'(?:kwargs\.pop\(\s*|if )"(\w+)"')  # Words that a constructor takes out of its ``**kwargs``.
_BACKEND = 'os.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.\n'
_HIDDEN = '.config.set_visible_devices([], "GPU")  # TensorFlow may read data; the GPUs are for JAX.'


def exists(name: str) -> bool:
    """Return whether Keras or Lockstep has an object of that full name."""
    try:
        return name.partition(".")[0] in ("keras", "lockstep") and resolve(name) is not None
    except AttributeError:
        return False


def resolve(name: str) -> Any:
    """Import and return the object of a full name.

    Raises:
        AttributeError: there is no such object.
    """
    module, _, rest = name.partition(".")
    found = import_module(module)
    return operator.attrgetter(rest)(found) if rest else found


def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of an object of Keras or Lockstep; none if it does not exist or has no signature."""
    try:
        return inspect.signature(resolve(name)).parameters if exists(name) else {}
    except (TypeError, ValueError):
        return {}


def arguments_taken(name: str) -> set[str] | None:
    """Return the named arguments that an object of Keras or Lockstep takes; None: any, or it does not exist.

    Layers and optimizers hand ``**kwargs`` on to their base classes, which refuse what is left.
    """
    parameters = parameters_of(name)
    if not parameters or not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return set(parameters) or None
    found, taken = resolve(name), set[str]()
    is_strict = inspect.isclass(found) and issubclass(found, _STRICT) and not issubclass(found, keras.Model)
    for kind in found.__mro__ if is_strict else ():
        if is_keras_class(kind) and "__init__" in vars(kind):
            method = vars(kind)["__init__"]
            taken |= {*inspect.signature(method).parameters, *_TAKEN_OUT.findall(inspect.getsource(method))}
    return taken or None


def new_names(bindings: ImportBindings) -> Iterator[tuple[DottedName, str]]:
    """Iterate over the dotted names that the translated imports would not resolve correctly, with what they become."""
    for chain in bindings.chains:
        root = bindings.modules[chain.root]
        is_plain = chain.root == root  # A plain import keeps its name.
        by_import = chain.name if is_plain else bindings.translated(root) + chain.name[len(root) :]
        becomes = bindings.translated(chain.name)
        if becomes not in (chain.name, by_import) and exists(becomes):
            yield chain, becomes


def rewrite_names(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite names: ``tf.keras.Model`` becomes ``keras.Model``."""
    for chain, becomes in new_names(bindings):
        if bindings.is_import_at(chain.node, becomes.partition(".")[0]):
            yield source.replaced(chain.node, becomes)


def rewrite_imports(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite imports, and add those that the translated names need."""
    used = {node.id for node in source.nodes(ast.Name)}
    statements = list(relevant_imports(source))
    written = {statement: _rewrite_import(statement, used, bindings) for statement in statements}
    missing = [name for name in ("keras", "lockstep") if _is_missing(name, source, bindings, written)]
    first = next(one for one in source.tree.body if any(map(_loads_keras, ast.walk(one))))
    staying = [
        one for one, imports in written.items() if _need_tensorflow(imports) and not _is_within_line(source, one)
    ]
    top = _head(source, missing, first)
    if not staying and _reads_by_tensorflow(source):
        top += "".join(f"{line}\n" for line in _hide_gpus(source, []))
    if first not in written:  # A block that contains an import, or a package such as keras_tuner.
        at = source.span(first)[0] if _modules_of(first) else source.line_start(first)
        yield Edit(at, at, top)
    for statement, imports in written.items():
        head = top if statement is first else ""
        hidden = _hide_gpus(source, imports) if statement in staying[:1] else []
        text = head + _separator(source, statement).join([*map(ast.unparse, imports), *hidden])
        if text != source.segment(statement):
            yield _replace_import(source, statement, text)


def _is_missing(
    name: str, source: SourceText, bindings: ImportBindings, written: Mapping[ImportNode, list[ImportNode]]
) -> bool:
    """Return whether a module is used above its imports or outside of the functions that import it."""
    functions = [*source.nodes(ast.FunctionDef), *source.nodes(ast.AsyncFunctionDef)]
    around: dict[ast.AST, set[ast.AST]] = defaultdict(set)
    for function in functions:
        for node in ast.walk(function):
            around[node].add(function)
    imports = [statement for statement, added in written.items() if name in _bound_names(added)]
    names = [node for node in source.nodes(ast.Name) if node.id == name]
    return not all(
        any(around[one] <= around[use] and one.lineno <= use.lineno for one in imports)
        for use in names
        if bindings.is_import_at(use, name)
    )


def _is_within_line(source: SourceText, statement: ast.stmt) -> bool:
    """Return whether a statement is in a block on the line of its header, as in ``if old: import tensorflow``."""
    return statement not in source.tree.body and _separator(source, statement) == "; "


def _separator(source: SourceText, statement: ast.stmt) -> str:
    """Return the separator of the imports that replace one import."""
    before = source.text[source.line_start(statement) : source.span(statement)[0]]
    return "; " if before.strip() else f"\n{before}"


def _head(source: SourceText, missing: Sequence[str], first: ast.stmt) -> str:
    """Return the lines to insert before the first import."""
    before = source.tree.body[: source.tree.body.index(first)]
    aliases = [alias for statement in before if isinstance(statement, ast.Import) for alias in statement.names]
    has_os = any(alias.name == "os" and not alias.asname for alias in aliases)
    words = [node.value for node in source.nodes(ast.Constant)] + [node.arg for node in source.nodes(ast.keyword)]
    needs_backend = "KERAS_BACKEND" not in words
    head = f"{'' if has_os else 'import os'}\n\n{_BACKEND}\n".lstrip("\n") if needs_backend else ""
    return head + "".join(f"import {name}\n" for name in missing)


def _loads_keras(node: ast.AST) -> bool:
    """Return whether a node imports a relevant module, or a package that imports Keras itself, such as ``keras_tuner``."""
    return is_relevant_import(node) or any(module.startswith("keras") for module in _modules_of(node))


def _need_tensorflow(imports: Iterable[ImportNode]) -> bool:
    modules = [module for node in imports for module in _modules_of(node)]
    return any(module.partition(".")[0] == "tensorflow" for module in modules)


def _reads_by_tensorflow(source: SourceText) -> bool:
    """Return whether functions of Keras or of TensorFlow Datasets read data by TensorFlow, even if its name is unused."""
    names = [words[-1] for words in map(_words, source.nodes(ast.expr)) if words]
    modules = [module.partition(".")[0] for node in source.nodes(ast.stmt) for module in _modules_of(node)]
    return "tensorflow_datasets" in modules or any(name.endswith("_dataset_from_directory") for name in names)


def _hide_gpus(source: SourceText, imports: Iterable[ImportNode]) -> list[str]:
    """Return the lines that hide the GPUs from TensorFlow, below the first import that stays; none if it has them."""
    if _HIDDEN in source.text:
        return []
    names = [
        alias.asname or "tensorflow"
        for alias in (alias for node in imports if isinstance(node, ast.Import) for alias in node.names)
        if alias.name == "tensorflow" or (alias.name.startswith("tensorflow.") and not alias.asname)
    ]
    name = next(iter(names), "tensorflow")
    added = [] if names else [f"import {name}"]
    return [*added, f"{name}{_HIDDEN}"]


def hides_gpus(source: SourceText, node: ast.expr) -> bool:
    """Return whether a node is in the line that the translation inserts to hide the GPUs from TensorFlow."""
    return _HIDDEN in source.lines[node.lineno - 1]


def _replace_import(source: SourceText, statement: ast.stmt, text: str) -> Edit:
    start, end = source.span(statement)
    text = text.rstrip("\n")
    follows = re.match(r"[ \t]*;[ \t]*", source.text[end:])
    if follows and text.endswith(_HIDDEN):
        separator = _separator(source, statement)
        return Edit(start, end + follows.end(), text + (separator if separator != "; " else "\n"))
    if text:
        return source.replaced(statement, text)
    whole_line = source.line_start(statement) == start and source.text[end : end + 1] == "\n"
    return Edit(start, end + 1, "") if whole_line else Edit(start, end, "pass")


def _rewrite_import(statement: ImportNode, used: set[str], bindings: ImportBindings) -> list[ImportNode]:
    """Return the imports that replace an import statement."""
    if isinstance(statement, ast.Import):
        imports = [node for alias in statement.names for node in _imports_of_alias(alias, used)]
        same = [f"import {ast.unparse(alias)}" for alias in statement.names]
        return [statement] if list(map(ast.unparse, imports)) == same else imports
    by_module: dict[str, list[ast.alias]] = {}
    star = translated(str(statement.module)) if statement.names[0].name == "*" else None
    for alias in bindings.names_of(statement):
        full = f"{statement.module}.{alias.name}"
        becomes = f"{star}.*" if alias.name == "*" else bindings.translated(full)
        if not becomes.endswith("*") and not exists(becomes):
            becomes = full
        module, _, last = becomes.rpartition(".")
        if alias.name == "*" or module != star:
            by_module.setdefault(module, []).append(_alias(last, alias.asname or alias.name))
    return [node for module, names in by_module.items() for node in _imports(module, names)]


def _imports(module: str, names: list[ast.alias]) -> list[ImportNode]:
    return [ast.ImportFrom(module, names, 0)] if module else [ast.Import([name]) for name in names]


def _alias(name: str, known: str) -> ast.alias:
    return ast.alias(name, None if known in (name, "*") else known)


def _imports_of_alias(alias: ast.alias, used: set[str]) -> list[ImportNode]:
    """Return the import of one module; none if its name is unused."""
    known = alias.asname or alias.name.partition(".")[0]
    if alias.name.partition(".")[0] in _REPLACED and known not in used:
        return []
    becomes = translated(alias.name) if alias.asname else alias.name
    module, _, last = becomes.rpartition(".")
    if becomes == alias.name or not exists(becomes):
        becomes = alias.name
    elif module:
        return _imports(module, [_alias(last, known)])
    return [ast.Import([_alias(becomes, alias.asname or becomes)])]


def _bound_names(imports: Iterable[ImportNode]) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
