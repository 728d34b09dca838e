"""One training step of a rank: what it keeps in memory, point by point."""
