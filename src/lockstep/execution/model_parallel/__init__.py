"""Model parallelism: variables are sharded over axes of a mesh, by rules or by their use, and XLA partitions the step.

Start with ``model_shardings.py``; the choice by use is in ``auto_layout.py``.
"""
