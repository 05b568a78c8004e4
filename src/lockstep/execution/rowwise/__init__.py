"""The proof that each row of a result follows from its own row of the batch alone.

``execution/call_splitter`` asks for it, and decides by it whether a model runs on replicas or on the global batch.
"""

from lockstep.execution.rowwise.proof import Trace, draws_for_each_row, infer_dependences, trace_for_rows
from lockstep.execution.rowwise.row_axes import (
    Mixed,
    RowAxis,
    RowDependence,
    RowMean,
    Seeded,
    is_fixed,
    move_rows_back,
    move_rows_first,
    source_location,
)

__all__ = [
    "Mixed",
    "RowAxis",
    "RowDependence",
    "RowMean",
    "Seeded",
    "Trace",
    "draws_for_each_row",
    "infer_dependences",
    "is_fixed",
    "move_rows_back",
    "move_rows_first",
    "source_location",
    "trace_for_rows",
]
