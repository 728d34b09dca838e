"""The teacher of distillation: its model, what it says of the samples on disk, and whether it fits a run."""
