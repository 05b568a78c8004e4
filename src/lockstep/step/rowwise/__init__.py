"""The proof that each row of a result follows from its own row of the batch alone."""

from lockstep.step.rowwise.places import Along, Average, Mixed, Place, with_rows_back, with_rows_first
from lockstep.step.rowwise.proof import Trace, places_of, traced

__all__ = ["Along", "Average", "Mixed", "Place", "Trace", "places_of", "traced", "with_rows_back", "with_rows_first"]
