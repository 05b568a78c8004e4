"""``lockstep migrate``: files, the difference, and what is left to be done by hand."""

import difflib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import OptionError
from lockstep.tools.migrate.edits import SourceText
from lockstep.tools.migrate.multi_worker_rules import is_for_workers
from lockstep.tools.migrate.name_resolution import ImportBindings
from lockstep.tools.migrate.translate import Translation, translate

__all__ = ["Migration", "migrate"]


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
