"""The proof that each row of a result follows from its own row of the batch alone."""

from lockstep.execution.rowwise.proof import Trace, places_of, traced
from lockstep.execution.rowwise.row_axes import Mixed, Place, RowAxis, RowMean, with_rows_back, with_rows_first

__all__ = ["Mixed", "Place", "RowAxis", "RowMean", "Trace", "places_of", "traced", "with_rows_back", "with_rows_first"]
