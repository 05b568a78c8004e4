"""Translation of a program: rules in order, and comments where a person must decide.

``lockstep migrate`` prints the translation, and with ``--check`` runs it up to its first fit.
"""

import ast
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedWriter
from itertools import takewhile
from pathlib import Path

from lockstep._atomic_files import replace_file
from lockstep._errors import OptionError
from lockstep.doctor.base import Report
from lockstep.tools.doctor_command import Tell, examine_script, tell_report
from lockstep.tools.env import environment_set
from lockstep.tools.migrate import rewrite_rules, source
from lockstep.tools.migrate.incompatibilities import find_incompatibilities
from lockstep.tools.migrate.rewrite_rules import (
    activated_logits,
    is_for_workers,
    worker_differences,
)
from lockstep.tools.migrate.source import (
    Edit,
    ImportBindings,
    SourceText,
    arguments_taken,
    exists,
    hides_gpus,
    is_relevant_module,
    new_names,
    relevant_imports,
)
from lockstep.tools.migrate.symbol_map import short, translated, why_absent

_PREFIX = "# lockstep migrate: "
_INSTEAD = {"batch_input_shape": "put keras.Input(batch_shape=…) before it"}
_LEAVE_OUT = "leave it out, or see its documentation"
_EXTENDED = "strategy.extended has no counterpart; see docs/custom_loops.md"
_AMBIGUOUS = (
    "the script also uses this name for something else, so names that begin with it stay: give one of them another name"
)
_UNDONE = "the result of this rule is not valid Python; do it by hand, and remove this comment: "


@dataclass(frozen=True)
class TodoComment:
    """A comment about something that is not translated.

    Args:
        line: line of the statement, from 1.
        sentence: what it is, and what to write.
    """

    line: int
    sentence: str


def find_todos(source: SourceText) -> list[TodoComment]:
    """Find what needs manual work, by line; each sentence once per statement."""
    statements = _lines_of_statements(source)
    found = {
        TodoComment(_first_line(statements, node.lineno), text)  # type: ignore[attr-defined]  # Such nodes have one.
        for node, text in _find_all(source, ImportBindings(source))
    }
    return sorted(found.union(_undone(source)), key=lambda mark: (mark.line, mark.sentence))


def add_comments(source: SourceText, found: list[TodoComment]) -> SourceText:
    """Add a comment above each statement, unless it has that comment already."""
    edits = []
    for mark in found:
        line = source.lines[mark.line - 1]
        indent = line[: len(line) - len(line.lstrip())]
        comment = f"{indent}{_PREFIX}{mark.sentence}\n"
        above = _comments(reversed(source.lines[: mark.line - 1]))
        start = sum(len(one) for one in source.lines[: mark.line - 1])
        if comment not in above:
            edits.append(Edit(start, start, comment))
    return source.with_edits(edits)


def _comments(lines: Iterable[str]) -> list[str]:
    """Return the comments at the beginning of lines."""
    return list(takewhile(lambda line: line.lstrip().startswith("#"), lines))


def _undone(source: SourceText) -> Iterator[TodoComment]:
    """Find comments about rules that failed."""
    for number, line in enumerate(source.lines, start=1):
        if line.lstrip().startswith(_PREFIX + _UNDONE):
            below = number + 1 + len(_comments(source.lines[number:]))
            yield TodoComment(below, line.strip().removeprefix(_PREFIX))


def _find_all(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    for chain in bindings.chains:
        reason = _reason(chain.name)
        if reason and not hides_gpus(source, chain.node):
            yield chain.node, f"{short(chain.name)}: {reason}"
    for statement in relevant_imports(source):
        for alias in statement.names:
            name = f"{statement.module}.{alias.name}" if isinstance(statement, ast.ImportFrom) else alias.name
            if alias.name != "*" and is_relevant_module(name) and (reason := _reason(name)):
                yield statement, f"{short(name)}: {reason}"
    for call in source.nodes(ast.Call):
        name = bindings.name_of(call.func)
        for argument in _unknown_arguments(call, name):
            yield call, f"{name} has no argument {argument!r}: {_INSTEAD.get(argument, _LEAVE_OUT)}"
    yield from find_incompatibilities(source, bindings)
    yield from worker_differences(source, bindings)
    yield from _ambiguous(bindings)
    yield from activated_logits(source, bindings)
    for node in source.nodes(ast.Attribute):
        if node.attr == "extended" and isinstance(node.value, ast.Name):
            yield node, _EXTENDED


def _ambiguous(bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    """Find what keeps names from being translated: ambiguous imports, and other meanings of the translated names."""
    for chain, becomes in new_names(bindings):
        root = becomes.partition(".")[0]
        if not bindings.is_import_at(chain.node, root):
            yield chain.node, f"{root}: {_AMBIGUOUS}"
    for chain in bindings.ambiguous_chains:
        root = bindings.modules[chain.root]
        by_import = bindings.translated(root) + chain.name[len(root) :]
        if bindings.translated(chain.name) != by_import or _reason(chain.name):
            yield bindings.ambiguous[chain.root], f"{chain.root}: {_AMBIGUOUS}"


def _reason(name: str) -> str | None:
    """Return what to write instead of a name; None if it may stay."""
    becomes = translated(name)
    then = name.replace("lockstep.", "tensorflow.distribute.", 1)  # From an import that is already translated.
    if known := why_absent(name) or why_absent(becomes) or (why_absent(then) if not exists(becomes) else None):
        return known
    if becomes.startswith("tensorflow") or exists(becomes):
        return None
    operation = becomes.replace("keras.backend.", "keras.ops.", 1)
    instead = f"; there is {operation}" if operation != becomes and exists(operation) else ""
    return f"{'Keras 3' if becomes.startswith('keras') else 'Lockstep'} has no such name{instead}"


def _unknown_arguments(call: ast.Call, name: str) -> list[str]:
    """Return the named arguments of a call that the translated function does not accept."""
    taken = arguments_taken(name)
    return [] if taken is None else [one.arg for one in call.keywords if one.arg and one.arg not in taken]


def _lines_of_statements(source: SourceText) -> list[tuple[int, int]]:
    return [(source.first_line(one), one.end_lineno or one.lineno) for one in source.nodes(ast.stmt)]


def _first_line(statements: Iterable[tuple[int, int]], line: int) -> int:
    """Return the first line of the innermost statement around a line, of the first and last lines of all."""
    return max((first for first, last in statements if first <= line <= last), default=line)


Rule = Callable[[SourceText, ImportBindings], Iterable[Edit]]

# Rules that match names of TensorFlow come before names are translated; imports come last, as they depend on the names in use.
RULES: tuple[Rule, ...] = (
    rewrite_rules.aliases,
    rewrite_rules.memory_settings,
    rewrite_rules.logical_devices,
    rewrite_rules.activations,
    rewrite_rules.reductions,
    rewrite_rules.one_device_strategy,
    rewrite_rules.add_n,
    rewrite_rules.batch_normalization,
    rewrite_rules.old_arguments,
    rewrite_rules.strategy_methods,
    rewrite_rules.metric_resets,
    rewrite_rules.learning_rates,
    rewrite_rules.cache_first,
    rewrite_rules.logits,
    rewrite_rules.integer_sizes,
    rewrite_rules.task_as_default,
    rewrite_rules.seed_shuffles,
    source.rewrite_names,
    source.rewrite_imports,
)


@dataclass(frozen=True)
class Translation:
    """The translation of one file, with what needs manual work by lines of the new text."""

    path: str
    before: str
    after: str
    todos: tuple[TodoComment, ...] = ()
    is_written: bool = False

    @property
    def modules(self) -> set[str]:
        """Top-level names of the modules that the new program imports."""
        found = [node for node in ast.walk(ast.parse(self.after)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [
            node.module or "" if isinstance(node, ast.ImportFrom) else one.name for node in found for one in node.names
        ]
        return {name.partition(".")[0] for name in names}

    @property
    def difference(self) -> str:
        """Unified diff for ``patch``; empty without changes."""
        before, after = (SourceText(text).lines for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, self.path, f"{self.path} (Lockstep)")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    @property
    def summary(self) -> str:
        """What was done, and by line what needs manual work."""
        if self.before == self.after and not self.todos:
            return f"{self.path}: nothing to translate"
        state = "written" if self.is_written else "shown above; --write changes the file"
        if self.before == self.after:
            state = "nothing to translate"
        lines = [f"{self.path}: {state}; {len(self.todos) or 'nothing'} left to do by hand"]
        return "\n".join([*lines, *(f"  line {todo.line}: {todo.sentence}" for todo in self.todos)])


def translate(
    text: str, path: str = "script.py", *, for_workers: bool = False, with_strategy: bool = False
) -> Translation:
    r"""Translate a program for ``tf.distribute`` and ``tf.keras`` into one for Lockstep and Keras 3.

    Args:
        text: text of the program.
        path: path of its file, for messages.
        for_workers: whether several workers run it, even if this file does not create their strategy.
        with_strategy: whether the program has a strategy, even if this file does not name it.

    Raises:
        OptionError: the text is not valid Python.

    Example:
        >>> print(translate("import tensorflow as tf\nstrategy = tf.distribute.MirroredStrategy()").after)
        import os
        <BLANKLINE>
        os.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.
        <BLANKLINE>
        import lockstep
        strategy = lockstep.MirroredStrategy()
    """
    source = SourceText(text, path, for_workers, with_strategy)
    if not list(relevant_imports(source)):
        return Translation(path, text, text)
    for rule in RULES:
        source = _apply(rule, source)
    source = add_comments(source, find_todos(source))
    return Translation(path, text, source.text, tuple(find_todos(source)))


def _apply(rule: Rule, source: SourceText) -> SourceText:
    """Apply a rule; if the result is not valid Python, add a comment instead."""
    edits = list(rule(source, ImportBindings(source)))
    result = source.with_edits(edits)
    try:
        ast.parse(result.text)
    except SyntaxError:
        line = _first_line(_lines_of_statements(source), source.line_at(edits[0].start))
        what = (rule.__doc__ or rule.__name__).partition("\n")[0]
        return add_comments(source, [TodoComment(line, _UNDONE + what)])
    return result


def migrate(paths: Sequence[str], *, write: bool = False) -> list[Translation]:
    """Translate the files of a program; with ``write`` replace each atomically, and only if all can be translated.

    Raises:
        OptionError: a file cannot be read or written, or is not valid Python.
    """
    texts = [_read(path) for path in paths]
    sources = [SourceText(text, path) for path, (text, _) in zip(paths, texts, strict=True)]
    bindings = [ImportBindings(source) for source in sources]
    for_workers, with_strategy = any(map(is_for_workers, bindings)), any(one.has_strategy for one in bindings)
    translations = [
        translate(source.text, source.path, for_workers=for_workers, with_strategy=with_strategy) for source in sources
    ]
    found = [replace(one, is_written=write and one.after != one.before) for one in translations]
    for one, (_, newline) in zip(found, texts, strict=True):
        if one.is_written:
            _replace(Path(one.path), one.after, newline)
    return found


def _read(path: str) -> tuple[str, str | None]:
    """Read a file; return its text and its line end."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text, newline = file.read(), file.newlines
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be read: {error.strerror or error}. Fix: give the paths of Python files."
        ) from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: cannot be read: {error}. Fix: give Python files in UTF-8.") from None
    return text, newline if isinstance(newline, str) else None


def _replace(path: Path, text: str, newline: str | None) -> None:
    def write(file: BufferedWriter) -> None:
        file.write(text.replace("\n", newline or "\n").encode())
        os.fchmod(file.fileno(), path.stat().st_mode)

    try:
        replace_file(path.resolve(), write)
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error}. The file is unchanged. Fix: give write permission, or migrate a copy."
        ) from None


_ONE_WORKER = {"cluster": {"worker": ["127.0.0.1:12421"]}, "task": {"type": "worker", "index": 0}}


def run_migrate(paths: Sequence[str], *, write: bool, check: bool) -> int:
    """Translate the files of a program, and print the differences and the remaining work.

    With ``check`` the new program is run up to its first ``fit``, which the doctor examines.

    Returns:
        The exit code: 0; 1 if work remains or the doctor has findings; 2 if the program fails before its first fit.
        A program with parameter servers is not run.

    Raises:
        LockstepError: the program cannot be translated.
    """
    translations = migrate(paths, write=write)
    for one in translations:
        print(one.difference, end="", flush=True)
    for one in translations:
        print(one.summary, file=sys.stderr)
    remaining = any(one.todos for one in translations)
    return _check(translations, int(remaining)) if check else int(remaining)


def _check(translations: Sequence[Translation], least: int) -> int:
    """Run the new program up to its first fit; return the exit code, which is ``least`` or more."""
    script = _script_of(translations)
    if any(_has_servers(one) for one in translations):
        start = f"lockstep run --workers 2 --servers 1 {script.path}"
        print(
            f"--check does not run {script.path}, as it needs parameter servers; start it with: {start}",
            file=sys.stderr,
        )
        return least

    def tell(run: Callable[[], Report]) -> int:
        failure = f"{script.path} failed before its first fit."
        return max(least, tell_report(run, "lockstep migrate --check", failure, show))

    def show(report: Report) -> None:
        print(f"{script.path} reaches its first fit. {report}", file=sys.stderr)

    return tell(lambda: _examine(translations, script, tell))


def _has_servers(translation: Translation) -> bool:
    return is_for_workers(ImportBindings(SourceText(translation.after)), "ParameterServerStrategy")


def _script_of(translations: Sequence[Translation]) -> Translation:
    """Return the file that no other file imports; the last one if there are several."""
    imported = [
        one
        for one in translations
        if any(Path(one.path).stem in other.modules for other in translations if other is not one)
    ]
    return next((one for one in reversed(translations) if one not in imported), translations[-1])


_LAUNCHER = """__file__ = {path!r}  # Beside which the program may look for its data.
with open({text!r}, encoding="utf-8") as file:
    code = compile(file.read(), file.name, "exec")
exec(code)
"""


def _examine(translations: Sequence[Translation], script: Translation, tell: Tell) -> Report:
    """Run the program in a temporary folder, as one worker; modules that were not translated are found beside the script."""
    names = [Path(one.path).name for one in translations]
    if len(set(names)) < len(names):
        raise OptionError(
            f"--check: several files have the same name: {', '.join(sorted(names))}. Fix: give the files of one program."
        )
    with tempfile.TemporaryDirectory() as folder, _environment_of(script.path):
        texts = Path(folder, "translated")
        texts.mkdir()
        for name, one in zip(names, translations, strict=True):
            (texts / name).write_text(one.after, encoding="utf-8")
            launcher = _LAUNCHER.format(path=os.path.abspath(one.path), text=str(texts / name))
            Path(folder, name).write_text(launcher, encoding="utf-8")
        return examine_script(str(Path(folder, Path(script.path).name)), (), tell, is_quiet=True)


@contextmanager
def _environment_of(path: str) -> Iterator[None]:
    """Set the environment of a program: a cluster of one worker, and the folder of the script in ``sys.path``."""
    sys.path.append(str(Path(path).resolve().parent))
    try:
        with environment_set({"TF_CONFIG": json.dumps(_ONE_WORKER)}):
            yield
    finally:
        sys.path.pop()
