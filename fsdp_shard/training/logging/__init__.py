"""What a run reports: metrics, progress, trackers, plots, profiles, its result."""
