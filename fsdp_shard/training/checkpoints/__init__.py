"""Saving the steps of a run, resuming from one, and the lock on its directory."""
