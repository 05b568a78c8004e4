"""What must be seen on a real accelerator, in parts that each end within nine minutes: ``./scripts/accelerator``."""
