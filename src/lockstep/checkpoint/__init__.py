"""What survives: checkpoints on disk, whole or not at all."""
