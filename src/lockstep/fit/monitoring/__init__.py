"""Step times, throughput, TensorBoard, progress display and the status file of a call of ``fit``."""
