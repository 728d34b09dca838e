"""Checks of checkpoints against digests (`verify`), a config or another checkpoint (`diff`), and `inspect`."""
