"""The proof that each row of a result follows from its own row of the batch alone.

Start with ``proof.py``. ``execution/call_splitter`` decides by it whether a model runs on replicas or on the global batch.
"""
