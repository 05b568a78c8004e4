"""``Finding``, the result of a check, and ``Report``, the results of all checks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding", "Report"]


@dataclass(frozen=True)
class Finding:
    """A mistake in a program, or something that makes it slow.

    Args:
        name: short and stable, for example ``softmax-from-logits``.
        what: the observation.
        where: layer, variable, argument or file; "" for the whole program.
        why: why it matters.
        cure: the remedy.

    Example:
        >>> from lockstep.doctor.finding import Finding
        >>> print(Finding("small-batch", "a batch of 2 rows on 3 replicas", "fit", "one is idle", "Use 3 or more").line)
        small-batch: a batch of 2 rows on 3 replicas (fit): one is idle. Use 3 or more
    """

    name: str
    what: str
    where: str
    why: str
    cure: str

    @property
    def line(self) -> str:
        """The finding in one line, without a full stop."""
        where = f" ({self.where})" if self.where else ""
        return f"{self.name}: {self.what}{where}: {self.why}. {self.cure}"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.what}\n  where  {self.where or 'the whole'}\n  why    {self.why}\n  cure   {self.cure}"
        )


@dataclass(frozen=True)
class Report:
    """The findings of all checks.

    Args:
        findings: in the order of the checks.
        looked_at: what was checked, one line each.
        left_out: what could not be checked, and why.

    Example:
        >>> from lockstep.doctor.finding import Report
        >>> print(Report((), ("the loss",)))
        no findings
        looked at:
          the loss
    """

    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values.

        Returns:
            ``findings``, ``looked_at`` and ``left_out``.
        """
        found = [asdict(finding) for finding in self.findings]
        return {"findings": found, "looked_at": list(self.looked_at), "left_out": list(self.left_out)}

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        head = "no findings" if not count else f"{count} finding{'s' * (count > 1)}"
        blocks = [head, *(f"\n{finding}" for finding in self.findings)]
        blocks += [("\n" if count else "") + "looked at:", *(f"  {line}" for line in self.looked_at)]
        return "\n".join([*blocks, *_listed("left out:", self.left_out)])


def _listed(head: str, lines: Sequence[str]) -> list[str]:
    return [head, *(f"  {line}" for line in lines)] if lines else []
