"""Whether a checkpoint is what it should be: against its digests, its config, another checkpoint."""
