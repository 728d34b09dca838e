"""Runs the corpus: each case through every command that reads such a thing, in children of one warm process."""
