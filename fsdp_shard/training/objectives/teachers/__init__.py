"""The teacher in distillation: its model, its targets for samples stored on disk, and checks that it fits a run."""
