"""The proof that each row of a result follows from its own row of the batch alone."""

from lockstep.step.rowwise.places import Along, Average, Mixed, Place, with_rows_back, with_rows_first
from lockstep.step.rowwise.proof import places_of

__all__ = ["Along", "Average", "Mixed", "Place", "places_of", "with_rows_back", "with_rows_first"]
