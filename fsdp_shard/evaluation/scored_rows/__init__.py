"""Classes, rewards and generated answers, scored row by row against those of the data."""
