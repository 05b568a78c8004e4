"""The learning rate of a larger batch, and how training comes to it: plain arithmetic."""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RULES", "WarmUp"]

RULES: dict[str, Callable[[float], float]] = {
    "linear": float,
    "sqrt": math.sqrt,
}  # of how many times larger the batch is


@dataclass(frozen=True)
class WarmUp:
    """From one rate to another, in a straight line over the steps.

    Args:
        base: rate of the first step.
        scaled: rate after the last step.
        steps: number of steps in between; 0: ``scaled`` from the first step on.
    """

    base: float
    scaled: float
    steps: int

    def rate(self, step: int) -> float:
        """Rate of a step, counted from 0."""
        return self.scaled if self.is_over(step) else self.base + (self.scaled - self.base) * step / self.steps

    def is_over(self, step: int) -> bool:
        """Whether the rate changes no more, in this step and later."""
        return step >= self.steps
