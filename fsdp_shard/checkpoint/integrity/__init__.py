"""Comparing a checkpoint with its digests, with its config, or with another checkpoint."""
