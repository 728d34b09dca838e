"""The optimizers, each with its config; parameter groups and learning-rate schedules."""
