"""Scores classes, rewards and generated answers row by row against the data's."""
