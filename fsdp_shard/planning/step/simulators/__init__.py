"""Simulators of a training step's memory on one rank, one per wrapper (`shard=`)."""
