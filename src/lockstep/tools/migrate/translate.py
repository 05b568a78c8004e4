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
from lockstep.tools.migrate.source import Edit, ImportBindings, SourceText, imports_of_ours
from lockstep.tools.migrate.todo_comments import TodoComment, marked, marks

__all__ = ["Migration", "Translation", "migrate", "translate"]

Rule = Callable[[SourceText, ImportBindings], Iterable[Edit]]

# Those that look at TensorFlow's names come before names are translated; imports come last, as they see what is still used.
RULES: tuple[Rule, ...] = (
    rewrite_rules.logical_devices,
    rewrite_rules.memory_growth,
    rewrite_rules.activations,
    rewrite_rules.reductions,
    rewrite_rules.one_device,
    rewrite_rules.sums,
    rewrite_rules.batch_normalization,
    rewrite_rules.old_arguments,
    rewrite_rules.methods,
    rewrite_rules.resets,
    rewrite_rules.cached_last,
    rewrite_rules.logits,
    rewrite_rules.whole_numbers,
    rewrite_rules.task_from_outside,
    rewrite_rules.shuffled_alike,
    imports.names,
    imports.imports,
)


@dataclass(frozen=True)
class Translation:
    """What has become of a program.

    Args:
        before: its text.
        after: its new text.
        marks: what is left to be done by hand, with the lines of ``after``.
    """

    before: str
    after: str
    marks: tuple[TodoComment, ...]

    @property
    def modules(self) -> set[str]:
        """The first words of what the new program imports."""
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
        for_workers: whether several workers run it, though it does not say so itself.

    Raises:
        OptionError: it is not Python.

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
    if not list(imports_of_ours(source)):
        return Translation(text, text, ())
    for rule in RULES:
        source = source.with_edits(rule(source, ImportBindings(source)))
    found = marks(source, ImportBindings(source))
    source = marked(source, found)
    return Translation(text, source.text, tuple(marks(source, ImportBindings(source))))


@dataclass(frozen=True)
class Migration:
    """One file.

    Args:
        path: as it was given.
        translation: of what is in it.
        is_written: whether the file has the new text.
    """

    path: str
    translation: Translation
    is_written: bool

    @property
    def difference(self) -> str:
        """A unified diff, which ``patch`` understands; empty where nothing changes."""
        before, after = (SourceText(text).lines for text in (self.translation.before, self.translation.after))
        lines = difflib.unified_diff(before, after, self.path, f"{self.path} (Lockstep)")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    @property
    def summary(self) -> str:
        """What was done, and by line what is left."""
        found = self.translation
        if found.before == found.after and not found.marks:
            return f"{self.path}: nothing to translate"
        state = "written" if self.is_written else "shown above; --write changes the file"
        lines = [f"{self.path}: {state}; {len(found.marks) or 'nothing'} left to you"]
        return "\n".join([*lines, *(f"  line {mark.line}: {mark.sentence}" for mark in found.marks)])


def migrate(paths: Sequence[str], *, write: bool = False) -> list[Migration]:
    """Translate the files of a program.

    Args:
        paths: of Python files.
        write: whether the files get the new text; each is replaced as a whole or not at all, and only where all can be translated.

    Raises:
        OptionError: one cannot be read or written, or is not Python.
    """
    texts = [_read(path) for path in paths]
    sources = [SourceText(text, path) for path, (text, _) in zip(paths, texts, strict=True)]
    for_workers = any(is_for_workers(ImportBindings(source)) for source in sources)
    found = [translate(source.text, source.path, for_workers=for_workers) for source in sources]
    for path, (text, newline), translation in zip(paths, texts, found, strict=True):
        if write and translation.after != text:
            _replace(Path(path), translation.after, newline)
    return [Migration(path, one, write and one.after != one.before) for path, one in zip(paths, found, strict=True)]


def _read(path: str) -> tuple[str, str | None]:
    """The text of a file, and how its lines end."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text, newline = file.read(), file.newlines
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}. Give Python files in UTF-8.") from None
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
            f"{path} cannot be written: {error}. Nothing was changed; give it the right to be written, or migrate a copy."
        ) from None
