"""Saving and loading the shards that the ranks of a run hold: weights and optimizer state."""
