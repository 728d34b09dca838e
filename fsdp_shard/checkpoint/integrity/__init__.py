"""Checks of checkpoints against digests (`verify`), a config, another checkpoint (`diff`); `summary` for inspect."""
