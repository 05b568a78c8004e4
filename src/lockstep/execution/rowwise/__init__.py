"""The proof that each row of a result follows from its own row of the batch alone.

``execution/call_splitter`` asks for it, and decides by it whether a model runs on replicas or on the global batch.
"""

from lockstep.execution.rowwise.proof import (
    Trace,
    draws_for_each_row,
    infer_dependences,
    statistic_of_replica,
    trace_for_rows,
)
from lockstep.execution.rowwise.row_axes import (
    Mixed,
    RowAxis,
    RowDependence,
    RowMean,
    is_fixed,
    is_noise,
    move_rows_back,
    move_rows_first,
)

__all__ = [
    "Mixed",
    "RowAxis",
    "RowDependence",
    "RowMean",
    "Trace",
    "draws_for_each_row",
    "infer_dependences",
    "is_fixed",
    "is_noise",
    "move_rows_back",
    "move_rows_first",
    "statistic_of_replica",
    "trace_for_rows",
]
