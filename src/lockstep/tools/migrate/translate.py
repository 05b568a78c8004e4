"""Translate programs and files: apply the rules in order, add comments, show the difference or write."""

import ast
import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import OptionError
from lockstep.tools.migrate import imports, rewrite_rules
from lockstep.tools.migrate.rewrite_rules import is_for_workers
from lockstep.tools.migrate.source import Edit, ImportBindings, SourceText, relevant_imports
from lockstep.tools.migrate.todo_comments import TodoComment, add_comments, find_todos

__all__ = ["Migration", "Translation", "migrate", "translate"]

Rule = Callable[[SourceText, ImportBindings], Iterable[Edit]]

# Rules that match names of TensorFlow come before names are translated; imports come last, as they depend on the names in use.
RULES: tuple[Rule, ...] = (
    rewrite_rules.logical_devices,
    rewrite_rules.memory_growth,
    rewrite_rules.activations,
    rewrite_rules.reductions,
    rewrite_rules.one_device_strategy,
    rewrite_rules.add_n,
    rewrite_rules.batch_normalization,
    rewrite_rules.old_arguments,
    rewrite_rules.strategy_methods,
    rewrite_rules.metric_resets,
    rewrite_rules.cache_first,
    rewrite_rules.logits,
    rewrite_rules.integer_sizes,
    rewrite_rules.task_as_default,
    rewrite_rules.seed_shuffles,
    imports.rewrite_names,
    imports.rewrite_imports,
)


@dataclass(frozen=True)
class Translation:
    """The translation of a program.

    Args:
        before: original text.
        after: new text.
        todos: what needs manual work, with the lines of ``after``.
    """

    before: str
    after: str
    todos: tuple[TodoComment, ...]

    @property
    def modules(self) -> set[str]:
        """Top-level names of the modules that the new program imports."""
        found = [node for node in ast.walk(ast.parse(self.after)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [
            node.module or "" if isinstance(node, ast.ImportFrom) else one.name for node in found for one in node.names
        ]
        return {name.partition(".")[0] for name in names}


def translate(text: str, path: str = "script.py", *, for_workers: bool = False) -> Translation:
    r"""Translate a program for ``tf.distribute`` and ``tf.keras`` into one for Lockstep and Keras 3.

    Args:
        text: of the program.
        path: of its file, for messages.
        for_workers: whether several workers run it, even if this file does not create their strategy.

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
    source = SourceText(text, path, for_workers)
    if not list(relevant_imports(source)):
        return Translation(text, text, ())
    for rule in RULES:
        source = source.with_edits(rule(source, ImportBindings(source)))
    source = add_comments(source, find_todos(source, ImportBindings(source)))
    return Translation(text, source.text, tuple(find_todos(source, ImportBindings(source))))


@dataclass(frozen=True)
class Migration:
    """The translation of one file.

    Args:
        path: as the user gave it.
        translation: of the text.
        is_written: whether the new text was written to the file.
    """

    path: str
    translation: Translation
    is_written: bool

    @property
    def difference(self) -> str:
        """Unified diff for ``patch``; empty without changes."""
        before, after = (SourceText(text).lines for text in (self.translation.before, self.translation.after))
        lines = difflib.unified_diff(before, after, self.path, f"{self.path} (Lockstep)")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    @property
    def summary(self) -> str:
        """What was done, and by line what needs manual work."""
        translation = self.translation
        if translation.before == translation.after and not translation.todos:
            return f"{self.path}: nothing to translate"
        state = "written" if self.is_written else "shown above; --write changes the file"
        lines = [f"{self.path}: {state}; {len(translation.todos) or 'nothing'} left to do by hand"]
        return "\n".join([*lines, *(f"  line {todo.line}: {todo.sentence}" for todo in translation.todos)])


def migrate(paths: Sequence[str], *, write: bool = False) -> list[Migration]:
    """Translate the files of a program.

    Args:
        paths: of Python files.
        write: whether to replace the files. Each is replaced atomically, and only if all can be translated.

    Raises:
        OptionError: a file cannot be read or written, or is not valid Python.
    """
    texts = [_read(path) for path in paths]
    sources = [SourceText(text, path) for path, (text, _) in zip(paths, texts, strict=True)]
    for_workers = any(is_for_workers(ImportBindings(source)) for source in sources)
    translations = [translate(source.text, source.path, for_workers=for_workers) for source in sources]
    for path, (text, newline), translation in zip(paths, texts, translations, strict=True):
        if write and translation.after != text:
            _replace(Path(path), translation.after, newline)
    return [
        Migration(path, one, write and one.after != one.before) for path, one in zip(paths, translations, strict=True)
    ]


def _read(path: str) -> tuple[str, str | None]:
    """Read a file; return its text and its line end."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text, newline = file.read(), file.newlines
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read: {error}. Fix: give Python files in UTF-8.") from None
    return text, newline if isinstance(newline, str) else None


def _replace(path: Path, text: str, newline: str | None) -> None:
    try:
        number, beside = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}-")
        try:
            with open(number, "w", encoding="utf-8", newline=newline) as file:
                file.write(text)
            os.chmod(beside, path.stat().st_mode)
            os.replace(beside, path.resolve())
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error}. The file is unchanged. Fix: give write permission, or migrate a copy."
        ) from None
