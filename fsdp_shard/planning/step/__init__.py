"""One training step of a rank: its memory, point by point."""
