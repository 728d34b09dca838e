"""Simulators of a training step's memory on one rank, one for each wrapper (`shard=`)."""
