"""Environment variables of a job: a reader whose errors name the variable, its value and what was expected."""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep._errors import ClusterError

__all__ = ["GENERATION", "KEEP_MEMORY", "SECRET", "EnvReader"]

# Set by the launcher, or by the user for all processes of a job.
GENERATION = "LOCKSTEP_GENERATION"  # How many times the launcher has restarted the job.
SECRET = "LOCKSTEP_SECRET"  # Known to the processes of the job only, which prove it to each other.
KEEP_MEMORY = "LOCKSTEP_KEEP_MEMORY"  # "0" leaves the allocator as it is.


@dataclass(frozen=True)
class EnvReader:
    """The variables of one scheduler.

    Args:
        source: the scheduler, for messages.
        environ: names and values; nothing else is read, and nothing is written.
        cure: a sentence that says how to set a missing variable.
    """

    source: str
    environ: Mapping[str, str]
    cure: str

    def text(self, name: str, meaning: str) -> str:
        """Return a variable that must be set and not blank.

        Args:
            name: of the variable.
            meaning: a phrase for the error: ``"the number of processes"``.

        Raises:
            ClusterError: it is not set, or blank.
        """
        value = self.environ.get(name)
        if value is None or not value.strip():
            state = "is not set" if value is None else f"is {value!r}"
            raise ClusterError(f"{self.source}: {name}, {meaning}, {state}. {self.cure}")
        return value.strip()

    def integer(self, name: str, meaning: str, least: int = 0, most: int | None = None) -> int:
        """Return a variable that must be a whole number from ``least`` to ``most``.

        Raises:
            ClusterError: it is not set, or not such a number.
        """
        value = self.text(name, meaning)
        number = int(value) if value.isdecimal() and value.isascii() else None
        if number is None or number < least or (most is not None and number > most):
            allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ClusterError(
                f"{self.source}: {name}, {meaning}: expected a whole number {allowed}, got {value!r}. {self.cure}"
            )
        return number

    def index_and_count(self, index: str, count: str, what: str = "processes") -> tuple[int, int]:
        """Return the index of this process and the number of all: 0 <= index < count.

        Args:
            index: name of the variable with the index.
            count: name of the variable with the number.
            what: the things that are counted.

        Raises:
            ClusterError: one is not set or no number, or the index is too large.
        """
        all_ = self.integer(count, f"the number of {what}", least=1)
        own = self.integer(index, f"the number of this one of {all_} {what} ({count})", most=all_ - 1)
        return own, all_
