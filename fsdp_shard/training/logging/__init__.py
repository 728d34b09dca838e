"""The reports of a run: metrics, progress, trackers, plots, profiles and the result."""
