"""Text to token windows, and the one global order in which they are trained. Knows no model and no process group."""
