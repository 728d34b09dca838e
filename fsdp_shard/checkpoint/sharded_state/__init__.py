"""Saves and loads the shards of a run's ranks: weights and optimizer state."""
