"""A mutant, a change of one line of the package: find its line, and apply it to the source."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src", "lockstep")
DRAWN = Path(__file__).with_name("drawn.json")


class GoneError(Exception):
    """The line of a mutant is no longer in the sources, or several lines might be it."""


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Args:
        id: its name, which no other has.
        file: in ``src/lockstep``; if the line is not there, it is looked for in all files.
        old: the line, without its indentation.
        new: what stands there instead.
        what: the rule, or a sentence that says what is wrong.
        occurrence: which of the lines of the file that read the same; the first is 0.
        line: its number when it was drawn, for readers only.
    """

    id: str
    file: str
    old: str
    new: str
    what: str
    occurrence: int = 0
    line: int = 0

    @property
    def package(self) -> str:
        """The first folder of its file."""
        return self.file.partition("/")[0]

    def place(self, root: Path = ROOT) -> tuple[Path, int]:
        """Its file, relative to ``root``, and the number of its line, from 1.

        Raises:
            GoneError: the line is not there any more.
        """
        here = root / PACKAGE / self.file
        found = _lines_like(self.old, here) if here.exists() else []
        if len(found) > self.occurrence:
            return here.relative_to(root), found[self.occurrence]
        others = [(path, n) for path in sorted((root / PACKAGE).rglob("*.py")) for n in _lines_like(self.old, path)]
        if len(others) != 1:
            raise GoneError(
                f"{self.id} no longer applies: {self.file} has no line {self.old!r} (elsewhere: {len(others)})"
            )
        path, number = others[0]
        return path.relative_to(root), number

    def source(self, root: Path = ROOT) -> tuple[Path, str]:
        """Its file, relative to ``root``, and the text of that with the fault."""
        path, number = self.place(root)
        lines = (root / path).read_text().split("\n")
        lines[number - 1] = lines[number - 1].replace(self.old, self.new)
        return path, "\n".join(lines)


def _lines_like(line: str, path: Path) -> list[int]:
    return [n for n, text in enumerate(path.read_text().split("\n"), start=1) if text.strip() == line]


def drawn() -> list[Mutant]:
    """Those that were drawn."""
    return [Mutant(**fields) for fields in json.loads(DRAWN.read_text())]


def write_drawn(mutants: list[Mutant]) -> None:
    """Keep those that were drawn."""
    DRAWN.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1, ensure_ascii=False) + "\n")


def every() -> list[Mutant]:
    """All of them: those of ``by_hand`` first."""
    from tests.mutants.by_hand import FAULTS

    return [*FAULTS, *drawn()]
