"""One file an optimizer, with its config; parameter groups and learning-rate schedules."""
