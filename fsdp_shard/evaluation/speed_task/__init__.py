"""`task=speed`: which sizes are measured, the passes that are timed, the table and the plot."""
