"""`task=speed`: the measured sizes, the timed passes, the table and the plot."""
