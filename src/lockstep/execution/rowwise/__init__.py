"""The proof that each row of a result follows from its own row of the batch alone.

``execution/call_splitter`` asks for it, and decides by it whether a model runs on replicas or on the global batch.
"""

from lockstep.execution.rowwise.proof import (
    RowProof,
    Trace,
    draws_for_each_row,
    prove_rows,
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
    "RowProof",
    "Trace",
    "draws_for_each_row",
    "is_fixed",
    "is_noise",
    "move_rows_back",
    "move_rows_first",
    "prove_rows",
    "statistic_of_replica",
    "trace_for_rows",
]
