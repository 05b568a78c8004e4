"""Which random numbers a step draws, from its number alone: a worker that does it needs to know of no other step."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from lockstep.execution.replica import OutputMerge, replica_seed
from lockstep.parameter_server.state_deltas import difference

__all__ = ["SeedOffsets"]

Values = Sequence[np.ndarray]


class SeedOffsets:
    """What a step adds to the state of each seed, as one step has shown.

    Args:
        merges: how the values of the variables that are not trained meet, which says which are seeds.
        after: their values after that step.
        before: those before.
    """

    def __init__(self, merges: Sequence[OutputMerge], after: Values, before: Values) -> None:
        three = zip(merges, after, before, strict=True)
        self._drawn = [difference(new, old) if merge is OutputMerge.SEED else None for merge, new, old in three]

    def seeded(self, values: Values, steps: int, part: int = 0) -> list[np.ndarray]:
        """The values with the seeds of one step: as if so many steps before it had been drawn for.

        Args:
            values: of the variables that are not trained, before all these steps.
            steps: number of steps before.
            part: of the step; each draws other numbers.
        """
        own = list(values)
        for number, drawn in enumerate(self._drawn):
            if drawn is not None:
                seed = own[number] + drawn * drawn.dtype.type(steps)
                own[number] = np.asarray(replica_seed(jnp.asarray(seed), jnp.int32(part)))
        return own
