"""One training step of a rank: what it keeps in memory, moment by moment."""
